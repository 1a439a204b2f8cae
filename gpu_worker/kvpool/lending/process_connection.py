"""A connection of an engine's process to the lender of a rank, on the lender's side; lending.proto documents it."""

import asyncio
import contextlib
import hmac
import logging
import os
import socket
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from kvpool.core.errors import (
    DeniedError,
    InvalidArgumentError,
    KvpoolError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
    check_size,
)
from kvpool.core.ids import MAX_CLIENT_NAME_BYTES, SessionNumber, TableLease
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.core.specs.pool_config import check_pool_name
from kvpool.lending.borrower_registry import Borrower, FenceSent, Link
from kvpool.lending.fence import StaleTablesError
from kvpool.lending.memory_file import close_all
from kvpool.lending.processes import receive_from
from kvpool.lending.rank import MemoryOwner
from kvpool.v1 import lending_pb2
from kvpool.v1.link_pb2 import LinkWelcome
from kvpool.wire import link
from kvpool.wire.errors import malformed_error, to_status
from kvpool.wire.fields import field_values
from kvpool.wire.frames import FrameReader, encode_frame
from kvpool.wire.peer_process import Peer, peer_of
from kvpool.wire.ranks import declared_from_proto

HELLO_SECONDS: Final = 10.0
"""Time within which a process must introduce itself."""
_MAX_CLIENT_ID_BYTES: Final = 64
MAX_UNSENT_MESSAGES: Final = 64
"""Messages that wait for a process to read; with more the connection ends, and the process connects again."""
_LAST_MESSAGE_SECONDS: Final = 1.0
"""Time that a process has to read the last message."""

_log = logging.getLogger("kvpool.worker")
_ResultT = TypeVar("_ResultT")


