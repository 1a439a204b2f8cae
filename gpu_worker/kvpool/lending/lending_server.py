"""Lends a rank's memory to the processes of engines on its machine; lending.proto documents the protocol.

The event loop handles connections and the exits of processes.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.lending.borrower_registry import Borrower
from kvpool.lending.process_connection import ProcessConnection
from kvpool.lending.rank import MemoryOwner
from kvpool.wire.address import DEFAULT_SOCKET_MODE, BoundSocket
from kvpool.wire.peer_process import peer_pidfd

MAX_STRANGERS: Final = 256
"""Maximum number of connections on which no process has introduced itself yet; the oldest one makes room."""
_PAUSE_SECONDS: Final = 1.0
"""How long no connection is accepted after this process had no descriptor left."""

_log = logging.getLogger("kvpool.worker")


@dataclass(slots=True)
class _WatchedProcess:
    """A process, its uses of the memory, and the newest connection of each."""

    pidfd: int
    borrowers: set[Borrower] = field(default_factory=set)
    connections: dict[Borrower, ProcessConnection] = field(default_factory=dict)


class LendingServer:
    """The socket of a rank that lends its memory."""

    def __init__(self, path: Path, listener: socket.socket, rank: MemoryOwner, token: str = "") -> None:
        """Accepts no connection yet.

        Args:
            path: Path of the socket.
            listener: The socket; see `listening`.
            rank: The rank.
            token: Secret that processes must present; empty for none.
        """
        self._path = path
        self._listener = listener
        self._rank = rank
        self._token = token
        self._borrowers = rank.borrowers
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers: dict[ProcessConnection, None] = {}
        """Connections on which no process has introduced itself yet, the oldest first."""
        self._watched: dict[tuple[int, int], _WatchedProcess] = {}
        """By process id and start time."""

    async def serve(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set."""
        for borrower in self._borrowers.all():
            self._watch_again(borrower)
        self._accept_connections()
        _log.info("lending", extra={**self._rank.rank_fields, "address": f"unix:{self._path}"})
        try:
            await stop.wait()
        finally:
            asyncio.get_running_loop().remove_reader(self._listener)
            for task in tuple(self._connections):
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            for process in tuple(self._watched):
                self._end_watch(process)

    def _accept_connections(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the listener would stay readable
                _log.warning("no descriptor left", extra=self._rank.rank_fields)
                loop.remove_reader(self._listener)
                loop.call_later(_PAUSE_SECONDS, self._accept_connections)
            return
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.end()
        connection.settimeout(0)
        served = ProcessConnection(connection, self._rank, self._token)
        self._strangers[served] = None
        task = asyncio.create_task(self._serve(served, connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, served: ProcessConnection, connection: socket.socket) -> None:
        try:
            borrower = await served.introduce()
            self._strangers.pop(served, None)
            if borrower and (process := self._watch(borrower, connection)):
                if earlier := process.connections.get(borrower):
                    earlier.end()
                process.connections[borrower] = served
                await served.serve(borrower)
        finally:
            self._strangers.pop(served, None)
            for forgotten in served.close():
                self._forget(forgotten)

    def _watch(self, borrower: Borrower, connection: socket.socket) -> _WatchedProcess | None:
        """Reports the sessions of a process when it exits. Returns None if it has exited, or cannot be watched."""
        try:
            return self._watch_pidfd(borrower, lambda: peer_pidfd(connection, borrower.pid))
        except OSError as error:
            fields = {**self._rank.rank_fields, "pid": borrower.pid, "error": error.strerror}
            _log.warning("process not watched", extra=fields)
            return None

    def _watch_again(self, borrower: Borrower) -> None:
        """Watches a process that mapped the memory of an earlier process of the rank."""
        try:
            self._watch_pidfd(borrower, lambda: os.pidfd_open(borrower.pid))
        except ProcessLookupError:
            self._report_exit(borrower)

    def _watch_pidfd(self, borrower: Borrower, open_pidfd: Callable[[], int]) -> _WatchedProcess:
        process = self._watched.get(borrower.process)
        if process is None:
            process = self._watched[borrower.process] = _WatchedProcess(open_pidfd())
            asyncio.get_running_loop().add_reader(process.pidfd, self._exited, borrower.process)
        process.borrowers.add(borrower)
        return process

    def _forget(self, borrower: Borrower) -> None:
        if process := self._watched.get(borrower.process):
            process.borrowers.discard(borrower)
            process.connections.pop(borrower, None)
            if not process.borrowers:
                self._end_watch(borrower.process)

    def _end_watch(self, key: tuple[int, int]) -> _WatchedProcess:
        process = self._watched.pop(key)
        asyncio.get_running_loop().remove_reader(process.pidfd)
        os.close(process.pidfd)
        return process

    def _exited(self, key: tuple[int, int]) -> None:
        """Ends what is left of a process: another one may have inherited its connections."""
        process = self._end_watch(key)
        for connection in process.connections.values():
            connection.end()
        for borrower in process.borrowers:
            self._report_exit(borrower)

    def _report_exit(self, borrower: Borrower) -> None:
        fields = {**self._rank.rank_fields, "pid": borrower.pid, "client": borrower.name}
        if gone := self._borrowers.remove_exited(borrower):
            _log.warning("engine process exited", extra={**fields, "sessions": len(gone)})
            self._rank.report_gone(gone)


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listens on a socket that only this user can reach, in place of one without a listener.

    Raises:
        InvalidArgumentError: The path is too long, something else is there (another file, or a socket in use), or the
            socket cannot be made.
    """
    bound = BoundSocket(f"unix:{path}")
    try:
        listener = bound.listen(DEFAULT_SOCKET_MODE, MAX_STRANGERS, names_senders=True)
    except FileExistsError as error:
        raise InvalidArgumentError("lend", str(error), reason="ADDRESS_IN_USE") from error
    except OSError as error:
        message = f"cannot listen on {path}: {error.strerror}" if error.strerror else str(error)
        raise InvalidArgumentError("lend", message) from error
    try:
        with listener:
            yield listener
    finally:
        bound.remove()
