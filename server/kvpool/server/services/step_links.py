"""The links of sessions: connections that carry steps as frames; `kvpool.wire.link` has their rules.

1. A link is to the guard and to the service what a call of Schedule is: it has the context of one. So tokens, budgets,
   turns, the gate of a primary, metrics and traces are the same, and so are the errors.
2. Before its hello, a connection can take little: at most MAX_STRANGERS of them are open, one more ends the oldest, and
   so does any connection where the maximum of links is reached. Each has the time of a stall.
3. A client may send its next steps ahead. While `_MAX_WAITING_FRAMES` or a large one wait, the server reads no more.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import grpc

from kvpool.core.errors import ExhaustedError, KvpoolError
from kvpool.core.ids import SessionId
from kvpool.server.config import ServerConfig
from kvpool.server.limits.messages import SMALL_MESSAGE_BYTES
from kvpool.server.limits.streams import not_reading_error
from kvpool.server.services.process_watch import ProcessWatch
from kvpool.v1 import allocator_pb2, step_pb2
from kvpool.v1.link_pb2 import LinkHello, LinkWelcome
from kvpool.wire import link
from kvpool.wire.acceptor import ACCEPT_PAUSE_SECONDS, Acceptor
from kvpool.wire.address import BoundSocket, host_and_port, ip_addresses, set_options
from kvpool.wire.errors import to_status
from kvpool.wire.frames import FrameReader, encode_frame
from kvpool.wire.peer_process import peer_of, peer_pidfd

MAX_STRANGERS: Final = 64
"""Maximum number of connections without a hello."""
_MAX_WAITING_FRAMES: Final = 4
_ACCEPT_PAUSE_SECONDS: Final = 0.005
"""The pause of an `Acceptor` without TLS, whose handshakes take time."""
_FLUSH_SECONDS: Final = 1.0
"""Time for the last answers of a server that stops."""
_BACKLOG: Final = 128

_log = logging.getLogger("kvpool.server")


class StepLinks:
    """The listeners and links of one server.

    Args:
        config: The server's settings.
        handler: The guarded handler of a link, as one of a stream of steps.
        processes: Watches the processes of sessions.
        server_id: Id of this run of the server.
        max_links: Maximum number of links.

    Attributes:
        listener: Tells clients where steps are taken.
    """

    def __init__(
        self,
        config: ServerConfig,
        handler: "grpc.RpcMethodHandler[Any, Any]",
        processes: ProcessWatch,
        server_id: str,
        max_links: int,
    ) -> None:
        self.listener = allocator_pb2.StepListener(server_id=server_id)
        self.serve: Callable[[object, object], Awaitable[object]] = handler.stream_stream  # type: ignore[assignment]
        self.parse: Callable[[bytes], object] = handler.request_deserializer  # type: ignore[assignment]
        self.processes = processes
        self.first_state = link.server_state(config.max_message_bytes, is_probed=True)
        self.stall_seconds = config.limits.stall_seconds
        self.dead_peer_seconds = config.dead_peer_seconds
        self._config = config
        self._max_links = max_links
        self._acceptors: list[Acceptor] = []
        self._bound: list[BoundSocket] = []
        self._links: set[StepLink] = set()
        self._strangers: dict[StepLink, None] = {}  # the oldest first
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    async def listen(self, new_context: Callable[[], Any] | None) -> list[str]:
        """Begins to take links. Returns the addresses, with port 0 replaced by the chosen port.

        Args:
            new_context: Makes the context of TLS for a TCP port; None for plaintext.

        Raises:
            OSError: An address of the setting `steps_listen` cannot be bound. One that follows from the server's own
                address is left out instead: clients then use gRPC.
        """
        config, found = self._config, []
        for address in config.steps_listen or filter(None, map(link.steps_address, config.addresses)):
            try:
                found.append(await self._listen(address, new_context))
            except OSError as error:
                self._acceptors.pop().close()
                if config.steps_listen:
                    raise OSError(f"steps_listen: cannot listen on {address}: {error.strerror or error}") from error
                _log.warning(
                    "steps taken over gRPC only", extra={"address": address, "error": error.strerror or str(error)}
                )
        self.listener = link.step_listener(self.listener.server_id, list(config.addresses), found)
        return found

    async def _listen(self, address: str, new_context: Callable[[], Any] | None) -> str:
        is_unix = address.startswith("unix:")
        tls = new_context() if new_context and not is_unix else None
        pause_seconds = ACCEPT_PAUSE_SECONDS if tls else _ACCEPT_PAUSE_SECONDS
        acceptor = Acceptor(lambda: StepLink(self), tls, self.stall_seconds, pause_seconds=pause_seconds)
        self._acceptors.append(acceptor)
        if is_unix:
            bound = BoundSocket(address)
            acceptor.start([bound.listen(self._config.auth.socket_mode, _BACKLOG)])
            self._bound.append(bound)
            return address
        host, _, port = address.rpartition(":")
        for each in ip_addresses(address):  # all or none, as gRPC's: another process may listen on the others
            ip, _ = host_and_port("steps_listen", each)
            port = str(await acceptor.listen(ip, int(port)))
        return f"{host}:{port}"

    def watch_process(self, session_id: SessionId, connection: socket.socket) -> None:
        """Watches the process at the other end of a unix socket, unless more are watched than there may be links."""
        if len(self.processes) >= self._max_links:
            return
        try:
            self.processes.watch(session_id, peer_pidfd(connection, peer_of(connection).pid))
        except ProcessLookupError:
            self.processes.report_exit(session_id)
        except OSError:  # in another namespace of processes, on a kernel before 6.5
            pass

    async def stop(self, grace_seconds: float) -> None:
        """Takes no more links, and waits until the calls of the open ones have ended; not longer than a time."""
        for acceptor in self._acceptors:
            acceptor.close()
        for bound in self._bound:
            bound.remove()
        for stranger in list(self._strangers):
            if stranger.hello is None:
                stranger.end()
        tasks = [each.task for each in self._links if each.task]
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=grace_seconds)
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):  # the last answers are on their way
            async with asyncio.timeout(min(grace_seconds, _FLUSH_SECONDS)):
                await self._is_empty.wait()
        for each in list(self._links):
            each.end()
        self.processes.close()

    def opened(self, opened: "StepLink") -> bool:
        """Handles a new connection. Returns whether there is room for it."""
        is_full = len(self._links) >= self._max_links
        if is_full or len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                return False
            del self._strangers[oldest]
            oldest.end()
        self._links.add(opened)
        self._strangers[opened] = None
        self._is_empty.clear()
        return True

    def greeted(self, greeted: "StepLink") -> None:
        """Handles a hello."""
        self._strangers.pop(greeted, None)

    def ended(self, ended: "StepLink") -> None:
        """Handles the end of a link whose last bytes the client has not read: it makes room as a stranger does."""
        if ended in self._links:
            self._strangers[ended] = None

    def closed(self, closed: "StepLink") -> None:
        """Handles the end of a connection."""
        self._links.discard(closed)
        self._strangers.pop(closed, None)
        if not self._links:
            self._is_empty.set()
        for acceptor in self._acceptors:
            acceptor.reserve.fill()


class StepLink(asyncio.Protocol):
    """A link, and the context of its call: it has the methods of `grpc.aio.ServicerContext` that the guard calls.

    Attributes:
        hello: The client's hello; None before it.
        task: Serves the link; None if there was no room for it.
    """

    def __init__(self, links: StepLinks) -> None:
        self.hello: LinkHello | None = None
        self.task: asyncio.Task[None] | None = None
        self._links = links
        self._reader = FrameReader(links.first_state)
        self._parse: Callable[[bytes], object] = partial(
            link.read_hello, stream="steps", server_id=links.listener.server_id
        )
        self._transport: asyncio.Transport
        self._frames: deque[bytes] = deque()
        self._arrival: asyncio.Future[None] | None = None
        """What the task waits for, or has waited for, in `read`."""
        self._failure: KvpoolError | None = None
        """What is wrong with what was received after the frames."""
        self._is_over = False
        self._is_reading = True
        self._stall: asyncio.TimerHandle | None = None
        """Ends the link if the rest of a frame does not arrive."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._code = grpc.StatusCode.OK

    # Of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to serve the link."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio promises it
        self._transport = transport
        set_options(transport.get_extra_info("socket"), self._links.dead_peer_seconds)
        if self._links.opened(self):
            self.task = asyncio.get_running_loop().create_task(self._serve(), name="step_link")
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Takes the frames of the client."""
        self._take(data)
        self._wake()

    def connection_lost(self, _: Exception | None) -> None:
        """Ends the call, once it has answered the step that it executes."""
        self._is_over = True
        if self._stall:
            self._stall.cancel()
        self._writable.set()
        self._links.closed(self)
        if not self._wake() and self.task:
            self.task.cancel()

    def pause_writing(self) -> None:
        """Records that the client reads slowly."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Records that the client has read."""
        self._writable.set()

    # Of a context

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """The token, as a call has it."""
        return (("authorization", f"Bearer {self.hello.token}"),) if self.hello and self.hello.token else ()

    def peer(self) -> str:
        """The address of the client."""
        name = self._transport.get_extra_info("peername")
        return f"{'ipv6' if ':' in name[0] else 'ipv4'}:{name[0]}:{name[1]}" if isinstance(name, tuple) else "unix:"

    def code(self) -> grpc.StatusCode:
        """The status of the call."""
        return self._code

    async def read(self) -> Any:  # noqa: ANN401 - a step, and first a hello
        """Waits for a step; EOF when the client has ended the link."""
        while not self._frames:
            if not self._is_reading:
                self._is_reading = True
                self._transport.resume_reading()
                self._take(b"")
                continue
            if self._failure:
                raise self._failure
            if self._is_over:
                return grpc.aio.EOF
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._parse(self._frames.popleft())

    async def write(self, message: step_pb2.StepResult) -> None:
        """Sends the result of a step.

        Raises:
            ExhaustedError: The client read nothing for the time of a stall.
        """
        self._transport.write(encode_frame(link.Kind.ANSWER, message.SerializeToString()))
        if not self._writable.is_set():
            try:
                async with asyncio.timeout(self._links.stall_seconds):
                    await self._writable.wait()
            except TimeoutError:
                raise not_reading_error(self._links.stall_seconds) from None

    async def abort(self, code: grpc.StatusCode, _: str, details: Sequence[tuple[str, bytes]]) -> None:
        """Ends the call with an error, whose google.rpc.Status is in the details."""
        self._code = code
        self._send_refusal(details[0][1])
        raise grpc.aio.AbortError

    def welcome(self, session_id: str) -> None:
        """Sends the answer to the hello, and watches the process of its session."""
        self._transport.write(link.welcome(LinkWelcome()))
        connection = self._transport.get_extra_info("socket")
        if connection.family is socket.AF_UNIX:
            self._links.watch_process(SessionId(session_id), connection)

    def end(self) -> None:
        """Ends the connection at once."""
        self._transport.abort()

    # Of this module

    def _wake(self) -> bool:
        """Wakes the task if it waits in `read`. Returns whether it does."""
        if self._arrival is None or self._arrival.done():
            return False
        self._arrival.set_result(None)
        return True

    def _take(self, data: bytes) -> None:
        """Takes frames, as many as may wait. What else was received stays in the reader, and the client is not read."""
        is_large = False
        try:
            for kind, payload in self._reader.feed(data, _MAX_WAITING_FRAMES - len(self._frames)):
                is_large = is_large or len(payload) > SMALL_MESSAGE_BYTES
                if kind == link.Kind.PROBE:
                    answer = link.proof(payload, self._links.listener.server_id)
                    self._transport.write(encode_frame(link.Kind.PROOF, answer))
                else:
                    self._frames.append(payload)
        except KvpoolError as error:
            self._failure = error
            self._transport.pause_reading()
        if self._is_reading and (is_large or len(self._frames) >= _MAX_WAITING_FRAMES):
            self._is_reading = False
            self._transport.pause_reading()
        if self._stall or self._reader.torn:
            self._limit_stall()

    async def _serve(self) -> None:
        try:
            if await self._take_hello():
                await self._links.serve(None, self)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            pass  # the client has the error, or has gone
        finally:
            if self._code is grpc.StatusCode.OK:
                self._close()

    async def _take_hello(self) -> bool:
        try:
            async with asyncio.timeout(self._links.stall_seconds):
                message = await self.read()
            if isinstance(message, LinkHello):
                self.hello, self._parse = message, self._links.parse
                self._links.greeted(self)
        except TimeoutError:
            pass
        except KvpoolError as error:
            self._code = grpc.StatusCode.UNKNOWN
            self._send_refusal(to_status(error).SerializeToString())
        return self.hello is not None

    def _limit_stall(self) -> None:
        """Starts or ends the time limit of the rest of a frame, for which the server waits only while it reads."""
        if self._stall:
            self._stall.cancel()
            self._stall = None
        if self._reader.torn and self._is_reading and not self._failure:
            self._stall = asyncio.get_running_loop().call_later(self._links.stall_seconds, self._stalled)

    def _stalled(self) -> None:
        seconds = self._links.stall_seconds
        self._failure = ExhaustedError("NOTHING_SENT", f"the rest of a frame did not arrive within {seconds:g} s")
        self._wake()

    def _send_refusal(self, status: bytes) -> None:
        """Sends the error that ends the link."""
        self._transport.write(encode_frame(link.Kind.REFUSED, status))
        self._close()

    def _close(self) -> None:
        """Closes the connection when the client has read what was sent, or after a stall."""
        self._frames.clear()
        self._reader.torn.clear()
        self._transport.close()
        self._links.ended(self)
        if self._stall:
            self._stall.cancel()
        self._stall = asyncio.get_running_loop().call_later(self._links.stall_seconds, self._transport.abort)
