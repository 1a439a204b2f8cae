"""A connection to a lender: requests, their answers, and the fences that come in between."""

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from kvpool.core.errors import InvalidArgumentError, KvpoolError, UnavailableError, WrongStateError
from kvpool.lending.memory_file import close_all
from kvpool.v1 import lending_pb2
from kvpool.v1.link_pb2 import LinkHello, LinkWelcome
from kvpool.wire import link
from kvpool.wire.errors import DeadlineError, malformed_error
from kvpool.wire.frames import FrameReader, encode_frame

_SCHEME: Final = "unix:"
_CHUNK_BYTES: Final = 2**16
_MAX_DESCRIPTORS: Final = 2


class Connection:
    """A connection. Not thread-safe. Every error but a refusal ends it; the caller closes it.

    Attributes:
        address: Socket of the lender.
        unanswered_fence: The newest fence that was received and not answered; 0 for none.
    """

    def __init__(self, address: str, timeout_seconds: float) -> None:
        """Connects.

        Raises:
            InvalidArgumentError: The address is not `unix:/path`.
            UnavailableError: No lender listens there, or this process has no descriptor left.
        """
        self.address: Final = address
        path = address.removeprefix(_SCHEME)
        if not address.startswith(_SCHEME) or not path.startswith("/"):
            raise InvalidArgumentError("memory", f"{address!r} is not an address of the form unix:/path")
        try:
            self._socket: Final = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise UnavailableError("NO_DESCRIPTOR", f"{address}: {error.strerror}", retry_seconds=1.0) from None
        try:
            self._socket.settimeout(timeout_seconds)
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise UnavailableError("NO_LENDER", f"{address}: {_explained(error)}", retry_seconds=1.0) from None
        self._socket.settimeout(0)
        self._reader = FrameReader(link.client_state(link.MAX_LENDING_BYTES, refusal_ends=False))
        self._answers: deque[lending_pb2.LendResponse | LinkWelcome | KvpoolError] = deque()
        self._fences: deque[lending_pb2.LendFence] = deque()
        self._newest_fence = 0
        self.unanswered_fence = 0
        self._descriptors: list[int] = []
        self._error: KvpoolError | None = None
        """Why nothing follows what was received."""

    def fileno(self) -> int:
        """The descriptor of the socket, to wait for messages; -1 after `close`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the socket and the descriptors that were not taken. Repeats do nothing."""
        self._socket.close()
        close_all(self._descriptors)
        self._descriptors = []

    def hello(self, hello: LinkHello, timeout_seconds: float) -> lending_pb2.LendingOffer:
        """Introduces the process; must come first.

        Raises:
            ServerError: The lender speaks another protocol version.
            KvpoolError: The lender refuses the process, is not a lender, or does not answer in time.
        """
        try:
            answer = self._exchange(link.hello(hello), timeout_seconds)
        except KvpoolError as error:
            if error.reason not in link.NO_SERVER:
                raise
        else:
            if isinstance(answer, LinkWelcome) and answer.HasField("lending"):
                return answer.lending
        raise WrongStateError("NOT_A_LENDER", f"{self.address}: another program listens there")

    @property
    def has_failed(self) -> bool:
        """Whether the connection cannot go on. After a refusal it can."""
        return self._error is not None

    def map(
        self, request: lending_pb2.Map, timeout_seconds: float, wait: Callable[[float], None] | None = None
    ) -> tuple[lending_pb2.Mapped, tuple[int, ...]]:
        """Asks for the memory. Returns the answer and its descriptors, which the caller closes.

        Args:
            request: The memory.
            timeout_seconds: How long to wait for it.
            wait: Waits for data until a time of `time.monotonic`, and takes fences; None for `wait`, which keeps them.

        Raises:
            KvpoolError: The lender refuses, does not answer in time, or sends another number of descriptors.
        """
        mapped = self.request(lending_pb2.LendRequest(map=request), "mapped", timeout_seconds, wait).mapped
        found = len(self._descriptors)
        if not 1 + bool(mapped.num_host_blocks) <= found <= _MAX_DESCRIPTORS:
            message = f"comes with {found} descriptors of memory, and {mapped.num_host_blocks} blocks in host memory"
            self._error = InvalidArgumentError("mapped", message, reason="MALFORMED")
            raise self._error
        descriptors, self._descriptors = tuple(self._descriptors), []
        return mapped, descriptors

    def request(
        self,
        request: lending_pb2.LendRequest,
        answer: str,
        timeout_seconds: float,
        wait: Callable[[float], None] | None = None,
    ) -> lending_pb2.LendResponse:
        """Sends a request and waits for its answer, whose name is `answer`.

        Raises:
            KvpoolError: The lender refuses, or does not answer in time.
        """
        response = self._exchange(_frame(request), timeout_seconds, wait)
        if isinstance(response, lending_pb2.LendResponse) and response.WhichOneof("message") == answer:
            return response
        self._error = InvalidArgumentError("message", f"another one where {answer} is due", reason="MALFORMED")
        raise self._error

    def answer_fence(self, timeout_seconds: float) -> None:
        """Answers the newest fence. Raises as `send` does."""
        fenced = lending_pb2.LendFenced(fence_sequence=self.unanswered_fence)
        self.unanswered_fence = 0
        self.send(lending_pb2.LendRequest(fenced=fenced), timeout_seconds)

    def send(self, request: lending_pb2.LendRequest, timeout_seconds: float) -> None:
        """Sends a message.

        Raises:
            UnavailableError: The connection has ended.
            DeadlineError: The lender does not read.
        """
        self._write(_frame(request), timeout_seconds)

    def take_fences(self) -> deque[lending_pb2.LendFence]:
        """Takes all fences that the lender has sent so far, without waiting. Costs about a microsecond if none.

        Raises:
            InvalidArgumentError: The lender sent something else.
            UnavailableError: The connection has ended. All fences before its end were taken.
        """
        try:
            while data := self._socket.recv(_CHUNK_BYTES):  # the kernel drops any descriptor
                self._sort(data)
            self._error = self._error or self._ended(None)
        except BlockingIOError:
            pass
        except OSError as error:
            self._error = self._error or self._ended(error)
        if self._answers and not self._error:
            self._error = InvalidArgumentError("message", "an answer without a request", reason="MALFORMED")
        return self.take_received_fences()

    def take_received_fences(self) -> deque[lending_pb2.LendFence]:
        """Takes the fences that were received, without a look at the socket. Raises as `take_fences` does."""
        if not self._fences:
            if self._error:
                raise self._error
            return self._fences
        taken, self._fences = self._fences, deque()
        return taken

    def wait(self, deadline: float, *others: socket.socket) -> None:
        """Waits for data here or in other sockets.

        Raises:
            DeadlineError: Nothing came until the deadline, a time of `time.monotonic`.
        """
        self._poll(select.POLLIN, deadline, *others)

    def _exchange(
        self, frame: bytes, timeout_seconds: float, wait: Callable[[float], None] | None = None
    ) -> lending_pb2.LendResponse | LinkWelcome:
        deadline = time.monotonic() + timeout_seconds
        try:
            with contextlib.suppress(UnavailableError):  # it may have refused before it read the request
                self._write(frame, timeout_seconds)
            while not self._answers:
                if self._error:
                    raise self._error
                (wait or self.wait)(deadline)
                self._receive_with_descriptors()
        except KvpoolError as error:
            self._error = error
            raise
        answer = self._answers.popleft()
        if isinstance(answer, KvpoolError):
            raise answer
        return answer

    def _write(self, frame: bytes, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        rest = memoryview(frame)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._poll(select.POLLOUT, deadline)
            except OSError as error:
                raise self._ended(error) from None

    def _receive_with_descriptors(self) -> None:
        try:
            most = _MAX_DESCRIPTORS + 1  # so that more are noticed
            data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK_BYTES, most, socket.MSG_CMSG_CLOEXEC)
            self._descriptors += descriptors
            if not data:
                self._error = self._ended(None)
            self._sort(data)
        except BlockingIOError:
            pass
        except OSError as error:
            self._error = self._ended(error)

    def _sort(self, data: bytes) -> None:
        try:
            for kind, payload in self._reader.feed(data):
                if kind == link.Kind.REFUSED:
                    self._answers.append(link.read_refusal(payload))
                elif kind == link.Kind.WELCOME:
                    self._answers.append(link.read_welcome(payload))
                else:
                    self._add(lending_pb2.LendResponse.FromString(payload))
        except DecodeError:
            self._error = self._error or malformed_error()
        except KvpoolError as error:
            self._error = self._error or error

    def _add(self, response: lending_pb2.LendResponse) -> None:
        if response.WhichOneof("message") == "fence":
            self._add_fence(response.fence)
        else:
            self._answers.append(response)

    def _add_fence(self, fence: lending_pb2.LendFence) -> None:
        if fence.fence_sequence <= self._newest_fence:
            raise InvalidArgumentError("fence_sequence", "does not count up", reason="MALFORMED")
        self._newest_fence = self.unanswered_fence = fence.fence_sequence
        self._fences.append(fence)

    def _poll(self, events: int, deadline: float, *others: socket.socket) -> None:
        poll = select.poll()
        poll.register(self._socket, events)
        for other in others:
            poll.register(other, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise DeadlineError("DEADLINE_EXCEEDED", f"{self.address}: the lender does not answer in time")

    def _ended(self, error: OSError | None) -> UnavailableError:
        why = f": {error.strerror}" if error else ""
        return UnavailableError("LENDER_GONE", f"{self.address}: the lender ended the connection{why}")


def _frame(request: lending_pb2.LendRequest) -> bytes:
    return encode_frame(link.Kind.REQUEST, request.SerializeToString())


def _explained(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such socket; does `kvpool worker --lend` run on this machine?"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens on the socket; the worker that made it has ended"
    if isinstance(error, PermissionError):
        return "no permission for the socket; run the engine as the user of the worker"
    return error.strerror or str(error)
