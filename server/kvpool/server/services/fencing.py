"""Fences that are due. `Ranks` sends them.

A fence names the sessions whose steps may run. Ranks get at most one fence per iteration of the event loop, however
many sessions end in it.
"""

import asyncio
from collections.abc import Sequence

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName, SessionNumber


class Fencing:
    """The fences of a server's pools."""

    def __init__(self) -> None:
        self._due: dict[PoolName, None] = {}
        self._is_due = asyncio.Event()
        self._killed: dict[PoolName, set[SessionNumber]] = {}

    def schedule(self, name: PoolName) -> None:
        """Has a fence sent to the ranks of a pool, if it has ranks, in the next iteration of the event loop."""
        self._due[name] = None
        self._is_due.set()

    def kill(self, name: PoolName, number: SessionNumber) -> None:
        """Has the ranks kill the processes of an ended session, with each fence until its quarantine has ended."""
        self._killed.setdefault(name, set()).add(number)
        self.schedule(name)

    def take_killed(self, pool: KVCacheManager) -> list[SessionNumber]:
        """Numbers of the ended sessions of a pool whose processes the next fence has to kill, ascending."""
        killed = self._killed.pop(pool.config.name, set())
        again = {number for number in killed if pool.quarantine.find(number)}
        if again:
            self._killed[pool.config.name] = again
        return sorted(killed)

    async def next_due(self) -> Sequence[PoolName]:
        """Waits until fences are due, and returns their pools. Only one task calls this."""
        await self._is_due.wait()
        self._is_due.clear()
        due, self._due = tuple(self._due), {}
        return due
