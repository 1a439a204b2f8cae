"""Lends a rank's memory to the processes of engines on its machine; lending.proto documents the protocol.

The event loop handles connections and the exits of processes. The rank runs in threads of its own (`RankRunner`), from
the first declaration of an engine on, or from the start if an earlier process left memory behind.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvpool.core.errors import (
    DeniedError,
    InvalidArgumentError,
    KvpoolError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.gpu_worker.lending.borrowers import Borrower, FenceSent
from kvpool.gpu_worker.lending.lent_rank import LentRank
from kvpool.gpu_worker.lending.processes import Peer, peer_of, peer_pidfd
from kvpool.v1 import lending_pb2
from kvpool.wire.errors import to_status
from kvpool.wire.fields import field_values
from kvpool.wire.lending import LENDING_VERSION, MessageReader, encode_message
from kvpool.wire.ranks import declared_from_proto

MAX_CONNECTIONS: Final = 256
HELLO_SECONDS: Final = 10.0
"""Time within which a process must introduce itself."""
_POLL_SECONDS: Final = 1.0

_log = logging.getLogger("kvpool.worker")


class Lender:
    """The socket of a rank that lends its memory."""

    def __init__(self, path: Path, rank: LentRank, token: str = "") -> None:
        """Does not listen yet.

        Args:
            path: Path of the socket.
            rank: The rank.
            token: Secret that processes must present; empty for none.
        """
        self._path = path
        self._rank = rank
        self._token = token
        self._borrowers = rank.borrowers
        self._connections: set[asyncio.Task[None]] = set()
        self._watched: set[Borrower] = set()

    async def serve(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set.

        Raises:
            OSError: The socket cannot be bound.
        """
        loop = asyncio.get_running_loop()
        with _listener(self._path) as listener:
            for borrower in self._borrowers.all():
                self._watch_again(borrower)
            loop.add_reader(listener, self._accept, listener)
            _log.info("lending", extra={**self._rank.rank_fields, "address": f"unix:{self._path}"})
            try:
                await stop.wait()
            finally:
                loop.remove_reader(listener)
                for task in tuple(self._connections):
                    task.cancel()
                await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it is gone already, or this process has no descriptor left
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.settimeout(0)
        task = asyncio.create_task(_Connection(connection, self._rank, self._token, self._watch).serve())
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    def _watch(self, borrower: Borrower, pidfd: int) -> None:
        """Reports the sessions of a process when it exits; takes the descriptor."""
        if borrower in self._watched:
            os.close(pidfd)
            return
        self._watched.add(borrower)
        asyncio.get_running_loop().add_reader(pidfd, self._exited, borrower, pidfd)

    def _watch_again(self, borrower: Borrower) -> None:
        """Watches a process that mapped the memory of an earlier process of the rank."""
        try:
            pidfd = os.pidfd_open(borrower.pid)
        except ProcessLookupError:
            self._report_exit(borrower)
        else:
            self._watch(borrower, pidfd)

    def _exited(self, borrower: Borrower, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._watched.discard(borrower)
        self._report_exit(borrower)

    def _report_exit(self, borrower: Borrower) -> None:
        fields = {**self._rank.rank_fields, "pid": borrower.pid, "client": borrower.name}
        if gone := self._borrowers.exited(borrower):
            _log.warning("engine process exited", extra={**fields, "sessions": list(gone)})
            self._rank.report_gone(gone)


class _Connection:
    """One connection of a process."""

    def __init__(
        self, connection: socket.socket, rank: LentRank, token: str, watch: Callable[[Borrower, int], None]
    ) -> None:
        self._socket = connection
        self._rank = rank
        self._borrowers = rank.borrowers
        self._token = token
        self._watch = watch
        self._reader = MessageReader(lending_pb2.LendRequest)
        self._requests: list[lending_pb2.LendRequest] = []
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._fence_sender: Callable[[FenceSent], None] | None = None

    async def serve(self) -> None:
        """Serves the process until either side ends the connection."""
        borrower: Borrower | None = None
        sender = asyncio.create_task(self._send_queued())
        try:
            with contextlib.suppress(OSError):
                try:
                    peer = self._check_peer()
                    async with asyncio.timeout(HELLO_SECONDS):
                        request = await self._next()
                    if request is None:
                        return
                    borrower = self._introduce(peer, self._hello(request))
                    while request := await self._next():
                        if not await self._handle(borrower, request):
                            break
                except (KvpoolError, TimeoutError) as error:
                    self._refuse(error if isinstance(error, KvpoolError) else _silent())
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._outbox.join()
        except TimeoutError:
            pass  # it does not read the last message
        finally:
            sender.cancel()
            if borrower:
                self._borrowers.disconnect(borrower, self._fence_sender)
            self._socket.close()

    def _check_peer(self) -> Peer:
        peer = peer_of(self._socket)
        if peer.uid != os.getuid():
            raise DeniedError("OTHER_USER", f"the memory is lent to processes of user {os.getuid()}, not {peer.uid}")
        if not peer.started_ticks:
            raise UnavailableError("NO_PROCESS", "the process is not visible here: share the namespace of process ids")
        return peer

    def _hello(self, request: lending_pb2.LendRequest) -> lending_pb2.Hello:
        if request.WhichOneof("message") != "hello":
            raise InvalidArgumentError("message", "the first message must be hello")
        hello = request.hello
        if hello.lending_version != LENDING_VERSION:
            message = f"{hello.lending_version}; this lender uses {LENDING_VERSION}. Use the same release for both"
            raise WrongStateError("LENDING_VERSION", message, field="lending_version")
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise UnauthenticatedError("WRONG_TOKEN", "is not the token of this lender", field="token")
        if hello.pool_name != self._rank.settings.pool:
            message = f"{hello.pool_name!r}; this memory belongs to pool {self._rank.settings.pool!r}"
            raise WrongStateError("OTHER_POOL", message, field="pool_name")
        for field, bound_bytes in (("client_name", 256), ("client_id", 64)):
            if len(getattr(hello, field).encode()) > bound_bytes:
                raise InvalidArgumentError(field, f"longer than {bound_bytes} bytes")
        offer = lending_pb2.Offer(
            lending_version=LENDING_VERSION,
            rank=self._rank.settings.rank,
            world_size=self._rank.settings.world_size,
            available_bytes=self._rank.offered_bytes,
            is_lent=self._rank.is_lent,
            device=str(self._rank.device),
        )
        self._put(lending_pb2.LendResponse(offer=offer))
        return hello

    def _introduce(self, peer: Peer, hello: lending_pb2.Hello) -> Borrower:
        pidfd = peer_pidfd(self._socket, peer)
        borrower = self._borrowers.add(peer.pid, peer.started_ticks, hello.client_id, hello.client_name)
        self._watch(borrower, pidfd)
        return borrower

    async def _handle(self, borrower: Borrower, request: lending_pb2.LendRequest) -> bool:
        """Handles a message. Returns whether the connection continues."""
        match request.WhichOneof("message"):
            case "map":
                with self._refusals():
                    await self._map(borrower, declared_from_proto("declared", request.map.declared))
            case "bind":
                with self._refusals():
                    number = SessionNumber(request.bind.session_number)
                    self._borrowers.bind(borrower, TableLease(request.bind.epoch, number))
                    self._put(lending_pb2.LendResponse(bound=lending_pb2.Bound()))
            case "fenced":
                self._borrowers.answered(borrower, request.fenced.fence_sequence)
            case "unmap":
                self._borrowers.unmap(borrower)
                return False
            case _:
                raise InvalidArgumentError("message", "is not set, or not expected now")
        return True

    async def _map(self, borrower: Borrower, declared: DeclaredMemory) -> None:
        waiting = asyncio.create_task(self._rank.mapped(declared))
        ended = asyncio.create_task(self._wait_for_input())
        try:
            await asyncio.wait((waiting, ended), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise ConnectionResetError  # the process has given up
            epoch, num_blocks, descriptor = waiting.result()
        finally:
            waiting.cancel()
            ended.cancel()
        self._fence_sender = sender = self._sender()
        mapped = lending_pb2.Mapped(epoch=epoch, num_blocks=num_blocks, size_bytes=declared.size_bytes)
        await self._outbox.join()
        self._borrowers.map(borrower, sender)  # the process may write from now on
        data = encode_message(lending_pb2.LendResponse(mapped=mapped))
        if socket.send_fds(self._socket, [data], [descriptor]) < len(data):
            raise ConnectionResetError  # a peer that does not read

    def _sender(self) -> Callable[[FenceSent], None]:
        """Makes a function that sends a fence, for other threads."""

        def send(fence: FenceSent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._put_fence, fence)

        return send

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except KvpoolError as error:
            self._refuse(error)

    async def _next(self) -> lending_pb2.LendRequest | None:
        """Receives the next message; None at the end."""
        while not self._requests:
            data = await self._loop.sock_recv(self._socket, 2**16)
            if not data:
                return None
            self._requests += self._reader.feed(data)
        return self._requests.pop(0)

    async def _wait_for_input(self) -> None:
        """Waits until the process sends something, which it does not while it waits, or ends the connection."""
        data = await self._loop.sock_recv(self._socket, 2**16)
        if data:
            self._requests += self._reader.feed(data)

    def _put(self, response: lending_pb2.LendResponse) -> None:
        self._outbox.put_nowait(encode_message(response))

    def _put_fence(self, fence: FenceSent) -> None:
        values = field_values(FenceSent, fence)
        self._put(lending_pb2.LendResponse(fence=lending_pb2.LendFence(**values)))

    def _refuse(self, error: KvpoolError) -> None:
        _log.warning("lending refused", extra={**self._rank.rank_fields, "reason": error.reason, "error": str(error)})
        self._put(lending_pb2.LendResponse(refused=to_status(error).SerializeToString()))

    async def _send_queued(self) -> None:
        while True:
            data = await self._outbox.get()
            try:
                await self._loop.sock_sendall(self._socket, data)
            except OSError:
                pass  # the reader notices the end
            finally:
                self._outbox.task_done()


def _silent() -> KvpoolError:
    return UnavailableError("NO_HELLO", f"no message arrived within {HELLO_SECONDS:g} s")


@contextlib.contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    """Listens on a socket that only this user can reach, in place of one without a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        part = path.with_name(f"{path.name}.{os.getpid()}")
        listener.bind(str(part))
        try:
            part.chmod(0o600)
            listener.listen(MAX_CONNECTIONS)
            part.rename(path)  # the folder's lock shows that no other lender serves this rank
            yield listener
        finally:
            part.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
