"""The calls of a rank to the server. Each has its own connection, and a thread that reads."""

import queue
import threading
from collections.abc import Callable
from typing import Final, Protocol, assert_never

import grpc

from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.ranks.messages import Registration
from kvpool.gpu_worker.messages import Fenced, Heartbeat, Initialized, Leave, SessionsGone, WorkerMessage
from kvpool.v1 import directory_pb2, directory_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvpool.wire.channels import CHANNEL_OPTIONS, ClientCredentials
from kvpool.wire.errors import from_rpc_error
from kvpool.wire.pools import mapping_processes_to_proto
from kvpool.wire.ranks import registration_to_proto
from kvpool.wire.seeds import ShardAddress

Incoming = worker_pb2.JoinResponse | ShardAddress | KvpoolError
"""A message, the shard of the pool, or the error that ended the call."""
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


class RankCall(Protocol):
    """A call of a rank."""

    def send(self, request: worker_pb2.JoinRequest) -> None:
        """Queues a message."""

    def finish(self, timeout_seconds: float) -> None:
        """Sends the queued messages and waits for the server to end the call, then cancels the call."""

    def cancel(self) -> None:
        """Cancels the call and closes its connection."""


class _Call:
    """What all calls of a rank have.

    Args:
        address: Address of the server.
        access: Credentials of the rank; their files are read now.
        deliver: Called from another thread with each message and, as the last call, with the error that ended the call.

    Raises:
        ValueError: A file of `access` cannot be read.
    """

    def __init__(self, address: str, access: ClientCredentials, deliver: Callable[[RankCall, Incoming], None]) -> None:
        self._deliver = deliver
        self._channel = access.channel(address, _OPTIONS)


class PlaceCall(_Call):
    """One call of DirectoryService.Place. It sends nothing but the question. See `RankCall`."""

    def __init__(
        self,
        address: str,
        access: ClientCredentials,
        request: directory_pb2.PlaceRequest,
        deliver: Callable[[RankCall, Incoming], None],
    ) -> None:
        """Starts the call with the question `request`. Raises as `_Call`."""
        super().__init__(address, access, deliver)
        self._address = address
        self._request = request
        self._place = directory_pb2_grpc.DirectoryServiceStub(self._channel).Place
        threading.Thread(target=self._run, name="kvpool-place", daemon=True).start()

    def send(self, request: worker_pb2.JoinRequest) -> None:
        """See `RankCall`. Drops the message: the rank has not joined."""

    def finish(self, timeout_seconds: float) -> None:
        """See `RankCall`."""
        del timeout_seconds
        self.cancel()

    def cancel(self) -> None:
        """See `RankCall`."""
        self._channel.close()

    def _run(self) -> None:
        try:
            answer = self._place(self._request, timeout=_PLACE_TIMEOUT_SECONDS)
            asked = self._address if answer.is_own else ""
            self._deliver(self, ShardAddress.of(answer.shard, answer.addresses, asked))
        except grpc.RpcError as error:
            is_old = error.code() is grpc.StatusCode.UNIMPLEMENTED  # an older server, which has all pools
            self._deliver(self, ShardAddress() if is_old else from_rpc_error(error))
        except UnavailableError as error:
            self._deliver(self, error)
        except ValueError:  # cancelled before it began
            self._deliver(self, UnavailableError("CANCELLED", "the call was cancelled"))


class JoinStream(_Call):
    """One call of WorkerService.Join. See `RankCall`."""

    def __init__(
        self,
        address: str,
        access: ClientCredentials,
        first: worker_pb2.JoinRequest,
        deliver: Callable[[RankCall, Incoming], None],
    ) -> None:
        """Starts the call with the message `first`. Raises as `_Call`."""
        super().__init__(address, access, deliver)
        self._outgoing: queue.SimpleQueue[worker_pb2.JoinRequest | None] = queue.SimpleQueue()
        self._outgoing.put(first)
        self._call = worker_pb2_grpc.WorkerServiceStub(self._channel).Join(iter(self._outgoing.get, None))
        self._reader = threading.Thread(target=self._read, name="kvpool-join", daemon=True)
        self._reader.start()

    def send(self, request: worker_pb2.JoinRequest) -> None:
        """See `RankCall`."""
        self._outgoing.put(request)

    def finish(self, timeout_seconds: float) -> None:
        """See `RankCall`."""
        self._outgoing.put(None)
        self._reader.join(timeout_seconds)
        self.cancel()

    def cancel(self) -> None:
        """See `RankCall`."""
        self._outgoing.put(None)
        self._call.cancel()
        self._channel.close()

    def _read(self) -> None:
        try:
            for response in self._call:
                self._deliver(self, response)
        except grpc.RpcError as error:
            self._deliver(self, from_rpc_error(error))
        else:
            self._deliver(self, UnavailableError("STREAM_ENDED", "the server ended the stream"))
