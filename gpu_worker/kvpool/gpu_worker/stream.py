"""The streams of a rank to the server. Each has its own connection, and a thread that reads."""

import queue
import threading
from collections.abc import Callable
from itertools import chain
from typing import Final, assert_never

import grpc

from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.ranks.messages import Registration
from kvpool.gpu_worker.rank_effects import Fenced, Heartbeat, Initialized, Leave, SessionsGone, WorkerMessage
from kvpool.v1 import worker_pb2, worker_pb2_grpc
from kvpool.wire.channels import CHANNEL_OPTIONS, ClientCredentials
from kvpool.wire.errors import from_rpc_error
from kvpool.wire.pools import mapping_processes_to_proto
from kvpool.wire.ranks import registration_to_proto

Incoming = worker_pb2.JoinResponse | KvpoolError
"""A message, or the error that ended the call."""

_OPTIONS: Final = (
    *CHANNEL_OPTIONS,
    # Each stream has its own connection, so that the next stream does not wait on a network that is cut off.
    # Missing heartbeats show either side that the network is cut off.
    ("grpc.use_local_subchannel_pool", 1),
)


def registration_request(pool: str, registration: Registration) -> worker_pb2.JoinRequest:
    """Encodes the first message of a stream."""
    return worker_pb2.JoinRequest(register=registration_to_proto(pool, registration))


def message_request(message: WorkerMessage) -> worker_pb2.JoinRequest:
    """Encodes a later message of a stream."""
    match message:
        case Initialized(epoch, allocation):
            shapes = [
                worker_pb2.TensorShape(layer_name=name, shape=shape, dtype=dtype)
                for name, shape, dtype in allocation.shapes
            ]
            initialized = worker_pb2.Initialized(
                epoch=epoch,
                num_blocks=allocation.num_blocks,
                allocated_bytes=allocation.allocated_bytes,
                shapes=shapes,
            )
            return worker_pb2.JoinRequest(initialized=initialized)
        case Heartbeat(sequence, processes):
            mapping = mapping_processes_to_proto(processes)
            return worker_pb2.JoinRequest(heartbeat=worker_pb2.Heartbeat(sequence=sequence, mapping_processes=mapping))
        case Fenced(sequence, pending):
            fenced = worker_pb2.Fenced(fence_sequence=sequence, pending_session_numbers=pending)
            return worker_pb2.JoinRequest(fenced=fenced)
        case SessionsGone(numbers):
            return worker_pb2.JoinRequest(sessions_gone=worker_pb2.SessionsGone(session_numbers=numbers))
        case Leave():
            return worker_pb2.JoinRequest(leave=worker_pb2.Leave())
        case _:
            assert_never(message)


class RankCall:
    """A call of Join, over a connection of its own, and the thread that reads it."""

    def __init__(
        self,
        address: str,
        access: ClientCredentials,
        first: worker_pb2.JoinRequest,
        deliver: Callable[["RankCall", Incoming], None],
    ) -> None:
        """Starts the call.

        Args:
            address: Address of the server.
            access: Credentials of the rank; their files are read now.
            first: The registration.
            deliver: Called from the thread with each message and, as the last call, with the error that ended the call.

        Raises:
            ValueError: A file of `access` cannot be read.
        """
        self._first = first
        self._deliver = deliver
        self._channel = access.channel(address, _OPTIONS)
        self._outgoing: queue.SimpleQueue[worker_pb2.JoinRequest | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="kvpool-join", daemon=True)
        self._reader.start()

    def send(self, request: worker_pb2.JoinRequest) -> None:
        """Queues a message."""
        self._outgoing.put(request)

    def finish(self, timeout_seconds: float) -> None:
        """Sends the queued messages and waits for the server to end the call, then cancels the call."""
        self._outgoing.put(None)
        self._reader.join(timeout_seconds)
        self.cancel()

    def cancel(self) -> None:
        """Cancels the call and closes its connection."""
        self._outgoing.put(None)
        self._channel.close()

    def _read(self) -> None:
        error: KvpoolError = UnavailableError("STREAM_ENDED", "the server ended the stream")
        outgoing = chain([self._first], iter(self._outgoing.get, None))
        try:
            for incoming in worker_pb2_grpc.WorkerServiceStub(self._channel).Join(outgoing):
                self._deliver(self, incoming)
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
        except ValueError:  # cancelled before it began
            error = UnavailableError("CANCELLED", "the call was cancelled")
        self._deliver(self, error)
