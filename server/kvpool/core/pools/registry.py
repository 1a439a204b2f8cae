"""The pools of a server, with the state that the server keeps beside each pool.

1. A pool's name stands for one configuration until the pool is removed, or until its ranks form it again.
2. A pool created after a removed pool has a higher epoch.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvpool.core import commands
from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import handles
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
        self.new_block_lifetimes = new_block_lifetimes
        self._pools: dict[PoolName, KVCacheManager] = {}

    @handles(commands.CreatePool)
    def _create_pool(self, command: commands.CreatePool, _: float) -> bool:
        config = command.config
        config.check()
        pool = self._pools.get(config.name)
        if pool is None:
            self._add_pool(_with_none_hash(config, command.none_hash), command.epoch, command.owner)
            return True
        difference = pool.config.difference(config)
        if difference:
            raise WrongStateError(
                "POOL_DIFFERS",
                f"pool {config.name!r} already exists and differs in this field",
                field=f"config.{difference}",
            )
        return False

    @handles(commands.OpenEpoch)
    def _open_epoch(self, command: commands.OpenEpoch, _: float) -> None:
        config = _with_none_hash(command.config, command.none_hash)
        pool = self._pools.get(config.name)
        if pool is None:
            pool = self._add_pool(config, command.epoch, command.owner)
        else:
            pool.begin_epoch(config, command.epoch)
        pool.is_suspended = False
        pool.ranks_fence = command.ranks_fence

    @handles(commands.RemovePool)
    def _remove_pool(self, command: commands.RemovePool, _: float) -> None:
        pool = self.pool(command.pool_name)
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

    @handles(commands.KeepRankGroup)
    def _keep_rank_group(self, command: commands.KeepRankGroup, _: float) -> None:
        self.rank_groups[command.pool_name] = command.rank_group

    @handles(commands.SuspendPool)
    def _suspend(self, command: commands.SuspendPool, _: float) -> None:
        pool = self.pool(command.pool_name)
        pool.is_suspended = True
        pool.activity.suspensions += 1

    @handles(commands.ResumePool)
    def _resume(self, command: commands.ResumePool, _: float) -> None:
        self.pool(command.pool_name).is_suspended = False

    @handles(commands.ResetPrefixCache)
    def _reset_prefix_cache(self, command: commands.ResetPrefixCache, _: float) -> bool:
        return self.pool(command.pool_name).reset_prefix_cache()

    @handles(commands.Drain)
    def _drain(self, command: commands.Drain, _: float) -> None:
        self.drain_state.drain(command.pool_name)

    @handles(commands.Undrain)
    def _undrain(self, command: commands.Undrain, _: float) -> None:
        self.drain_state.undrain(command.pool_name)

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
        pool = self._pools[config.name] = KVCacheManager(config, epoch, self.new_block_lifetimes(), owner)
        return pool


def _with_none_hash(config: PoolConfig, none_hash: bytes) -> PoolConfig:
    """Returns the configuration with this none_hash, unless it has one."""
    if config.hash_scheme.none_hash:
        return config
    return replace(config, hash_scheme=replace(config.hash_scheme, none_hash=none_hash))
