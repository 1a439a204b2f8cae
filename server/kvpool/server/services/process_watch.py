"""Ends the sessions of processes that have exited, so that no lease has to expire."""

import asyncio
import os
from collections.abc import Callable

from kvpool.core.ids import SessionId


class ProcessWatch:
    """The processes of sessions, as far as the server can see them: those that connected over a unix socket.

    A process is watched from its session's first link until the session ends. A link that ends says nothing about the
    process: it may come back within its lease, and a process that inherited the socket may keep a link open.

    Args:
        on_exit: Called with the session of a process that has exited.
    """

    def __init__(self, on_exit: Callable[[SessionId], None]) -> None:
        self._on_exit = on_exit
        self._pidfds: dict[SessionId, int] = {}

    def watch(self, session_id: SessionId, pidfd: int) -> None:
        """Watches the process of a session, and no longer an earlier one. Owns the descriptor from now on."""
        self.forget(session_id)
        self._pidfds[session_id] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._exited, session_id)

    def forget(self, session_id: SessionId) -> None:
        """Ends the watch of a session that has ended, if there is one."""
        pidfd = self._pidfds.pop(session_id, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def __len__(self) -> int:
        return len(self._pidfds)

    def report_exit(self, session_id: SessionId) -> None:
        """Reports a process that has exited before it could be watched."""
        asyncio.get_running_loop().call_soon(self._on_exit, session_id)

    def close(self) -> None:
        """Ends all watches."""
        for session_id in list(self._pidfds):
            self.forget(session_id)

    def _exited(self, session_id: SessionId) -> None:
        self.forget(session_id)
        self._on_exit(session_id)
