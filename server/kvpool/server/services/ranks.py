"""The ranks of all pools: their streams, and how changes of a membership affect its pool."""

import asyncio
import contextlib
import itertools
import logging
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

from kvpool.core.commands import KeepRankGroup, PassEpoch, SuspendPool, Undrain
from kvpool.core.errors import ExhaustedError, WrongStateError, check_range
from kvpool.core.ids import PoolName
from kvpool.core.ranks.membership import Membership
from kvpool.core.ranks.messages import (
    Allocated,
    Effect,
    EpochPassed,
    LinkEnded,
    LinkId,
    MessageSent,
    PoolEffect,
    PoolOpened,
    PoolResumed,
    PoolState,
    PoolSuspended,
    Rank,
    RankEffect,
    RankState,
    RankTiming,
    Ready,
    Registered,
    Registration,
    ServerMessage,
    SessionsFenced,
)
from kvpool.core.specs.pool_config import PoolConfig, check_pool_name
from kvpool.core.views.inspection import list_numbers
from kvpool.core.views.pool_info import PoolInfo
from kvpool.server.auth.caller import token_name
from kvpool.server.services.fencing import Fencing
from kvpool.server.services.hub import Hub, OpenCall
from kvpool.v1 import worker_pb2
from kvpool.wire import ranks as wire_ranks
from kvpool.wire.fields import field_values

MAX_WAIT_SECONDS: Final = 3600
MAX_UNSENT_MESSAGES: Final = 256
_MAX_LOGGED_RANKS: Final = 16
"""Maximum number of absent ranks in a log record."""

_log = logging.getLogger("kvpool.server.ranks")


@dataclass(slots=True, eq=False)
class RankLink:
    """The stream of a registered rank and its queue of messages.

    Attributes:
        link_id: Number of the stream.
        call: The call of the stream.
        membership: The membership that the rank belongs to.
        rank: The rank.
        has_left: Whether the rank sent Leave.
        outbox: Messages to send; None ends the sender.
    """

    link_id: LinkId
    call: OpenCall
    membership: Membership
    rank: Rank
    has_left: bool = False
    outbox: "asyncio.Queue[worker_pb2.JoinResponse | None]" = field(default_factory=asyncio.Queue)

    @property
    def rank_fields(self) -> dict[str, object]:
        """Log fields of the rank."""
        return {"pool": self.membership.name, "rank": self.rank}

    def send(self, message: ServerMessage) -> None:
        """Queues a message. Ends the stream if too many messages are queued."""
        if self.outbox.qsize() >= MAX_UNSENT_MESSAGES:
            self.call.end(ExhaustedError("NOT_READING", f"{MAX_UNSENT_MESSAGES} messages are unread"))
        else:
            self.outbox.put_nowait(wire_ranks.server_message_to_proto(message))


