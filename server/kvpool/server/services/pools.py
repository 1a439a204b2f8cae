"""The pools of a server, including those whose ranks still form them."""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
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
from kvpool.core.views.pool_info import PoolInfo
from kvpool.server.auth.caller import token_name
from kvpool.server.config import ServerConfig
from kvpool.server.events.log import EventLogs
from kvpool.server.fault_points import FaultPoints
from kvpool.server.journal.snapshot import full_pool_bytes
from kvpool.server.services.executor import Executor
from kvpool.server.shutdown import Shutdown

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
        claim: Waits until this server's shard has a pool that is about to be created, which the named field of the
            caller names, or raises a KvpoolError. None on a server without a cluster.
    """

    def __init__(
        self, executor: Executor, event_logs: EventLogs, shutdown: Shutdown, faults: FaultPoints, config: ServerConfig
    ) -> None:
        self.memberships: dict[PoolName, Membership] = {}
        self.past_epoch = config.past_epoch
        self.claim: Callable[[PoolName, str], Awaitable[None]] | None = None
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
        """Blocks that a pool has, or will have when its ranks have allocated them, whichever is more."""
        present = self._state.pools.get(name).config.num_blocks if name in self._state.pools else 0
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
        if config.name not in self.memberships and not self._is_declared(config):
            config.check()
            self.check_num_blocks(config.name, config.num_blocks, token_name(), "config.num_blocks")
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
        return self._state.pools.drain_state.accepts_sessions(name) and not self._shutdown.is_about_to_stop

    def describe(self, name: str) -> PoolInfo:
        """Describes a pool as it is now.

        Raises:
            NotFoundError: The pool does not exist.
        """
        membership = self.memberships.get(PoolName(name))
        if membership and not membership.was_open:
            config = PoolConfig(membership.name, 0, membership.registry.options.max_model_len, ())
            info = PoolInfo(config, membership.epoch)
        else:
            pool = self._state.pools.get(name)
            info = self._state.pools.describe(pool, self._event_logs[pool.config.name].last_sequence)
        if membership:
            info = replace(
                info,
                epoch=membership.epoch,
                state=membership.state,
                ranks=membership.registry.rank_infos(),
                fingerprint=membership.registry.fingerprint,
            )
        return info if self.takes_sessions(info.config.name) else replace(info, state=PoolState.DRAINING)

    async def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
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
