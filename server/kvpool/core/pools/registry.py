"""The pools of a server, with the state that the server keeps beside each pool.

1. A pool's name stands for one configuration until the pool is removed, or until its ranks form it again.
2. A pool created after a removed pool has a higher epoch.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import NotFoundError, WrongStateError
from kvpool.core.ids import PoolName
from kvpool.core.pools.drain_state import DrainState
from kvpool.core.ranks.messages import PoolState, RankGroup
from kvpool.core.sessions.session import Session
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.views.inspection import list_numbers
from kvpool.core.views.pool_info import PoolInfo, describe_pool


class PoolRegistry:
    """Pools by name.

    Args:
        new_block_lifetimes: Creates the sampler of block lifetimes for a new pool; may return None.

    Attributes:
        drain_state: The drained pools.
        past_epoch: Highest epoch of the removed pools; the epoch of a new pool must be higher.
        rank_groups: The state of each pool's ranks that a restarted server needs.
    """

    def __init__(self, new_block_lifetimes: Callable[[], BlockLifetimes | None]) -> None:
        self.drain_state = DrainState()
        self.past_epoch = 0
        self.rank_groups: dict[PoolName, RankGroup] = {}
        self._new_block_lifetimes = new_block_lifetimes
        self._pools: dict[PoolName, KVCacheManager] = {}

    def create_pool(
        self, config: PoolConfig, none_hash: bytes, epoch: int = 1, *, owner: str = ""
    ) -> tuple[KVCacheManager, bool]:
        """Creates a pool, or finds an existing one with the same configuration. O(num_blocks).

        Args:
            config: Configuration of the pool.
            none_hash: Random bytes, used if the configuration has no none_hash.
            epoch: First epoch of a new pool.
            owner: Name of the token that owns a new pool; empty for none.

        Returns:
            The pool, and whether it is new.

        Raises:
            InvalidArgumentError: The configuration is out of range.
            WrongStateError: A pool of this name has another configuration; names the field.
        """
        config.check()
        pool = self._pools.get(config.name)
        if pool is None:
            return self._add_pool(_with_none_hash(config, none_hash), epoch, owner), True
        difference = pool.config.difference(config)
        if difference:
            raise WrongStateError(
                "POOL_DIFFERS",
                f"pool {config.name!r} already exists and differs in this field",
                field=f"config.{difference}",
            )
        return pool, False

    def open_epoch(
        self, config: PoolConfig, none_hash: bytes, epoch: int, *, ranks_fence: bool = False, owner: str = ""
    ) -> KVCacheManager:
        """Opens a pool formed by ranks, or reopens it, empty in both cases. O(num_blocks).

        Args:
            config: Configuration of the pool; when a pool is reopened, it may differ from the earlier one.
            none_hash: Random bytes, used if the configuration has no none_hash.
            epoch: The new epoch, higher than all earlier ones.
            ranks_fence: Whether every rank reports when no step of an ended session is in flight.
            owner: Name of the token that owns a new pool; empty for none.

        Raises:
            InvalidArgumentError: The configuration is out of range.
        """
        config = _with_none_hash(config, none_hash)
        pool = self._pools.get(config.name)
        if pool is None:
            pool = self._add_pool(config, epoch, owner)
        else:
            pool.begin_epoch(config, epoch)
        pool.is_suspended = False
        pool.ranks_fence = ranks_fence
        return pool

    def remove_pool(self, name: str) -> None:
        """Removes a pool. The caller must check that the pool has no ranks, not even silent or lost ones.

        Raises:
            NotFoundError: No pool has this name.
            WrongStateError: The pool has open sessions or blocks in quarantine; names the sessions. A new pool of the
                same name must not allocate blocks that a step may still write.
        """
        pool = self.pool(name)
        sessions = self.sessions_of(pool)
        if sessions:
            message = f"sessions are open: {list_numbers([session.session_number for session in sessions])}"
            raise WrongStateError("POOL_IN_USE", message, field="pool_name")
        if pool.quarantine:
            message = f"blocks of sessions that ended are in quarantine: {list_numbers(pool.quarantine.numbers)}"
            raise WrongStateError("POOL_IN_USE", message, field="pool_name")
        del self._pools[pool.config.name]
        self.past_epoch = max(self.past_epoch, pool.epoch)
        self.rank_groups.pop(pool.config.name, None)
        self.drain_state.undrain(pool.config.name)

    def keep_rank_group(self, name: PoolName, rank_group: RankGroup) -> None:
        """Stores the state of a pool's ranks. Call this before the effects of the change are applied to the pool."""
        self.rank_groups[name] = rank_group

    def suspend(self, pool: KVCacheManager) -> None:
        """Suspends allocation in a pool while a rank is absent."""
        pool.is_suspended = True
        pool.activity.suspensions += 1

    def resume(self, pool: KVCacheManager) -> None:
        """Ends the suspension of a pool."""
        pool.is_suspended = False

    def reset_prefix_cache(self, pool: KVCacheManager) -> bool:
        """Clears the prefix cache at an operator's request; see `KVCacheManager.reset_prefix_cache`."""
        return pool.reset_prefix_cache()

    def drain(self, name: PoolName | None) -> None:
        """Stops accepting new sessions; see `DrainState.drain`."""
        self.drain_state.drain(name)

    def undrain(self, name: PoolName | None) -> None:
        """Accepts sessions again; see `DrainState.undrain`."""
        self.drain_state.undrain(name)

    def has_pool(self, name: PoolName) -> bool:
        """Whether a pool has this name."""
        return name in self._pools

    def pool(self, name: str) -> KVCacheManager:
        """Finds a pool.

        Raises:
            NotFoundError: No pool has this name.
        """
        pool = self._pools.get(PoolName(name))
        if pool is None:
            raise NotFoundError("POOL_NOT_FOUND", f"no pool {name!r}", field="pool_name")
        return pool

    def pools(self) -> Iterator[KVCacheManager]:
        """All pools, in the order of their creation."""
        return iter(self._pools.values())

    def sessions_of(self, pool: KVCacheManager) -> list[Session]:
        """The open sessions of a pool, ordered by session number."""
        return list(pool.sessions.values())

    def describe(self, pool: KVCacheManager, event_sequence: int = 0) -> PoolInfo:
        """Describes the current state of a pool. O(its sessions and requests)."""
        state = PoolState.DEGRADED if pool.is_suspended else PoolState.READY
        if not self.drain_state.accepts_sessions(pool.config.name):
            state = PoolState.DRAINING
        return describe_pool(pool, state, event_sequence)

    def _add_pool(self, config: PoolConfig, epoch: int, owner: str) -> KVCacheManager:
        pool = self._pools[config.name] = KVCacheManager(config, epoch, self._new_block_lifetimes(), owner)
        return pool


def _with_none_hash(config: PoolConfig, none_hash: bytes) -> PoolConfig:
    """Returns the configuration with this none_hash, unless it has one."""
    if config.hash_scheme.none_hash:
        return config
    return replace(config, hash_scheme=replace(config.hash_scheme, none_hash=none_hash))
