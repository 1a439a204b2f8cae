"""Fences that are due, and callers that wait until all ranks keep one. `Ranks` sends the fences.

A fence names the sessions whose steps may run.

1. Ranks get at most one fence per iteration of the event loop, however many sessions end or are resumed in it.
2. A caller that resumes a session waits until every rank has answered a fence that this server process sent after the
   resumption.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName, SessionNumber
from kvpool.core.sessions.session import Session


@dataclass(slots=True)
class _Waiters:
    """The callers that wait for the former numbers of a session."""

    numbers: Sequence[SessionNumber]
    futures: list[asyncio.Future[None]] = field(default_factory=list)


class Fencing:
    """The fences of a server's pools."""

    def __init__(self) -> None:
        self._due: dict[PoolName, None] = {}
        self._is_due = asyncio.Event()
        self._waiters: dict[tuple[PoolName, SessionNumber], _Waiters] = {}
        self._killed: dict[PoolName, dict[SessionNumber, Session]] = {}

    def schedule(self, name: PoolName) -> None:
        """Has a fence sent to the ranks of a pool, if it has ranks, in the next iteration of the event loop."""
        self._due[name] = None
        self._is_due.set()

    def kill(self, name: PoolName, session: Session) -> None:
        """Has the ranks kill the processes of an ended session, with each fence until its quarantine has ended."""
        self._killed.setdefault(name, {})[session.session_number] = session
        self.schedule(name)

    def take_killed(self, pool: KVCacheManager) -> list[SessionNumber]:
        """All numbers of the ended sessions of a pool whose processes the next fence has to kill, ascending."""
        killed = self._killed.pop(pool.config.name, {})
        again = {number: session for number, session in killed.items() if pool.quarantine.find(number)}
        if again:
            self._killed[pool.config.name] = again
        return sorted(number for session in killed.values() for number in session.numbers)

    async def next_due(self) -> Sequence[PoolName]:
        """Waits until fences are due, and returns their pools. Only one task calls this."""
        await self._is_due.wait()
        self._is_due.clear()
        due, self._due = tuple(self._due), {}
        return due

    def awaited(self, name: PoolName) -> dict[SessionNumber, Sequence[SessionNumber]]:
        """The numbers of resumed sessions in a pool for which callers wait, each with itself and former ones."""
        return {number: each.numbers for (pool_name, number), each in self._waiters.items() if pool_name == name}

    async def fence_out(self, pool: KVCacheManager, session: Session) -> None:
        """Fences off the former numbers of a session, and waits until no step with them is in flight on any rank.

        Returns at once if a rank of the pool does not answer fences, or if the pool has no ranks. Waits while a rank is
        away; the caller cancels the wait when the session ends.
        """
        self.schedule(pool.config.name)
        if not pool.ranks_fence:
            return
        key = pool.config.name, session.former_numbers[-1]
        waiters = self._waiters.setdefault(key, _Waiters(session.former_numbers))
        answered = asyncio.get_running_loop().create_future()
        waiters.futures.append(answered)
        try:
            await answered
        finally:
            waiters.futures.remove(answered)
            if not waiters.futures:
                del self._waiters[key]

    def release(self, name: PoolName, numbers: Sequence[SessionNumber]) -> None:
        """Ends the waits for session numbers that all ranks now fence off."""
        for number in numbers:
            waiters = self._waiters.get((name, number))
            for future in waiters.futures if waiters else ():
                if not future.done():
                    future.set_result(None)
