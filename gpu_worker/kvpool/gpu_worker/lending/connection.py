"""A connection to a lender: requests, their answers, and the fences that come in between."""

import contextlib
import os
import select
import socket
import time
from collections import deque
from typing import Final

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from kvpool.core.errors import InvalidArgumentError, KvpoolError, UnavailableError, WrongStateError
from kvpool.v1 import lending_pb2
from kvpool.wire.errors import DeadlineError, from_status
from kvpool.wire.lending import LENDING_VERSION, MessageReader, encode_message, receive

_SCHEME: Final = "unix:"
_CHUNK_BYTES: Final = 2**16


class Connection:
    """A connection. Not thread-safe. Every error but a refusal ends it; the caller closes it."""

    def __init__(self, address: str, timeout_seconds: float) -> None:
        """Connects.

        Raises:
            InvalidArgumentError: The address is not `unix:/path`.
            UnavailableError: No lender listens there.
        """
        self.address: Final = address
        path = address.removeprefix(_SCHEME)
        if not address.startswith(_SCHEME) or not path.startswith("/"):
            raise InvalidArgumentError("memory", f"{address!r} is not an address of the form unix:/path")
        self._socket: Final = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_seconds)
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise UnavailableError("NO_LENDER", f"{address}: {_explained(error)}", retry_seconds=1.0) from None
        self._socket.settimeout(0)
        self._reader = MessageReader(lending_pb2.LendResponse)
        self._received: deque[lending_pb2.LendResponse] = deque()
        self._descriptors: list[int] = []
        self._error: KvpoolError | None = None
        """Why nothing follows what was received."""

    def fileno(self) -> int:
        """The descriptor of the socket, to wait for messages; -1 after `close`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the socket and the descriptors that were not taken. Repeats do nothing."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def hello(self, request: lending_pb2.Hello, timeout_seconds: float) -> lending_pb2.Offer:
        """Introduces the process; must be the first request.

        Raises:
            KvpoolError: The lender refuses the process, is not a lender, or does not answer in time.
        """
        try:
            answer = self.request(lending_pb2.LendRequest(hello=request), "offer", timeout_seconds)
        except InvalidArgumentError as error:
            if error.reason not in ("MALFORMED", "MESSAGE_TOO_LONG"):
                raise
            raise WrongStateError("NOT_A_LENDER", f"{self.address}: another program listens there") from None
        if answer.offer.lending_version != LENDING_VERSION:
            message = (
                f"{self.address}: the lender uses version {answer.offer.lending_version}, this process"
                f" {LENDING_VERSION}. Use the same release for both"
            )
            raise WrongStateError("LENDING_VERSION", message, field="lending_version")
        return answer.offer

    @property
    def has_failed(self) -> bool:
        """Whether the connection cannot go on. After a refusal it can."""
        return self._error is not None

    def map(self, request: lending_pb2.Map, timeout_seconds: float) -> tuple[lending_pb2.Mapped, int]:
        """Asks for the memory. Returns the answer and the descriptor, which the caller closes.

        Raises:
            KvpoolError: The lender refuses, does not answer in time, or sends no memory.
        """
        answer = self.request(lending_pb2.LendRequest(map=request), "mapped", timeout_seconds)
        if not self._descriptors:
            self._error = InvalidArgumentError("mapped", "comes without the memory's descriptor", reason="MALFORMED")
            raise self._error
        return answer.mapped, self._descriptors.pop()

    def request(
        self, request: lending_pb2.LendRequest, answer: str, timeout_seconds: float
    ) -> lending_pb2.LendResponse:
        """Sends a request and waits for its answer, whose name is `answer`. Fences are kept for `take_received`.

        Raises:
            KvpoolError: The lender refuses, or does not answer in time.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            with contextlib.suppress(UnavailableError):  # it may have refused before it read the request
                self.send(request, timeout_seconds)
            while (response := self._take_answer()) is None:
                if self._error:
                    raise self._error
                self._wait(select.POLLIN, deadline)
                self._receive_with_descriptors()
            kind = response.WhichOneof("message")
            if kind not in (answer, "refused"):
                raise InvalidArgumentError("message", f"{kind} where {answer} is due", reason="MALFORMED")
        except KvpoolError as error:
            self._error = error
            raise
        if kind == "refused":
            raise _refusal(response.refused)
        return response

    def _take_answer(self) -> lending_pb2.LendResponse | None:
        for i, response in enumerate(self._received):
            if response.WhichOneof("message") != "fence":
                del self._received[i]
                return response
        return None

    def send(self, request: lending_pb2.LendRequest, timeout_seconds: float) -> None:
        """Sends a message.

        Raises:
            UnavailableError: The connection has ended.
            DeadlineError: The lender does not read.
        """
        deadline = time.monotonic() + timeout_seconds
        rest = memoryview(encode_message(request))
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise self._ended(error) from None

    def take_received(self) -> deque[lending_pb2.LendResponse]:
        """Takes all messages that the lender has sent so far, without waiting. Costs about a microsecond if none.

        Raises:
            InvalidArgumentError: The lender sent something that is no message.
            UnavailableError: The connection has ended. All messages before its end were taken.
        """
        try:
            while data := self._socket.recv(_CHUNK_BYTES):  # the kernel drops any descriptor
                self._received.extend(self._reader.feed(data))
        except BlockingIOError:
            if not self._received and not self._error:
                return self._received
        except OSError as error:
            self._error = self._error or self._ended(error)
        except InvalidArgumentError as error:
            self._error = self._error or error
        else:
            self._error = self._error or self._ended(None)
        return self.take_pending()

    def take_pending(self) -> deque[lending_pb2.LendResponse]:
        """Takes the messages that were received, without a look at the socket. Raises as `take_received` does."""
        if self._error and not self._received:
            raise self._error
        taken, self._received = self._received, deque()
        return taken

    def _receive_with_descriptors(self) -> None:
        try:
            data, descriptors = receive(self._socket, _CHUNK_BYTES)
            self._descriptors += descriptors
            if not data:
                self._error = self._ended(None)
            self._received.extend(self._reader.feed(data))
        except BlockingIOError:
            pass
        except OSError as error:
            self._error = self._ended(error)
        except InvalidArgumentError as error:
            self._error = error

    def _wait(self, events: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, events)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise DeadlineError("DEADLINE_EXCEEDED", f"{self.address}: the lender does not answer in time")

    def _ended(self, error: OSError | None) -> UnavailableError:
        why = f": {error.strerror}" if error else ""
        return UnavailableError("LENDER_GONE", f"{self.address}: the lender ended the connection{why}")


def _refusal(encoded: bytes) -> KvpoolError:
    with contextlib.suppress(DecodeError):
        return from_status(status_pb2.Status.FromString(encoded))
    return InvalidArgumentError("refused", "cannot be parsed", reason="MALFORMED")


def _explained(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such socket; does `kvpool worker --lend` run on this machine?"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens on the socket; the worker that made it has ended"
    if isinstance(error, PermissionError):
        return "no permission for the socket; run the engine as the user of the worker"
    return error.strerror or str(error)