class ProcessConnection:
    """One connection of a process to a lender. Its user calls `introduce`, then `serve`, and always `close`."""

    def __init__(self, connection: socket.socket, rank: MemoryOwner, token: str) -> None:
        self._socket = connection
        self._rank = rank
        self._borrowers = rank.borrowers
        self._token = token
        self._reader = FrameReader(link.server_state(link.MAX_LENDING_BYTES))
        self._payloads: list[bytes] = []
        """Of a hello, and then of requests."""
        self._receiving: asyncio.Task[bytes | None] | None = None
        self._outbox: asyncio.Queue[tuple[bytes, Sequence[int]]] = asyncio.Queue(MAX_UNSENT_MESSAGES)
        """Frames, each with the descriptors that accompany it."""
        self._loop = asyncio.get_running_loop()
        self._link = Link(self._send_fence)
        self._peer: Peer | None = None
        self._borrower: Borrower | None = None
        self._is_closed = False
        """Whether nothing is sent any more."""
        self._sending = asyncio.create_task(self._send_queued())

    async def introduce(self) -> Borrower | None:
        """Returns the process that has introduced itself; None if the connection has ended instead."""
        with self._ends():
            peer = self._peer = self._check_peer()
            async with asyncio.timeout(HELLO_SECONDS):
                payload = await self._next()
            if payload is not None:
                hello = self._read_hello(payload)
                self._borrower = self._borrowers.connect(
                    peer.pid, peer.started_ticks, hello.client_id, hello.client_name, self._link
                )
                self._post(link.welcome(LinkWelcome(lending=self._rank.offer)))
                return self._borrower
        await self._send_last()
        return None

    async def serve(self, borrower: Borrower) -> None:
        """Serves the process until either side ends the connection."""
        with self._ends():
            while request := await self._next_request():
                await self._handle(borrower, request)
        await self._send_last()

    def end(self) -> None:
        """Ends the connection, also for processes that have inherited it; `serve` then returns."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> list[Borrower]:
        """Closes the connection. Returns the processes that are forgotten with it."""
        self._is_closed = True
        for task in filter(None, (self._sending, self._receiving)):
            task.cancel()
        for remove in (self._loop.remove_reader, self._loop.remove_writer):  # its number may be used again at once
            remove(self._socket)
        self._socket.close()
        while not self._outbox.empty():
            close_all(self._outbox.get_nowait()[1])
        return self._borrowers.disconnect(self._borrower, self._link) if self._borrower else []

    @contextlib.contextmanager
    def _ends(self) -> Iterator[None]:
        """Ends with the connection. The process learns why, if this side ends it."""
        try:
            yield
        except KvpoolError as error:
            self._refuse(error)
        except TimeoutError:
            self._refuse(UnavailableError("NO_HELLO", f"no message arrived within {HELLO_SECONDS:g} s"))
        except OSError:
            pass  # the process has ended it

    async def _send_last(self) -> None:
        with contextlib.suppress(TimeoutError):  # it does not read
            async with asyncio.timeout(_LAST_MESSAGE_SECONDS):
                await self._outbox.join()

    def _check_peer(self) -> Peer:
        peer = peer_of(self._socket)
        if peer.uid != os.getuid():
            raise DeniedError("OTHER_USER", f"the memory is lent to processes of user {os.getuid()}, not {peer.uid}")
        if not peer.started_ticks:
            raise UnavailableError("NO_PROCESS", "the process is not visible here: share the namespace of process ids")
        return peer

    def _read_hello(self, payload: bytes) -> lending_pb2.LendingHello:
        message = link.read_hello(payload, "lending")
        if not hmac.compare_digest(message.token.encode(), self._token.encode()):
            raise UnauthenticatedError("WRONG_TOKEN", "is not the token of this lender", field="token")
        hello = message.lending
        check_pool_name("pool_name", hello.pool_name)
        if hello.pool_name != self._rank.pool_name:
            text = f"{hello.pool_name!r}; this memory belongs to pool {self._rank.pool_name!r}"
            raise WrongStateError("OTHER_POOL", text, field="pool_name")
        check_size("client_name", hello.client_name, MAX_CLIENT_NAME_BYTES)
        check_size("client_id", hello.client_id, _MAX_CLIENT_ID_BYTES)
        return hello

    async def _handle(self, borrower: Borrower, request: lending_pb2.LendRequest) -> None:
        """Handles a message."""
        match request.WhichOneof("message"):
            case "map":
                with self._refusals():
                    await self._map(
                        borrower, declared_from_proto("declared", request.map.declared), request.map.weights_bytes
                    )
            case "bind":
                with self._refusals():
                    number = SessionNumber(request.bind.session_number)
                    self._borrowers.bind(borrower, self._link, TableLease(request.bind.epoch, number))
                    self._post(_answer(bound=lending_pb2.Bound()))
            case "fenced":
                self._borrowers.fence_answered(borrower, self._link, request.fenced.fence_sequence)
            case "unmap":
                self._borrowers.unmap(borrower, self._link)
                self._post(_answer(unmapped=lending_pb2.Unmapped()))
            case _:
                raise InvalidArgumentError("message", "is not set, or not expected now")

    async def _map(self, borrower: Borrower, declared: DeclaredMemory, weights_bytes: int) -> None:
        self._borrowers.resend_fence(borrower, self._link)
        while True:
            memory = await self._while_connected(borrower, self._rank.ready_memory(declared, weights_bytes))
            descriptors, memory_id = memory.duplicate()
            mapped = lending_pb2.Mapped(
                epoch=memory.epoch,
                num_blocks=memory.num_blocks,
                size_bytes=declared.size_bytes,
                memory_id=memory_id,
                num_host_blocks=memory.num_host_blocks,
            )
            announce = partial(self._post_soon, _answer(mapped=mapped), descriptors)
            try:
                self._borrowers.map(borrower, self._link, memory.epoch, announce)
            except StaleTablesError:  # the epoch has passed since
                close_all(descriptors)
            except KvpoolError:
                close_all(descriptors)
                raise
            else:
                return

    async def _while_connected(self, borrower: Borrower, job: Coroutine[Any, Any, _ResultT]) -> _ResultT:
        """Waits for a job. Handles answers to fences meanwhile, as the job may wait for them.

        Raises:
            ConnectionResetError: The process has ended the connection, or was refused because it sent something else.
        """
        waiting = asyncio.create_task(job)
        try:
            while True:
                await asyncio.wait((waiting, self._coming()), return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    return waiting.result()
                try:
                    await self._take_answer_to_fence(borrower)
                except KvpoolError as error:
                    self._refuse(error)
                    raise ConnectionResetError from error
        finally:
            waiting.cancel()

    async def _take_answer_to_fence(self, borrower: Borrower) -> None:
        request = await self._next_request()
        if request is None:
            raise ConnectionResetError
        if request.WhichOneof("message") != "fenced":
            raise InvalidArgumentError("message", "is not expected before the answer to map")
        await self._handle(borrower, request)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except KvpoolError as error:
            if self._borrower is None or self._borrower.link is not self._link:
                raise  # each further request would be refused, too
            self._refuse(error)

    def _coming(self) -> asyncio.Task[bytes | None]:
        if self._receiving is None:
            self._receiving = asyncio.create_task(self._receive())
        return self._receiving

    async def _next(self) -> bytes | None:
        """Receives the payload of the next frame; None at the end, or when nothing is sent any more."""
        payload = await asyncio.shield(self._coming())
        self._receiving = None
        return None if self._is_closed else payload

    async def _next_request(self) -> lending_pb2.LendRequest | None:
        payload = await self._next()
        try:
            return None if payload is None else lending_pb2.LendRequest.FromString(payload)
        except DecodeError:
            raise malformed_error() from None

    async def _receive(self) -> bytes | None:
        while not self._payloads:
            data, pid = await receive_from(self._socket, 2**16)
            if not data:
                return None
            if self._peer and pid != self._peer.pid:  # it would run steps under the name of the other
                message = f"process {pid} sent a message on the connection of process {self._peer.pid}"
                raise DeniedError("OTHER_PROCESS", f"{message}; connect in the process that maps the memory")
            self._payloads += [payload for _, payload in self._reader.feed(data)]
        return self._payloads.pop(0)

    def _send_fence(self, fence: FenceSent) -> None:
        """Sends a fence. Any thread may call it."""
        self._post_soon(_answer(fence=lending_pb2.LendFence(**field_values(FenceSent, fence))))

    def _post_soon(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._post, frame, descriptors)

    def _post(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends a frame after earlier ones, and then closes the descriptors that accompany it."""
        if not self._is_closed:
            try:
                self._outbox.put_nowait((frame, descriptors))
            except asyncio.QueueFull:
                self._drop_deaf()
            else:
                return
        close_all(descriptors)

    def _drop_deaf(self) -> None:
        """Ends the connection of a process that does not read."""
        self._is_closed = True
        pid, name = (self._borrower.pid, self._borrower.name) if self._borrower else (0, "")
        fields = {**self._rank.rank_fields, "pid": pid, "client": name, "messages": MAX_UNSENT_MESSAGES}
        _log.warning("engine does not read", extra=fields)
        self.end()

    def _refuse(self, error: KvpoolError) -> None:
        _log.warning("lending refused", extra={**self._rank.rank_fields, "reason": error.reason, "error": str(error)})
        self._post(encode_frame(link.Kind.REFUSED, to_status(error).SerializeToString()))

    async def _send_queued(self) -> None:
        while True:
            frame, descriptors = await self._outbox.get()
            try:
                if not descriptors:
                    await self._loop.sock_sendall(self._socket, frame)
                elif socket.send_fds(self._socket, [frame], descriptors) < len(frame):
                    raise BlockingIOError  # a process that does not read
            except OSError:
                self.end()  # the process connects again
            finally:
                close_all(descriptors)
                self._outbox.task_done()


def _answer(**message: Any) -> bytes:  # noqa: ANN401 - a field of the answer
    return encode_frame(link.Kind.ANSWER, lending_pb2.LendResponse(**message).SerializeToString())
