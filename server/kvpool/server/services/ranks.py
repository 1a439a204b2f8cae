"""The ranks of all pools: their streams, and how changes of a membership affect its pool."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, assert_never

from kvpool.core import commands
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import ExhaustedError, KvpoolError, UnavailableError, WrongStateError
from kvpool.core.ids import PoolName, SessionNumber
from kvpool.core.ranks import messages
from kvpool.core.ranks.effects import (
    Effect,
    EpochPassed,
    LinkEnded,
    MessageSent,
    PoolEffect,
    PoolOpened,
    PoolResumed,
    PoolSuspended,
    ProcessesGone,
    RankEffect,
    SessionsFenced,
)
from kvpool.core.ranks.membership import Membership
from kvpool.core.ranks.messages import LinkId, Rank, RankGroup
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.server.auth.caller import token_name
from kvpool.server.config import ServerConfig
from kvpool.server.fault_points import FaultPoints
from kvpool.server.services.calls import OpenCall
from kvpool.server.services.executor import ChangeFailedError, Executor
from kvpool.server.services.pools import Pools
from kvpool.v1 import worker_pb2
from kvpool.wire import ranks as wire_ranks
from kvpool.wire.fields import field_values

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

    def send(self, message: messages.ServerMessage) -> None:
        """Queues a message. Ends the stream if too many messages are queued."""
        if self.outbox.qsize() >= MAX_UNSENT_MESSAGES:
            self.call.end(ExhaustedError("NOT_READING", f"{MAX_UNSENT_MESSAGES} messages are unread"))
        else:
            self.outbox.put_nowait(wire_ranks.server_message_to_proto(message))


class Ranks:
    """The ranks of one server.

    Args:
        executor: Executes the commands.
        pools: The pools, with the memberships of those that have ranks.
        faults: Fault points; tests arm them.
        config: The server's settings.

    Attributes:
        is_answering: Whether messages to ranks leave this server. While they do not, ranks leave it to look for another
            primary, and none of them counts as lost.
    """

    def __init__(self, executor: Executor, pools: Pools, faults: FaultPoints, config: ServerConfig) -> None:
        self.is_answering: Callable[[], bool] = lambda: True
        self._executor = executor
        self._state = executor.state
        self._pools = pools
        self._memberships = pools.memberships
        self._fencing = executor.fencing
        self._faults = faults
        self._config = config
        self._links: dict[LinkId, RankLink] = {}
        self._link_ids = map(LinkId, itertools.count(1))
        executor.end_epoch = self.end_epoch

    def restore(self, *, expects_ranks: bool = False) -> None:
        """Awaits the ranks of the pools that an earlier server had.

        Args:
            expects_ranks: Whether pools that were serving continue to serve until the ranks are missed. If not, the
                ranks count as lost just now.
        """
        state = self._state
        for name, rank_group in state.pools.rank_groups.items():
            if name not in state.pools:  # the server stopped just before the pool opened
                continue
            pool = state.pools.get(name)
            if pool.epoch < rank_group.epoch:  # the server stopped just before the epoch passed
                self._executor.execute(commands.PassEpoch(name, rank_group.epoch))
                rank_group = replace(rank_group, plan=None, members=())  # noqa: PLW2901 - the rest of it
            serves = expects_ranks and not pool.is_suspended
            if not serves and not pool.is_suspended:
                self._executor.execute(commands.SuspendPool(name))
            membership = self._memberships[name] = self._membership(name, owner=pool.owner)
            now_seconds = self._executor.clock.now_seconds()
            membership.restore(rank_group, self._link_ids, now_seconds, expects_ranks=serves)

    def register(self, call: OpenCall, name: PoolName, registration: messages.Registration) -> RankLink:
        """Registers a rank and its stream; see `Membership.register`.

        Raises:
            KvpoolError: The registration is refused; nothing was changed.
        """
        membership = self._memberships.get(name)
        if membership is None:
            if name in self._state.pools:
                message = f"a scheduler declared pool {name!r}, which takes no ranks; kvpool remove-pool frees its name"
                raise WrongStateError("POOL_DIFFERS", message, field="register.pool_name")
            self._pools.check_limit(name, "register.pool_name")
            past_epoch = self._pools.newest_past_epoch()
            membership = self._membership(name, past_epoch, token_name())
        link = RankLink(next(self._link_ids), call, membership, registration.rank)
        now_seconds = self._executor.clock.now_seconds()
        effects = self._changed(membership, membership.register, link.link_id, registration, now_seconds)
        self._memberships[name] = membership
        self._links[link.link_id] = link
        self._faults.reach("rank.registered")
        link.send(messages.Registered(**field_values(messages.Registered, self._config.rank_timing)))
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

    def _membership(self, name: PoolName, past_epoch: int = 0, owner: str = "") -> Membership:
        def check(config: PoolConfig, field: str) -> None:
            config.check()
            self._pools.check_num_blocks(name, config.num_ids, owner, field)
            self._pools.check_fits_journal(config, field)

        timing, max_blocks = self._config.rank_timing, self._config.max_pool_blocks
        return Membership(name, timing, max_blocks, past_epoch, owner=owner, check=check)

    def initialized(self, link: RankLink, allocated: messages.Allocated) -> None:
        """See `Membership.initialized`."""
        effects = self._changed(link.membership, link.membership.initialized, link.link_id, allocated)
        self._faults.reach("rank.initialized")
        extra = {**link.rank_fields, "epoch": allocated.epoch, "blocks": allocated.num_blocks}
        _log.info("rank allocated", extra={**extra, "bytes": allocated.allocated_bytes})
        self._carry_out(link.membership, effects)

    def heartbeat(self, link: RankLink, sequence: int, processes: Sequence[messages.MappingProcess] = ()) -> None:
        """See `Membership.heartbeat`."""
        membership, now_seconds = link.membership, self._executor.clock.now_seconds()
        was_absent = membership.registry.is_absent(link.rank)
        effects = self._changed(membership, membership.heartbeat, link.link_id, sequence, now_seconds, processes)
        if was_absent:
            _log.info("rank back", extra=link.rank_fields)
        self._carry_out(membership, effects)

    def fenced(self, link: RankLink, sequence: int, pending: Sequence[SessionNumber]) -> None:
        """See `Membership.fenced`."""
        self._change(link.membership, link.membership.fenced, link.link_id, sequence, pending)

    def sessions_gone(self, link: RankLink, numbers: Sequence[SessionNumber]) -> None:
        """See `Membership.sessions_gone`."""
        self._change(link.membership, link.membership.sessions_gone, link.link_id, numbers)

    def leave(self, link: RankLink) -> None:
        """See `Membership.leave`."""
        effects = self._changed(link.membership, link.membership.leave, link.link_id)
        link.has_left = True
        _log.info("rank left", extra=link.rank_fields)
        self._carry_out(link.membership, effects)

    def close_link(self, link: RankLink) -> None:
        """Removes a stream that has ended, and reports it to the membership."""
        del self._links[link.link_id]
        is_expected = not self.is_answering()
        if not (link.has_left or link.call.ended_by or is_expected):
            _log.warning("rank lost", extra=link.rank_fields)
        membership, now_seconds = link.membership, self._executor.clock.now_seconds()
        if self._memberships.get(membership.name) is membership:  # not one that `end_epoch` has dropped
            change = partial(membership.link_broke, is_expected=is_expected)
            self._change(membership, change, link.link_id, now_seconds)

    def end_epoch(self, name: PoolName) -> None:
        """Ends the epoch of a pool whose state cannot be trusted any more, and the sessions in it.

        The ranks of the pool, if it has any, register again, as they do with a server that restarted without them.
        """
        before = self._memberships.pop(name, None)
        for link in self._links.values():
            if link.membership is before:
                link.call.end(UnavailableError("EPOCH_PASSED", "the epoch has ended", retry_seconds=0.0))
        if name not in self._state.pools:
            return
        pool = self._state.pools.get(name)
        config, epoch = pool.config, pool.epoch + 1
        self._executor.open_log(pool)  # unless its creation failed, it is open
        if before:
            membership = self._memberships[name] = self._membership(name, owner=pool.owner)
            rank_group = RankGroup(epoch, before.registry.options)
            membership.restore(rank_group, self._link_ids, self._executor.clock.now_seconds())
            self._executor.execute(commands.KeepRankGroup(name, rank_group))
        ends = self._executor.execute(commands.PassEpoch(name, epoch))
        if not before:
            self._pools.open_epoch(PoolOpened(config, epoch, ranks_fence=False), pool.owner)
        _log.warning("epoch passed", extra={"pool": name, "epoch": epoch - 1, "sessions": len(ends)})

    def _changed(self, membership: Membership, change: Callable[..., list[Effect]], *arguments: object) -> list[Effect]:
        """Changes a membership, and returns the effects. A bug counts as one in a command, as half may be changed."""
        try:
            return change(*arguments)
        except KvpoolError:
            raise
        except Exception as error:
            raise self._executor.recover("Membership", lambda: [membership.name]) from error

    def _change(self, membership: Membership, change: Callable[..., list[Effect]], *arguments: object) -> None:
        self._carry_out(membership, self._changed(membership, change, *arguments))

    async def send_fences(self) -> None:
        """Sends the fences that are due. Runs indefinitely."""
        while True:
            for name in await self._fencing.next_due():
                membership = self._memberships.get(name)
                if membership and name in self._state.pools:
                    with contextlib.suppress(ChangeFailedError):
                        self._send_fence(membership, self._state.pools.get(name))

    def _send_fence(self, membership: Membership, pool: KVCacheManager) -> None:
        awaiting = pool.quarantine.awaiting_ranks
        killed = self._fencing.take_killed(pool)
        last_number, live = self._state.sessions.last_number, list(pool.sessions)
        self._change(membership, membership.fence, last_number, live, awaiting, killed)

    def next_deadline_seconds(self) -> float:
        """When the next heartbeat or grace time is over; infinity without ranks."""
        deadlines = [membership.next_deadline_seconds for membership in self._memberships.values()]
        return min(deadlines, default=float("inf"))

    def tick(self) -> None:
        """Detects ranks whose heartbeats have stopped, and gives up ranks whose grace time is over."""
        now_seconds, is_answering = self._executor.clock.now_seconds(), self.is_answering()
        for membership in list(self._memberships.values()):
            if not is_answering:
                membership.excuse(now_seconds)
            known = set(membership.registry.absent)
            effects = self._changed(membership, membership.tick, now_seconds)
            for rank in membership.registry.absent:
                if rank not in known:
                    _log.warning("rank silent", extra={"pool": membership.name, "rank": rank})
            self._carry_out(membership, effects)

    def _carry_out(self, membership: Membership, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, RankEffect):
                self._change_link(effect)
            else:
                self._change_pool(membership, effect)
        if not membership.registry and not membership.was_open and self._memberships.get(membership.name) is membership:
            del self._memberships[membership.name]
            # The drain does not apply to a new pool of this name.
            self._executor.execute(commands.Undrain(membership.name))

    def _change_pool(self, membership: Membership, effect: PoolEffect) -> None:
        name = membership.name
        match effect:
            case PoolOpened():
                self._executor.execute(commands.KeepRankGroup(name, membership.rank_group()))
                self._pools.open_epoch(effect, membership.owner)
                extra = {"pool": name, "epoch": effect.epoch, "ranks": membership.registry.world_size}
                _log.info("pool ready", extra={**extra, "blocks": effect.config.num_blocks})
            case PoolSuspended():
                self._executor.execute(commands.SuspendPool(name))
                absent = list(membership.registry.first_absent(_MAX_LOGGED_RANKS))
                _log.warning("pool degraded", extra={"pool": name, "epoch": membership.epoch, "absent_ranks": absent})
            case PoolResumed():
                self._executor.execute(commands.ResumePool(name))
                _log.info("pool resumed", extra={"pool": name, "epoch": membership.epoch})
            case EpochPassed():
                passed = self._state.pools.get(name).epoch
                self._executor.execute(commands.KeepRankGroup(name, membership.rank_group()))
                ends = self._executor.execute(commands.PassEpoch(name, effect.epoch))
                _log.warning("epoch passed", extra={"pool": name, "epoch": passed, "sessions": len(ends)})
            case SessionsFenced():
                self._executor.execute(commands.EndQuarantine(name, effect.numbers))
            case ProcessesGone():
                self._end_sessions(name, set(effect.numbers))
            case _:
                assert_never(effect)

    def _end_sessions(self, name: PoolName, numbers: Collection[SessionNumber]) -> None:
        sessions = self._state.pools.get(name).sessions
        for session in [sessions[number] for number in list(sessions) if number in numbers]:
            seconds = self._config.quarantine_seconds
            self._executor.execute(commands.EndSession(session.session_id, commands.EndReason.PROCESS_GONE, seconds))

    def _change_link(self, effect: RankEffect) -> None:
        link = self._links.get(effect.link)
        if link is None:
            return
        match effect:
            case MessageSent(_, message):
                link.send(message)
                if isinstance(message, messages.Ready):
                    self._fencing.schedule(link.membership.name)
            case LinkEnded(_, error):
                extra = {**link.rank_fields, "reason": error.reason, "error": str(error)}
                _log.warning("rank rejected", extra=extra)
                link.call.end(error)
            case _:
                assert_never(effect)
