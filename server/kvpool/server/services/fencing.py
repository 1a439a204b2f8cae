"""Sends fences to the ranks of pools, and lets callers wait until all ranks keep one.

A fence names the sessions whose steps may run.

1. Ranks get at most one fence per iteration of the event loop, however many sessions end or are resumed in it.
2. A caller that resumes a session waits until every rank has answered a fence that this server process sent after the
   resumption.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName, SessionNumber
from kvpool.core.ranks.membership import Membership
from kvpool.core.ranks.messages import Effect
from kvpool.core.state import State


class Fencing:
    """The fences of a server's pools.

    Args:
        state: The server's pools and sessions.
        memberships: Live view of the ranks of its pools.
        carry_out: Carries out the effects of a change of a membership.
    """

    def __init__(
        self,
        state: State,
        memberships: Mapping[PoolName, Membership],
        carry_out: Callable[[Membership, list[Effect]], None],
    ) -> None:
        self._state = state
        self._memberships = memberships
        self._carry_out = carry_out
        self._due: set[PoolName] = set()
        self._waiters: dict[tuple[PoolName, SessionNumber], list[asyncio.Future[None]]] = {}

    def schedule(self, name: PoolName) -> None:
        """Sends a fence to the ranks of a pool in the next iteration of the event loop."""
        if name in self._memberships and name not in self._due:
            self._due.add(name)
            asyncio.get_running_loop().call_soon(self._send, name)

    async def fence_out(self, pool: KVCacheManager, number: SessionNumber) -> None:
        """Fences off a former number of a session, and waits until no step with it is in flight on any rank.

        Returns at once if a rank of the pool does not answer fences, or if the pool has no ranks. Waits while a rank is
        away; the caller cancels the wait when the session ends.
        """
        self.schedule(pool.config.name)
        if not pool.ranks_fence:
            return
        key = pool.config.name, number
        waiters = self._waiters.setdefault(key, [])
        answered = asyncio.get_running_loop().create_future()
        waiters.append(answered)
        try:
            await answered
        finally:
            waiters.remove(answered)
            if not waiters:
                del self._waiters[key]

    def release(self, name: PoolName, numbers: Sequence[SessionNumber]) -> None:
        """Ends the waits for session numbers that all ranks now fence off."""
        for number in numbers:
            for waiter in self._waiters.get((name, number), ()):
                if not waiter.done():
                    waiter.set_result(None)

    def _send(self, name: PoolName) -> None:
        self._due.discard(name)
        membership = self._memberships.get(name)
        if membership is None or not self._state.has_pool(name):
            return
        pool = self._state.pool(name)
        live = [session.session_number for session in self._state.sessions_of(pool)]
        awaited = [number for pool_name, number in self._waiters if pool_name == name]
        awaiting = [*pool.quarantine.awaiting_ranks, *awaited]
        self._carry_out(membership, membership.fence(self._state.last_session_number, live, awaiting))
