"""The sessions of a server: their leases, their limits, and the calls that keep them alive."""

import contextlib
from collections.abc import Iterator

from kvpool.core import commands
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import UnavailableError
from kvpool.core.execution.end_session import is_large
from kvpool.core.ids import SessionId
from kvpool.core.sessions.session import Session
from kvpool.server.config import ServerConfig
from kvpool.server.fault_points import FaultPoints
from kvpool.server.services.calls import Calls, OpenCall
from kvpool.server.services.executor import Executor
from kvpool.server.shutdown import Shutdown


class Sessions:
    """The sessions of one server.

    Args:
        executor: Executes the commands.
        calls: The open calls.
        shutdown: When the server stops.
        faults: Fault points; tests arm them.
        config: The server's settings.
    """

    def __init__(
        self, executor: Executor, calls: Calls, shutdown: Shutdown, faults: FaultPoints, config: ServerConfig
    ) -> None:
        self._executor = executor
        self._state = executor.state
        self._clock = executor.clock
        self._calls = calls
        self._shutdown = shutdown
        self._faults = faults
        self._limits = config.limits
        self._quarantine_seconds = config.quarantine_seconds
        self.await_lost_steps()

    def await_lost_steps(self) -> None:
        """Takes no session where lost sessions may still run a step, for a quarantine from now on."""
        self._lost_steps_end_seconds = self._clock.now_seconds() + self._quarantine_seconds

    def find(self, session_id: str) -> tuple[KVCacheManager, Session]:
        """See `SessionRegistry.find`. Ends the session first if its lease has run out."""
        return self._state.sessions.find(session_id, self._expire_if_overdue(session_id))

    def opened_by(self, open_key: str, owner: str) -> tuple[Session | None, float]:
        """See `SessionRegistry.opened_by`. Ends that session first if its lease has run out.

        The effect of a key then depends on the open sessions alone, as it does when the journal is replayed.

        Returns:
            The session, and the time at which `open` must follow.
        """
        session = self._state.sessions.opened_by(open_key, owner)
        now_seconds = self._expire_if_overdue(session.session_id if session else "")
        return self._state.sessions.opened_by(open_key, owner), now_seconds

    def check_can_open(self, pool_name: str, owner: str) -> None:
        """Checks that a further session may be opened.

        Args:
            pool_name: Name of the pool.
            owner: Name of the caller's token; empty without tokens.

        Raises:
            UnavailableError: The server is stopping or about to stop, or lost sessions may still run a last step.
            NotFoundError: The pool does not exist.
            ExhaustedError: The server, the pool or the owner has the maximum number of sessions.
        """
        self._shutdown.check_not_stopping()
        self._shutdown.check_not_requested()
        pool = self._state.pools.get(pool_name)
        self._check_lost_steps(pool)
        if owner:
            self._limits.check_token_sessions(owner, self._state.sessions.num_of(owner))
        self._limits.check_sessions(len(self._state.sessions), len(pool.sessions))

    def _check_lost_steps(self, pool: KVCacheManager) -> None:
        """Refuses sessions until a quarantine after the start is over, unless the ranks fence off earlier steps."""
        left_seconds = self._lost_steps_end_seconds - self._clock.now_seconds()
        if self._state.lost_may_run and left_seconds > 0 and not pool.ranks_fence:
            message = f"sessions that the server lost may still run a last step, for {left_seconds:.1f} s"
            raise UnavailableError("SESSIONS_LOST", message, field="pool_name", retry_seconds=left_seconds)

    def open(self, command: commands.OpenSession, now_seconds: float | None = None) -> tuple[KVCacheManager, Session]:
        """See `OpenSession`. With a key, call `opened_by` first, which returns the time."""
        return self.find(self._executor.execute(command, now_seconds).session_id)

    def free_part(self, session_id: str) -> int | None:
        """See `FreePart`. Returns None if the session is not large, and `close` should follow."""
        self._expire_if_overdue(session_id)
        found = self._state.sessions.get(session_id)
        if found is None or not is_large(*found):
            return None
        return self._executor.execute(commands.FreePart(session_id))

    def close(self, session_id: str, num_freed_requests: int = 0) -> int:
        """See `CloseSession`. Returns the number of freed requests."""
        self._expire_if_overdue(session_id)
        return self._executor.execute(commands.CloseSession(session_id, num_freed_requests)).num_freed_requests

    @contextlib.contextmanager
    def attached(self, session: Session, stream: OpenCall) -> Iterator[None]:
        """Keeps a session alive while its stream is open. Ends an older stream of the session."""
        with self._calls.of_session(session.session_id, stream):
            self._executor.execute(commands.AttachStream(session.session_id))
            try:
                yield
            finally:
                self._executor.execute(commands.DetachStream(session.session_id))

    def end_gone(self, session_id: SessionId) -> None:
        """Ends the session of a process that has exited. One of its steps may still run on the GPU."""
        if self._state.sessions.get(session_id):
            reason = commands.EndReason.PROCESS_GONE
            self._executor.execute(commands.EndSession(session_id, reason, self._quarantine_seconds))

    def end_due(self) -> None:
        """Ends the sessions whose lease has run out, and the quarantines that are over."""
        now_seconds = self._clock.now_seconds()
        if self._state.lost_may_run and now_seconds >= self._lost_steps_end_seconds:
            self._executor.execute(commands.EndLostSteps())
        self._expire_leases(now_seconds)
        for name, numbers in self._state.pools.due_quarantines(now_seconds):
            self._executor.execute(commands.EndQuarantine(name, numbers))

    def _expire_if_overdue(self, session_id: str) -> float:
        """Ends all sessions whose lease has run out, if this one is among them. Returns the time."""
        now_seconds = self._clock.now_seconds()
        if self._state.sessions.is_overdue(session_id, now_seconds):
            self._expire_leases(now_seconds)
        return now_seconds

    def _expire_leases(self, now_seconds: float) -> None:
        for session_id in self._state.sessions.due(now_seconds):
            reason = commands.EndReason.LEASE_EXPIRED
            self._executor.execute(commands.EndSession(session_id, reason, self._quarantine_seconds))
            self._faults.reach("lease.expired")
