"""The pools of a server: which there are, and what is known of them beside what they hold.

1. A pool's name stands for one configuration until it is removed, or until its ranks form it anew.
2. What comes after a pool that is no more has a higher epoch.
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
        new_block_lifetimes: Makes what samples how long the blocks of a new pool keep what they hold.

    Attributes:
        drain_state: Which pools take new sessions.
        past_epoch: Highest epoch of the pools that were removed; any new one is to be above it.
        rank_groups: What is to be known of a pool's ranks when the process that holds the pool is another one.
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
        """Makes a pool, or finds the one that was declared alike. O(num_blocks).

        Args:
            config: The pool.
            none_hash: Random bytes, for a pool that leaves its none_hash open.
            epoch: The epoch that a new one begins in.
            owner: Name of the token that a new one belongs to; empty for none.

        Returns:
            The pool, and whether it is new.

        Raises:
            InvalidArgumentError: The configuration is out of range.
            WrongStateError: The name is taken by a pool that differs; names the field.
        """
        config.check()
        pool = self._pools.get(config.name)
        if pool is None:
            if not config.hash_scheme.none_hash:
                config = replace(config, hash_scheme=replace(config.hash_scheme, none_hash=none_hash))
            pool = self._pools[config.name] = KVCacheManager(config, epoch, self._new_block_lifetimes(), owner)
            return pool, True
        difference = pool.config.difference(config)
        if difference:
            raise WrongStateError(
                "POOL_DIFFERS",
                f"pool {config.name!r} is there already and differs in this field",
                field=f"config.{difference}",
            )
        return pool, False

    def open_epoch(
        self, config: PoolConfig, none_hash: bytes, epoch: int, *, ranks_fence: bool = False, owner: str = ""
    ) -> KVCacheManager:
        """Opens a pool that ranks have formed, or opens it anew, with nothing in it. O(num_blocks).

        Args:
            config: The pool; of one opened anew it may differ from before.
            none_hash: Random bytes, for a pool that leaves its none_hash open.
            epoch: The epoch that begins, higher than any before.
            ranks_fence: Whether every rank says when no step of an ended session is in flight.
            owner: Name of the token that a new one belongs to; empty for none.

        Raises:
            InvalidArgumentError: The configuration is out of range.
        """
        if not config.hash_scheme.none_hash:
            config = replace(config, hash_scheme=replace(config.hash_scheme, none_hash=none_hash))
        pool = self._pools.get(config.name)
        if pool is None:
            pool = self._pools[config.name] = KVCacheManager(config, epoch, self._new_block_lifetimes(), owner)
        else:
            pool.begin_epoch(config, epoch)
        pool.is_suspended = False
        pool.ranks_fence = ranks_fence
        return pool

    def remove_pool(self, name: str) -> None:
        """Forgets a pool; the caller has made sure that no rank of it is there or waited for.

        Raises:
            NotFoundError: There is none of this name.
            WrongStateError: It has sessions, which are named, or blocks in quarantine: a pool of the same name must
                not give these out while a step may still write them.
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
        """Keeps what is to be known of a pool's ranks; said before what goes with it is done to the pool."""
        self.rank_groups[name] = rank_group

    def suspend(self, pool: KVCacheManager) -> None:
        """Lets nothing be allocated from a pool for now, as a rank is missing."""
        pool.is_suspended = True
        pool.activity.suspensions += 1

    def resume(self, pool: KVCacheManager) -> None:
        """Lets a suspended pool go on."""
        pool.is_suspended = False

    def reset_prefix_cache(self, pool: KVCacheManager) -> bool:
        """Forgets what a pool has cached, as an operator asks; see `KVCacheManager.reset_prefix_cache`."""
        return pool.reset_prefix_cache()

    def drain(self, name: PoolName | None) -> None:
        """Takes no new sessions; see `DrainState.close`."""
        self.drain_state.drain(name)

    def undrain(self, name: PoolName | None) -> None:
        """Takes sessions again; see `DrainState.open`."""
        self.drain_state.undrain(name)

    def has_pool(self, name: PoolName) -> bool:
        """Whether there is a pool of this name."""
        return name in self._pools

    def pool(self, name: str) -> KVCacheManager:
        """Finds a pool.

        Raises:
            NotFoundError: There is none of this name.
        """
        pool = self._pools.get(PoolName(name))
        if pool is None:
            raise NotFoundError("POOL_NOT_FOUND", f"no pool {name!r}", field="pool_name")
        return pool

    def pools(self) -> Iterator[KVCacheManager]:
        """All pools, in the order they were made."""
        return iter(self._pools.values())

    def sessions_of(self, pool: KVCacheManager) -> list[Session]:
        """The open sessions of a pool, in the order they were opened or resumed: that of their numbers."""
        return list(pool.sessions.values())

    def describe(self, pool: KVCacheManager, event_sequence: int = 0) -> PoolInfo:
        """Tells what a pool is like now. O(its sessions and requests)."""
        state = PoolState.DEGRADED if pool.is_suspended else PoolState.READY
        if not self.drain_state.accepts_sessions(pool.config.name):
            state = PoolState.DRAINING
        return describe_pool(pool, state, event_sequence)
