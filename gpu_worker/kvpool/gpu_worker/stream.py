"""A rank's stream to the server: a connection of its own, a queue of what to send, a thread that reads."""

import queue
import threading
from collections.abc import Callable
from typing import Final

import grpc

from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.v1 import worker_pb2, worker_pb2_grpc
from kvpool.wire.channels import CHANNEL_OPTIONS, Access
from kvpool.wire.errors import from_rpc_error

Incoming = worker_pb2.JoinResponse | KvpoolError
"""A message, or why none comes any more."""

_OPTIONS: Final = (
    *CHANNEL_OPTIONS,
    # A stream that is given up takes its connection with it: the next one must not wait on a network that is cut off.
    # Heartbeats, which both sides send and await, are what tells that it is.
    ("grpc.use_local_subchannel_pool", 1),
)


class JoinStream:
    """One call of WorkerService.Join."""

    def __init__(
        self,
        address: str,
        access: Access,
        first: worker_pb2.JoinRequest,
        deliver: Callable[["JoinStream", Incoming], None],
    ) -> None:
        """Begins the call.

        Args:
            address: Where the server listens.
            access: What is shown at its door; its files are read now.
            first: The first message.
            deliver: Called from another thread with each message, and once, at last, with the error that ended it all.

        Raises:
            ValueError: A file of `access` cannot be read.
        """
        self._outgoing: queue.SimpleQueue[worker_pb2.JoinRequest | None] = queue.SimpleQueue()
        self._outgoing.put(first)
        self._deliver = deliver
        self._channel = access.channel(address, _OPTIONS)
        self._call = worker_pb2_grpc.WorkerServiceStub(self._channel).Join(iter(self._outgoing.get, None))
        self._reader = threading.Thread(target=self._read, name="kvpool-join", daemon=True)
        self._reader.start()

    def send(self, request: worker_pb2.JoinRequest) -> None:
        """Puts a message in line."""
        self._outgoing.put(request)

    def finish(self, timeout_seconds: float) -> None:
        """Lets what is in line go out, and the server end the call; then gives it up."""
        self._outgoing.put(None)
        self._reader.join(timeout_seconds)
        self.cancel()

    def cancel(self) -> None:
        """Gives the call up, and its connection."""
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
