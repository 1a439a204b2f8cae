"""The pools of a server, including those whose ranks still form them."""

import asyncio
import contextlib
import secrets
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import CreatePool, OpenEpoch, RemovePool
from kvpool.core.errors import ExhaustedError, InvalidArgumentError, WrongStateError, check_range
from kvpool.core.ids import PoolName
from kvpool.core.ranks.effects import PoolOpened
from kvpool.core.ranks.membership import Membership
from kvpool.core.ranks.messages import PoolState, RankState
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.views.inspection import list_numbers
from kvpool.server.auth.caller import tenant, token_name
from kvpool.server.config import ServerConfig
from kvpool.server.events.log import EventLogs
from kvpool.server.fault_points import FaultPoints
from kvpool.server.journal.snapshot import full_pool_bytes
from kvpool.server.services.executor import Executor
from kvpool.server.shutdown import Shutdown
from kvpool.v1 import pool_pb2
from kvpool.wire import picture
from kvpool.wire import pools as wire_pools

MAX_WAIT_SECONDS: Final = 3600


class Pools:
    """The pools of one server.

    Args:
        executor: Executes the commands.
        event_logs: The event logs of the pools.
        shutdown: When the server stops.
        faults: Fault points; tests arm them.
        config: The server's settings.

    Attributes:
        memberships: The ranks of the pools that have ranks, maintained by `Ranks`.
        past_epoch: Newest epoch that earlier servers may have used; the first epoch of each pool is higher.
    """

    def __init__(
        self, executor: Executor, event_logs: EventLogs, shutdown: Shutdown, faults: FaultPoints, config: ServerConfig
    ) -> None:
        self.memberships: dict[PoolName, Membership] = {}
        self.past_epoch = config.past_epoch
        self._executor = executor
        self._state = executor.state
        self._event_logs = event_logs
        self._shutdown = shutdown
        self._faults = faults
        self._config = config

    def names(self) -> list[PoolName]:
        """Names of all pools, sorted."""
        return sorted({*self.memberships, *(pool.config.name for pool in self._state.pools)})

    def check_exists(self, name: str) -> PoolName:
        """Returns the name of a pool that exists or is forming.

        Raises:
            NotFoundError: The pool does not exist.
        """
        if name not in self.memberships:
            self._state.pools.get(name)
        return PoolName(name)

    def check_formed(self, name: str) -> None:
        """Raises WrongStateError while the pool forms for the first time."""
        membership = self.memberships.get(PoolName(name))
        if membership and not membership.was_open:
            ranks = f"{membership.registry.num_present} of {membership.registry.world_size} ranks"
            message = f"{ranks} are present; wait until the pool is ready"
            raise WrongStateError("POOL_FORMING", message, field="pool_name")

    def check_limit(self, name: str, field: str) -> None:
        """Raises ExhaustedError if the pool would be new, and the server or the caller's token has the maximum."""
        names = self.names()
        if name in names:
            return
        owner = token_name()
        if owner:
            self._config.limits.check_token_pools(owner, list(map(self._owner, names)).count(owner), field)
        if len(names) >= self._config.max_pools:
            raise ExhaustedError("TOO_MANY_POOLS", f"the server holds {len(names)} pools, the maximum")

    def check_num_blocks(self, name: PoolName, num_blocks: int, owner: str, field: str) -> None:
        """Raises ExhaustedError if a pool of this size exceeds the blocks of the server or of its token."""
        limits, others = self._config.limits, [other for other in self.names() if other != name]
        limits.check_blocks("", num_blocks, sum(map(self._num_blocks, others)), field)
        if owner:
            num_owned_blocks = sum(self._num_blocks(other) for other in others if self._owner(other) == owner)
            limits.check_blocks(owner, num_blocks, num_owned_blocks, field)

    def num_blocks(self) -> int:
        """Blocks of all pools together, those being formed included."""
        return sum(map(self._num_blocks, self.names()))

    def check_fits_journal(self, config: PoolConfig, field: str) -> None:
        """Raises InvalidArgumentError if the journal has no space for a snapshot with this pool, when it is cached."""
        if not self._config.journal.folder:
            return
        configs = [config, *(pool.config for pool in self._state.pools if pool.config.name != config.name)]
        needed, max_bytes = sum(map(full_pool_bytes, configs)), self._config.journal.max_bytes
        if needed > max_bytes:
            pools = f"{config.num_blocks} blocks, with {len(configs) - 1} other pools"
            message = f"a snapshot of {pools}, takes {needed} bytes, journal_max_bytes is {max_bytes}"
            raise InvalidArgumentError(field, message, reason="TOO_MANY_BLOCKS")

    def _owner(self, name: PoolName) -> str:
        return self._state.pools.get(name).owner if name in self._state.pools else self.memberships[name].owner

    def _num_blocks(self, name: PoolName) -> int:
        """Blocks of both tiers that a pool has, or will have when its ranks have allocated them, whichever is more."""
        present = self._state.pools.get(name).config.num_ids if name in self._state.pools else 0
        membership = self.memberships.get(name)
        return max(present, membership.num_planned_blocks if membership else 0)

    def newest_past_epoch(self) -> int:
        """Newest epoch that a pool which no longer exists may have had, of any name."""
        return max(self.past_epoch, self._state.pools.past_epoch)

    def check_can_create(self, config: PoolConfig) -> None:
        """Refuses an invalid pool, one that forms, or exceeds a limit, and any pool while the server stops."""
        self._shutdown.check_not_stopping()
        self.check_formed(config.name)
        self.check_limit(config.name, "config.name")
        check_range("config.num_blocks", config.num_blocks, 0, self._config.max_pool_blocks)
        most_host_blocks = self._config.max_pool_blocks - config.num_blocks
        check_range("config.num_host_blocks", config.num_host_blocks, 0, most_host_blocks)
        if config.name not in self.memberships and not self._is_declared(config):
            config.check()
            self.check_num_blocks(config.name, config.num_ids, token_name(), "config.num_blocks")
            self.check_fits_journal(config, "config.num_blocks")

    def _is_declared(self, config: PoolConfig) -> bool:
        name = config.name
        return name in self._state.pools and not self._state.pools.get(name).config.difference(config)

    def create(self, config: PoolConfig, memory_id: str = "") -> tuple[KVCacheManager, bool]:
        """See `CreatePool` and `check_can_create`."""
        self.check_can_create(config)
        epoch = self.newest_past_epoch() + 1
        command = CreatePool(config, _new_none_hash(config), epoch, token_name(), memory_id)
        is_new = self._executor.execute(command)
        return self._state.pools.get(config.name), is_new

    def open_epoch(self, opened: PoolOpened, owner: str) -> None:
        """See `OpenEpoch`."""
        none_hash = _new_none_hash(opened.config)
        self._executor.execute(OpenEpoch(opened.config, none_hash, opened.epoch, opened.ranks_fence, owner))
        self._faults.reach("epoch.opened")

    def remove(self, name: str) -> None:
        """See `RemovePool`.

        Raises:
            WrongStateError: The pool has ranks, or waits for ranks; the message names them.
        """
        membership = self.memberships.get(PoolName(name))
        if membership and membership.registry:
            present = [rank.rank for rank in membership.registry.rank_infos() if rank.state is not RankState.ABSENT]
            message = f"ranks are present or awaited: {list_numbers(present)}"
            raise WrongStateError("POOL_IN_USE", message, field="pool_name")
        self._executor.execute(RemovePool(name))
        self.memberships.pop(PoolName(name), None)

    def takes_sessions(self, name: PoolName) -> bool:
        """Whether a pool takes new sessions, regardless of the state of its ranks."""
        return self._state.pools.accepts_sessions(name) and not self._shutdown.is_about_to_stop

    def describe(self, name: str) -> pool_pb2.PoolInfo:
        """Describes a pool as it is now, to the caller.

        Raises:
            NotFoundError: The pool does not exist.
        """
        info = self.figures(name)
        membership = self.memberships.get(PoolName(name))
        if membership:
            info.fingerprint.update(dict(membership.registry.fingerprint))
        if info.config.num_blocks:
            picture.add_configuration(info, self._state.pools.get(name))
        return info

    def figures(self, name: str, max_ranks: int | None = None, max_processes: int | None = None) -> pool_pb2.PoolInfo:
        """Describes a pool to those who watch it without a token. Cheap.

        It lacks what names the contents or the memory of the pool, and of the configuration it has name and sizes only.

        Args:
            name: The pool.
            max_ranks: Maximum number of ranks that are listed; None for all.
            max_processes: Maximum number of processes that are listed of each rank; None for all.
        """
        membership = self.memberships.get(PoolName(name))
        if membership and not membership.was_open:
            config = pool_pb2.PoolConfig(name=name, max_model_len=membership.registry.options.max_model_len)
            info = pool_pb2.PoolInfo(
                config=config, prefix_cache=pool_pb2.PrefixCacheCounters(), activity=pool_pb2.ActivityCounters()
            )
        else:
            pool = self._state.pools.get(name)
            sequence = self._event_logs[pool.config.name].last_sequence
            info = picture.pool_figures(pool, self._state.pools.state_of(pool), sequence, tenant())
        if membership:
            info.epoch, info.state = membership.epoch, wire_pools.POOL_STATES.number(membership.state)
            ranks = membership.registry.rank_infos()
            info.ranks.extend(picture.rank_infos(ranks[:max_ranks], max_processes))
            info.world_size = len(ranks)
        if not self.takes_sessions(PoolName(name)):
            info.state = pool_pb2.POOL_STATE_DRAINING
        return info

    async def wait_until_ready(self, name: str, timeout_seconds: float) -> pool_pb2.PoolInfo:
        """Waits until a pool is ready or the time is up, and describes it.

        Raises:
            InvalidArgumentError: The timeout is out of range.
            NotFoundError: The pool does not exist when the time is up.
        """
        check_range("timeout_seconds", timeout_seconds, 0, MAX_WAIT_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not self._is_ready(PoolName(name)):
                    await self._executor.pool_ready.wait()
        return self.describe(name)

    def _is_ready(self, name: PoolName) -> bool:
        if not self.takes_sessions(name):
            return False
        membership = self.memberships.get(name)
        return membership.state is PoolState.READY if membership else name in self._state.pools


def _new_none_hash(config: PoolConfig) -> bytes:
    return secrets.token_bytes(min(config.hash_scheme.hash_size_bytes, 64))
