"""When the ranks of a pool are told whose steps may run, and who waits until all of them keep to it.

1. They are told once a turn of the loop, however many sessions end or are resumed in it.
2. Who resumed a session waits until every rank has answered a fence that was sent since, by this process of the server.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from kvpool.core.allocator import Allocator
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName, SessionNumber
from kvpool.core.ranks.membership import Membership
from kvpool.core.ranks.messages import Effect


class Fencing:
    """The fences of a server's pools.

    Args:
        allocator: Its sessions.
        memberships: The ranks of its pools, as they are at any time.
        carry_out: Does what a change of a membership asks for.
    """

    def __init__(
        self,
        allocator: Allocator,
        memberships: Mapping[PoolName, Membership],
        carry_out: Callable[[Membership, list[Effect]], None],
    ) -> None:
        self._allocator = allocator
        self._memberships = memberships
        self._carry_out = carry_out
        self._due: set[PoolName] = set()
        self._waiters: dict[tuple[PoolName, SessionNumber], list[asyncio.Future[None]]] = {}

    def begin_soon(self, name: PoolName) -> None:
        """Tells a pool's ranks whose steps may run, at the end of this turn of the loop."""
        if name in self._memberships and name not in self._due:
            self._due.add(name)
            asyncio.get_running_loop().call_soon(self._begin, name)

    async def keep_out(self, pool: KVCacheManager, number: SessionNumber) -> None:
        """Has a pool's ranks keep out a number that a session had; waits until no step under it is in flight on any.

        Waits for none if one does not answer fences, or there are none. Does not end while a rank is away: the caller
        ends it when the session ends.
        """
        self.begin_soon(pool.config.name)
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

    def answered(self, name: PoolName, numbers: Sequence[SessionNumber]) -> None:
        """Lets those go who wait for numbers that all ranks keep out now."""
        for number in numbers:
            for waiter in self._waiters.get((name, number), ()):
                if not waiter.done():
                    waiter.set_result(None)

    def _begin(self, name: PoolName) -> None:
        self._due.discard(name)
        membership = self._memberships.get(name)
        if membership is None or not self._allocator.has_pool(name):
            return
        pool = self._allocator.pool(name)
        live = [session.session_number for session in self._allocator.sessions_of(pool)]
        awaited = [number for pool_name, number in self._waiters if pool_name == name]
        awaiting = [*pool.quarantine.awaiting_ranks, *awaited]
        self._carry_out(membership, membership.fence(self._allocator.last_session_number, live, awaiting))
