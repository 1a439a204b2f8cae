"""The calls of a rank to the server. Each has its own connection, and a thread that reads."""

import queue
import threading
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Final, assert_never

import grpc

from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.ranks.messages import Registration
from kvpool.gpu_worker.rank_effects import Fenced, Heartbeat, Initialized, Leave, SessionsGone, WorkerMessage
from kvpool.v1 import directory_pb2, directory_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvpool.wire.channels import CHANNEL_OPTIONS, ClientCredentials
from kvpool.wire.errors import from_rpc_error
from kvpool.wire.pools import mapping_processes_to_proto
from kvpool.wire.ranks import registration_to_proto
from kvpool.wire.seeds import ShardAddress

Incoming = worker_pb2.JoinResponse | ShardAddress | KvpoolError
"""A message, the shard of the pool, or the error that ended the call."""
FirstMessage = directory_pb2.PlaceRequest | worker_pb2.JoinRequest
"""The question for the shard of a pool, or the registration."""
_PLACE_TIMEOUT_SECONDS: Final = 5.0

_OPTIONS: Final = (
    *CHANNEL_OPTIONS,
    # Each stream has its own connection, so that the next stream does not wait on a network that is cut off.
    # Missing heartbeats show either side that the network is cut off.
    ("grpc.use_local_subchannel_pool", 1),
)


def place_request(pool: str, zone: str) -> directory_pb2.PlaceRequest:
    """Makes the question for the shard of a pool."""
    return directory_pb2.PlaceRequest(pool_name=pool, zone=zone)


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
    """A call of a rank, over a connection of its own: Place or Join, and the thread that reads it."""

    def __init__(
        self,
        address: str,
        access: ClientCredentials,
        first: FirstMessage,
        deliver: Callable[["RankCall", Incoming], None],
    ) -> None:
        """Starts the call.

        Args:
            address: Address of the server.
            access: Credentials of the rank; their files are read now.
            first: The only message of Place, or the first one of Join.
            deliver: Called from the thread with each message and, as the last call, with the error that ended the call.

        Raises:
            ValueError: A file of `access` cannot be read.
        """
        self._address = address
        self._first = first
        self._deliver = deliver
        self._channel = access.channel(address, _OPTIONS)
        self._outgoing: queue.SimpleQueue[worker_pb2.JoinRequest | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="kvpool-join", daemon=True)
        self._reader.start()

    def send(self, request: worker_pb2.JoinRequest) -> None:
        """Queues a message of Join."""
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
        try:
            for incoming in self._incoming():
                self._deliver(self, incoming)
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
        except UnavailableError as failure:
            error = failure
        except ValueError:  # cancelled before it began
            error = UnavailableError("CANCELLED", "the call was cancelled")
        self._deliver(self, error)

    def _incoming(self) -> Iterable[Incoming]:
        if isinstance(self._first, directory_pb2.PlaceRequest):
            return [self._place(self._first)]
        outgoing = chain([self._first], iter(self._outgoing.get, None))
        return worker_pb2_grpc.WorkerServiceStub(self._channel).Join(outgoing)

    def _place(self, request: directory_pb2.PlaceRequest) -> ShardAddress:
        place = directory_pb2_grpc.DirectoryServiceStub(self._channel).Place
        try:
            answer = place(request, timeout=_PLACE_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return ShardAddress()  # an older server, which has all pools
        return ShardAddress.of(answer.shard, answer.addresses, self._address if answer.is_own else "")
