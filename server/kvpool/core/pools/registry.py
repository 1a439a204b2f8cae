"""The pools of a server, with the state that the server keeps beside each pool.

1. A pool's name stands for one configuration until the pool is removed, or until its ranks form it again.
2. A pool created after a removed pool has a higher epoch.
3. A pool accepts sessions if neither the pool nor the server is drained. Draining does not affect open sessions; only
   opening a session is refused.
"""

from collections.abc import Iterator
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import NotFoundError, UnavailableError
from kvpool.core.ids import PoolName, SessionNumber
from kvpool.core.ranks.messages import PoolState, RankGroup

DRAINED_RETRY_SECONDS: Final = 5.0


class PoolRegistry:
    """Pools by name. Iterates over them in the order of their creation.

    Attributes:
        drained: The pools that are drained by name; None among them for the whole server.
        past_epoch: Highest epoch of the removed pools; the epoch of a new pool must be higher.
        rank_groups: The state of each pool's ranks that a restarted server needs.
    """

    def __init__(self) -> None:
        self.drained: set[PoolName | None] = set()
        self.past_epoch = 0
        self.rank_groups: dict[PoolName, RankGroup] = {}
        self._by_name: dict[PoolName, KVCacheManager] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[KVCacheManager]:
        return iter(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> KVCacheManager:
        """Finds a pool.

        Raises:
            NotFoundError: No pool has this name.
        """
        pool = self._by_name.get(PoolName(name))
        if pool is None:
            raise NotFoundError("POOL_NOT_FOUND", f"no pool {name!r}", field="pool_name")
        return pool

    def add(self, pool: KVCacheManager) -> None:
        """Adds a new pool."""
        self._by_name[pool.config.name] = pool

    def remove(self, pool: KVCacheManager) -> None:
        """Removes a pool, with all that is kept beside it."""
        name = pool.config.name
        del self._by_name[name]
        self.past_epoch = max(self.past_epoch, pool.epoch)
        self.rank_groups.pop(name, None)
        self.drained.discard(name)

    def accepts_sessions(self, name: PoolName) -> bool:
        """Whether a pool accepts new sessions."""
        return self.drained.isdisjoint((None, name))

    def check_accepts_sessions(self, name: PoolName) -> None:
        """Raises UnavailableError if a pool accepts no new sessions."""
        if not self.accepts_sessions(name):
            drained = "the server" if None in self.drained else f"pool {name!r}"
            message = f"{drained} is drained and takes no new sessions"
            raise UnavailableError("DRAINED", message, field="pool_name", retry_seconds=DRAINED_RETRY_SECONDS)

    def state_of(self, pool: KVCacheManager) -> PoolState:
        """Returns the state of a pool, without that of its ranks."""
        if not self.accepts_sessions(pool.config.name):
            return PoolState.DRAINING
        return PoolState.DEGRADED if pool.is_suspended else PoolState.READY

    def due_quarantines(self, now_seconds: float) -> list[tuple[PoolName, tuple[SessionNumber, ...]]]:
        """The ended sessions whose quarantine has passed, by pool."""
        due = ((pool.config.name, tuple(pool.quarantine.due(now_seconds))) for pool in self)
        return [(name, numbers) for name, numbers in due if numbers]