class Ranks:
    """The memberships of a server's pools, and the links of their ranks.

    Attributes:
        timing: Heartbeat interval and timeouts of ranks.
        fencing: Sends fences to the ranks.
    """

    def __init__(self, hub: Hub, timing: RankTiming, max_pool_blocks: int, max_pools: int) -> None:
        self._hub = hub
        self.timing = timing
        self._max_pool_blocks = max_pool_blocks
        self._max_pools = max_pools
        self._memberships: dict[PoolName, Membership] = {}
        self._links: dict[LinkId, RankLink] = {}
        self._link_ids = map(LinkId, itertools.count(1))
        self.fencing = Fencing(hub.state, self._memberships, self._carry_out)
        hub.on_session_ended = self.fencing.schedule

    def membership(self, name: str) -> Membership | None:
        """The membership of a pool; None for a pool without ranks."""
        return self._memberships.get(PoolName(name))

    def describe(self, name: str) -> PoolInfo:
        """Describes a pool, which may still be forming.

        Raises:
            NotFoundError: The pool does not exist.
        """
        membership = self.membership(name)
        if membership and not membership.was_open:
            config = PoolConfig(membership.name, 0, membership.registry.options.max_model_len, ())
            info = PoolInfo(config, membership.epoch)
        else:
            info = self._hub.describe(name)
        if membership:
            info = replace(info, epoch=membership.epoch, state=membership.state, ranks=membership.registry.rank_infos())
        return info if self._hub.takes_sessions(info.config.name) else replace(info, state=PoolState.DRAINING)

    def pool_names(self) -> list[PoolName]:
        """Names of all pools, forming ones included, sorted."""
        return sorted({*self._memberships, *(pool.config.name for pool in self._hub.state.pools())})

    def check_pool(self, name: str) -> PoolName:
        """Returns the name of a pool that exists or is forming.

        Raises:
            NotFoundError: The pool does not exist.
        """
        if self.membership(name) is None:
            self._hub.state.pool(name)
        return PoolName(name)

    def remove_pool(self, name: str) -> None:
        """Removes a pool and its membership.

        Raises:
            NotFoundError: The pool does not exist.
            WrongStateError: The pool has ranks, waits for ranks, or has sessions; the message names them.
        """
        membership = self.membership(name)
        if membership and membership.registry:
            present = [rank.rank for rank in membership.registry.rank_infos() if rank.state is not RankState.ABSENT]
            message = f"ranks are present or awaited: {list_numbers(present)}"
            raise WrongStateError("POOL_IN_USE", message, field="pool_name")
        self._hub.remove_pool(name)
        self._memberships.pop(PoolName(name), None)

    def check_pool_limit(self, name: str, field: str) -> None:
        """Raises ExhaustedError if the server, or the caller's token, has the maximum of pools."""
        names = self.pool_names()
        if name in names:
            return
        owner = token_name()
        if owner:
            self._hub.limits.check_token_pools(owner, list(map(self._owner, names)).count(owner), field)
        if len(names) >= self._max_pools:
            raise ExhaustedError("TOO_MANY_POOLS", f"the server holds {len(names)} pools, the maximum")

    def _owner(self, name: PoolName) -> str:
        state = self._hub.state
        return state.pool(name).owner if state.has_pool(name) else self._memberships[name].owner

    async def wait_until_ready(self, name: str, timeout_seconds: float) -> PoolInfo:
        """Waits until a pool is ready or the time is up, and describes it.

        Raises:
            InvalidArgumentError: The timeout is out of range.
            NotFoundError: The pool does not exist when the time is up.
        """
        check_range("timeout_seconds", timeout_seconds, 0, MAX_WAIT_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not self._is_ready(name):
                    await self._hub.pool_ready.wait()
        return self.describe(name)

    def check_formed(self, name: str) -> None:
        """Raises WrongStateError while the pool forms for the first time."""
        membership = self.membership(name)
        if membership and not membership.was_open:
            ranks = f"{membership.registry.num_present} of {membership.registry.world_size} ranks"
            message = f"{ranks} are present; wait until the pool is ready"
            raise WrongStateError("POOL_FORMING", message, field="pool_name")

    def restore(self) -> None:
        """Awaits the ranks of the pools that a journal restored, as if they had been lost just now."""
        state = self._hub.state
        for name, rank_group in state.rank_groups.items():
            if not state.has_pool(name):  # the server stopped just before the pool opened
                continue
            pool = state.pool(name)
            if pool.epoch < rank_group.epoch:  # the server stopped just before the epoch passed
                self._hub.execute(PassEpoch(name, rank_group.epoch))
                rank_group = replace(rank_group, plan=None, members=())  # noqa: PLW2901 - the rest of it
            elif not pool.is_suspended:
                self._hub.execute(SuspendPool(name))
            membership = self._memberships[name] = Membership(name, self.timing, self._max_pool_blocks)
            membership.restore(rank_group, self._link_ids, self._hub.now_seconds())

    def register(self, call: OpenCall, pool_name: str, registration: Registration) -> RankLink:
        """Registers a rank and its stream; see `Membership.register`.

        Raises:
            KvpoolError: The registration is refused; nothing was changed.
        """
        check_pool_name("register.pool_name", pool_name)
        name = PoolName(pool_name)
        membership = self._memberships.get(name)
        if membership is None:
            if self._hub.state.has_pool(name):
                message = f"pool {name!r} was declared by a scheduler and takes no ranks"
                raise WrongStateError("POOL_DIFFERS", message, field="register.pool_name")
            self.check_pool_limit(name, "register.pool_name")
            past_epoch = self._hub.newest_past_epoch()
            membership = Membership(name, self.timing, self._max_pool_blocks, past_epoch, owner=token_name())
        link = RankLink(next(self._link_ids), call, membership, registration.rank)
        effects = membership.register(link.link_id, registration, self._hub.now_seconds())
        self._memberships[name] = membership
        self._links[link.link_id] = link
        self._hub.faults.reach("rank.registered")
        link.send(Registered(**field_values(Registered, self.timing)))
        extra = {
            **link.rank_fields,
            "ranks": registration.world_size,
            "bytes": registration.available_bytes,
            "device": registration.device,
            "host": registration.host,
            "pid": registration.pid,
        }
        _log.info("rank registered", extra=extra)
        self._carry_out(membership, effects)
        return link

    def initialized(self, link: RankLink, allocated: Allocated) -> None:
        """See `Membership.initialized`."""
        effects = link.membership.initialized(link.link_id, allocated)
        self._hub.faults.reach("rank.initialized")
        extra = {**link.rank_fields, "epoch": allocated.epoch, "blocks": allocated.num_blocks}
        _log.info("rank allocated", extra={**extra, "bytes": allocated.allocated_bytes})
        self._carry_out(link.membership, effects)

    def heartbeat(self, link: RankLink, sequence: int) -> None:
        """See `Membership.heartbeat`."""
        was_absent = link.membership.registry.is_absent(link.rank)
        effects = link.membership.heartbeat(link.link_id, sequence, self._hub.now_seconds())
        if was_absent:
            _log.info("rank back", extra=link.rank_fields)
        self._carry_out(link.membership, effects)

    def fenced(self, link: RankLink, sequence: int) -> None:
        """See `Membership.fenced`."""
        self._carry_out(link.membership, link.membership.fenced(link.link_id, sequence))

    def leave(self, link: RankLink) -> None:
        """See `Membership.leave`."""
        effects = link.membership.leave(link.link_id)
        link.has_left = True
        _log.info("rank left", extra=link.rank_fields)
        self._carry_out(link.membership, effects)

    def close_link(self, link: RankLink) -> None:
        """Removes a stream that has ended, and reports it to the membership."""
        del self._links[link.link_id]
        if not (link.has_left or link.call.ended_by):
            _log.warning("rank lost", extra=link.rank_fields)
        self._carry_out(link.membership, link.membership.link_broke(link.link_id, self._hub.now_seconds()))

    async def watch_deadlines(self) -> None:
        """Ends leases, quarantines and grace times that are over, and detects silent ranks. Runs indefinitely."""
        while True:
            rank_deadlines = (membership.next_deadline_seconds for membership in self._memberships.values())
            await self._hub.sleep_until(min(self._hub.state.next_expiry_seconds(), *rank_deadlines, float("inf")))
            self._hub.expire_now()
            self.tick()

    def tick(self) -> None:
        """Detects ranks whose heartbeats have stopped, and gives up ranks whose grace time is over."""
        for membership in list(self._memberships.values()):
            known = set(membership.registry.absent)
            effects = membership.tick(self._hub.now_seconds())
            for rank in membership.registry.absent:
                if rank not in known:
                    _log.warning("rank silent", extra={"pool": membership.name, "rank": rank})
            self._carry_out(membership, effects)

    def _is_ready(self, name: str) -> bool:
        if not self._hub.takes_sessions(PoolName(name)):
            return False
        membership = self.membership(name)
        if membership:
            return membership.state is PoolState.READY
        return self._hub.state.has_pool(PoolName(name))

    def _carry_out(self, membership: Membership, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, RankEffect):
                self._change_link(effect)
            else:
                self._change_pool(membership, effect)
        if not membership.registry and not membership.was_open and self.membership(membership.name) is membership:
            del self._memberships[membership.name]
            self._hub.execute(Undrain(membership.name))  # the drain does not apply to a new pool of this name

    def _change_pool(self, membership: Membership, effect: PoolEffect) -> None:
        name = membership.name
        match effect:
            case PoolOpened():
                self._hub.execute(KeepRankGroup(name, membership.rank_group()))
                self._hub.open_epoch(
                    effect.config, effect.epoch, ranks_fence=effect.ranks_fence, owner=membership.owner
                )
                extra = {"pool": name, "epoch": effect.epoch, "ranks": membership.registry.world_size}
                _log.info("pool ready", extra={**extra, "blocks": effect.config.num_blocks})
            case PoolSuspended():
                self._hub.execute(SuspendPool(name))
                absent = list(membership.registry.first_absent(_MAX_LOGGED_RANKS))
                _log.warning("pool degraded", extra={"pool": name, "epoch": membership.epoch, "absent_ranks": absent})
            case PoolResumed():
                self._hub.resume(name)
                _log.info("pool resumed", extra={"pool": name, "epoch": membership.epoch})
            case EpochPassed():
                passed = self._hub.state.pool(name).epoch
                self._hub.execute(KeepRankGroup(name, membership.rank_group()))
                count = self._hub.pass_epoch(name, effect.epoch)
                _log.warning("epoch passed", extra={"pool": name, "epoch": passed, "sessions": count})
            case SessionsFenced():
                self._hub.end_quarantine(name, effect.numbers)
                self.fencing.release(name, effect.numbers)
            case _:
                assert_never(effect)

    def _change_link(self, effect: RankEffect) -> None:
        link = self._links.get(effect.link)
        if link is None:
            return
        match effect:
            case MessageSent(_, message):
                link.send(message)
                if isinstance(message, Ready):
                    self.fencing.schedule(link.membership.name)
            case LinkEnded(_, error):
                extra = {**link.rank_fields, "reason": error.reason, "error": str(error)}
                _log.warning("rank rejected", extra=extra)
                link.call.end(error)
            case _:
                assert_never(effect)
