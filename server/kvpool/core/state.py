"""The state of a server: its pools and sessions. Every change is a command that `State.execute` executes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Final, TypeVar, assert_never

from kvpool.core import commands
from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import HANDLERS, Command, EndReason, QuarantineEnd, SessionEnd, handles
from kvpool.core.errors import (
    InvalidArgumentError,
    NotFoundError,
    WrongStateError,
    check_range,
    check_size,
    out_of_memory,
)
from kvpool.core.execution import apply, end_session
from kvpool.core.ids import MAX_CLIENT_NAME_BYTES, SessionId, SessionNumber
from kvpool.core.memory_probe import process_memory
from kvpool.core.pools.memory_identity import check_memory_id, is_replaced, needs_new_epoch
from kvpool.core.pools.registry import PoolRegistry
from kvpool.core.pools.sessions import SessionRegistry, end_of
from kvpool.core.pools.snapshots import StateSnapshot, end_pool_snapshot, pool_snapshot, restored_pool
from kvpool.core.sessions.session import (
    MAX_RESERVE_TOKENS,
    Session,
    check_key,
    check_weights_version,
    is_newest_key,
    with_key,
)
from kvpool.core.snapshots import Column
from kvpool.core.specs.longest_request import check_longest_request
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import StepResult
from kvpool.core.views.inspection import list_numbers

_ResultT = TypeVar("_ResultT")
_POOL_BYTES: Final = 2**20
_SESSION_BYTES: Final = 2**12
"""Bytes that a new pool, or a new epoch, and a new session need at most."""


class State:
    """The state of a server.

    Args:
        new_block_lifetimes: Creates the sampler of block lifetimes for a new pool; may return None.
        sample_key: Key of the sample of each `HitCurve`, unknown to clients. Only statistics depend on it, so each
            process draws its own.

    Attributes:
        pools: The pools. Callers only read them.
        sessions: The sessions. Callers only read them.
        lost_may_run: Whether a last step of sessions whose state was lost may still run.
    """

    def __init__(
        self, new_block_lifetimes: Callable[[], BlockLifetimes | None] = lambda: None, sample_key: bytes = b""
    ) -> None:
        self.new_block_lifetimes = new_block_lifetimes
        self._sample_key = sample_key
        self.pools = PoolRegistry()
        self.sessions = SessionRegistry()
        self.lost_may_run = False
        self._is_read = False  # whether a snapshot is read

    def __repr__(self) -> str:
        return f"<State: {len(self.pools)} pools, {len(self.sessions)} sessions>"

    def execute(self, command: Command[_ResultT], now_seconds: float) -> _ResultT:
        """Executes a command: checks first, then changes.

        Args:
            command: The command; its class documents the result and the errors.
            now_seconds: The current time, on the clock of the leases.

        Raises:
            KvpoolError: The command is refused; nothing was changed.
        """
        result: _ResultT = HANDLERS[type(command)](self, command, now_seconds)
        return result

    def find_session(self, pool_name: str, number: int) -> tuple[KVCacheManager, Session]:
        """Finds a session by its number.

        Raises:
            NotFoundError: The pool does not exist, or has no session of this number.
        """
        pool = self.pools.get(pool_name)
        session = pool.sessions.get(SessionNumber(number))
        if session is None:
            message = f"pool {pool_name!r} has no session {number}"
            raise NotFoundError("SESSION_NOT_FOUND", message, field="session_number")
        return pool, session

    def next_expiry_seconds(self) -> float:
        """When the next lease or quarantine expires, in seconds; infinity if none does."""
        leases = [session.expires_seconds for _, session in self.sessions]
        return min([*leases, *(pool.quarantine.next_due_seconds for pool in self.pools)], default=float("inf"))

    # Snapshots

    @contextmanager
    def snapshot(self) -> Iterator[StateSnapshot]:
        """The state at this moment, which can be read until the context ends. O(sessions).

        Raises:
            RuntimeError: Another snapshot has not ended.
        """
        if self._is_read:
            raise RuntimeError("another snapshot has not ended")
        self._is_read = True
        try:
            yield StateSnapshot(
                pools=[pool_snapshot(pool) for pool in self.pools],
                rank_groups=Column(list(self.pools.rank_groups.items()), slice_length=1),
                past_epoch=self.pools.past_epoch,
                is_server_drained=None in self.pools.drained,
                drained_pools={name for name in self.pools.drained if name is not None},
                keyed_sessions=self.sessions.keyed(),
                ends=Column(self.sessions.ends.all(), slice_length=256),
                is_incomplete=self.sessions.ends.is_incomplete,
                lost_may_run=self.lost_may_run,
                last_session_number=self.sessions.last_number,
            )
        finally:
            self._is_read = False
            for pool in self.pools:
                end_pool_snapshot(pool)

    def restore(self, snapshot: StateSnapshot) -> None:
        """Makes a new state as it was. If it raises, drop the state.

        Raises:
            InvalidArgumentError: A configuration is out of range.
            ValueError: The parts of the snapshot do not belong together.
            LookupError: As ValueError.
        """
        for each in snapshot.pools:
            self.pools.add(restored_pool(each, self.new_block_lifetimes(), self._sample_key))
        self.pools.rank_groups = dict(snapshot.rank_groups.values)
        self.pools.past_epoch = snapshot.past_epoch
        self.pools.drained = {*snapshot.drained_pools, *([None] if snapshot.is_server_drained else [])}
        self.sessions.restore(self.pools, snapshot.keyed_sessions)
        self.sessions.last_number = SessionNumber(snapshot.last_session_number)
        for end in snapshot.ends.values:
            self.sessions.ends.remember(end.session_id, end.reason, end.num_freed_requests)
        self.sessions.ends.is_incomplete = snapshot.is_incomplete
        self.lost_may_run = snapshot.lost_may_run

    def replace(self, other: "State") -> None:
        """Takes the pools and sessions of another state instead of its own. The other one is not used any more."""
        vars(self.pools).update(vars(other.pools))
        vars(self.sessions).update(vars(other.sessions))
        self.lost_may_run = other.lost_may_run

    # Pools

    @handles(commands.CreatePool)
    def _create_pool(self, command: commands.CreatePool, _: float) -> bool:
        config = command.config
        config.check()
        has_ranks = config.name in self.pools.rank_groups
        check_memory_id(command.memory_id, has_ranks=has_ranks)
        if config.name not in self.pools:
            check_longest_request(config)
            with _memory_errors_refused():
                process_memory.reserve(_POOL_BYTES)
            self._add_pool(_with_none_hash(config, command.none_hash), command.epoch, command.owner)
            self.pools.get(config.name).memory_id = command.memory_id
            return True
        pool = self.pools.get(config.name)
        existing = pool.config
        if has_ranks:  # they know the layers
            existing, config = existing.without_layers(), config.without_layers()
        difference = existing.difference(config)
        if not difference:
            return False
        if not is_replaced(pool, command.memory_id):
            remedy = "end its sessions and remove it (kvpool remove-pool), or choose another name"
            message = f"pool {config.name!r} already exists and differs in this field; {remedy}"
            raise WrongStateError("POOL_DIFFERS", message, field=f"config.{difference}")
        check_longest_request(config)
        with _memory_errors_refused():
            process_memory.reserve(_POOL_BYTES)
            pool.begin_epoch(_with_none_hash(config, command.none_hash), pool.epoch + 1)
        pool.memory_id, pool.owner = command.memory_id, command.owner
        return True

    @handles(commands.OpenEpoch)
    def _open_epoch(self, command: commands.OpenEpoch, _: float) -> None:
        config = _with_none_hash(command.config, command.none_hash)
        if config.name in self.pools:
            with _memory_errors_refused():
                self.pools.get(config.name).begin_epoch(config, command.epoch)
        else:
            self._add_pool(config, command.epoch, command.owner)
        pool = self.pools.get(config.name)
        pool.is_suspended = False
        pool.ranks_fence = command.ranks_fence

    def _add_pool(self, config: PoolConfig, epoch: int, owner: str) -> None:
        with _memory_errors_refused():
            pool = KVCacheManager(config, epoch, self.new_block_lifetimes(), owner, self._sample_key)
        self.pools.add(pool)

    @handles(commands.RemovePool)
    def _remove_pool(self, command: commands.RemovePool, _: float) -> None:
        pool = self.pools.get(command.pool_name)
        if pool.sessions:
            message = f"sessions are open: {list_numbers(list(pool.sessions))}"
            raise WrongStateError("POOL_IN_USE", message, field="pool_name")
        if pool.quarantine:
            message = f"blocks of sessions that ended are in quarantine: {list_numbers(pool.quarantine.numbers)}"
            raise WrongStateError("POOL_IN_USE", message, field="pool_name")
        self.pools.remove(pool)

    @handles(commands.KeepRankGroup)
    def _keep_rank_group(self, command: commands.KeepRankGroup, _: float) -> None:
        self.pools.rank_groups[command.pool_name] = command.rank_group

    @handles(commands.SuspendPool)
    def _suspend(self, command: commands.SuspendPool, _: float) -> None:
        pool = self.pools.get(command.pool_name)
        pool.is_suspended = True
        pool.activity.suspensions += 1

    @handles(commands.ResumePool)
    def _resume(self, command: commands.ResumePool, _: float) -> None:
        self.pools.get(command.pool_name).is_suspended = False

    @handles(commands.ResetPrefixCache)
    def _reset_prefix_cache(self, command: commands.ResetPrefixCache, _: float) -> bool:
        return self.pools.get(command.pool_name).reset_prefix_cache()

    @handles(commands.Drain)
    def _drain(self, command: commands.Drain, _: float) -> None:
        self.pools.drained.add(command.pool_name)

    @handles(commands.Undrain)
    def _undrain(self, command: commands.Undrain, _: float) -> None:
        self.pools.drained.discard(command.pool_name)

    # Sessions

    @handles(commands.PassEpoch)
    def _pass_epoch(self, command: commands.PassEpoch, _: float) -> tuple[SessionEnd, ...]:
        pool = self.pools.get(command.pool_name)
        ends = tuple(end_of(pool, session) for session in pool.sessions.values())
        with _memory_errors_refused():
            pool.begin_epoch(pool.config, command.epoch)
        self.sessions.remove_all(pool, "EPOCH_PASSED")
        pool.activity.epoch_ends += len(ends)
        pool.is_suspended = True
        return ends

    @handles(commands.OpenSession)
    def _open_session(self, command: commands.OpenSession, now_seconds: float) -> commands.SessionOpened:
        check_size("client_name", command.client_name, MAX_CLIENT_NAME_BYTES)
        check_key("open_key", command.open_key)
        check_weights_version(command.weights_version)
        check_range("reserve_tokens", command.reserve_tokens, 0, MAX_RESERVE_TOKENS)
        found = self._opened_before(command, now_seconds)
        if found:
            return commands.SessionOpened(found, is_new=False)
        pool = self.pools.get(command.pool_name)
        check_memory_id(command.memory_id, has_ranks=pool.config.name in self.pools.rank_groups)
        self.pools.check_accepts_sessions(pool.config.name)
        pool.check_serving()
        starts_epoch = needs_new_epoch(pool, command.memory_id)
        pool.quotas.check(command.quota)
        with _memory_errors_refused():
            process_memory.reserve(_POOL_BYTES if starts_epoch else _SESSION_BYTES)
            if starts_epoch:
                pool.begin_epoch(pool.config, pool.epoch + 1)
        pool.memory_id = command.memory_id  # nothing is refused after this
        session_number = self.sessions.last_number = SessionNumber(self.sessions.last_number + 1)
        session = Session(
            command.session_id,
            session_number,
            command.client_name,
            command.lease_seconds,
            now_seconds,
            command.open_key,
            _open_arguments(command),
            pool.quotas.open(command.quota, session_number),
            owner=command.owner,
            salt=command.salt,
            namespace=command.namespace,
            weights_version=command.weights_version,
            reserve_tokens=command.reserve_tokens if pool.reserves_slots else 0,
        )
        session.first_map = pool.open_scope(session.scope)
        self.sessions.add(pool, session)
        pool.activity.sessions_opened += 1
        return commands.SessionOpened(session.session_id, is_new=True, starts_epoch=starts_epoch)

    def _opened_before(self, command: commands.OpenSession, now_seconds: float) -> SessionId | None:
        session = self.sessions.opened_by(command.open_key, command.owner)
        if session is None or session.expires_seconds <= now_seconds:
            return None
        if session.open_arguments != _open_arguments(command):
            message = "already opened a session with other arguments"
            raise InvalidArgumentError("open_key", message, reason="OPEN_KEY_REUSED")
        self.pools.get(command.pool_name).activity.retries += 1
        session.last_seen_seconds = now_seconds
        return session.session_id

    @handles(commands.KeepAlive)
    def _keep_alive(self, command: commands.KeepAlive, now_seconds: float) -> None:
        self._renew_lease(command.session_id, now_seconds)

    def _renew_lease(self, session_id: str, now_seconds: float) -> tuple[KVCacheManager, Session]:
        pool, session = self.sessions.find(session_id, now_seconds)
        session.last_seen_seconds = now_seconds
        return pool, session

    @handles(commands.AttachStream)
    def _attach_stream(self, command: commands.AttachStream, _: float) -> None:
        self.sessions[command.session_id][1].open_streams += 1

    @handles(commands.DetachStream)
    def _detach_stream(self, command: commands.DetachStream, now_seconds: float) -> None:
        found = self.sessions.get(command.session_id)
        if found:
            found[1].open_streams -= 1
            found[1].last_seen_seconds = now_seconds

    @handles(commands.ApplyStep)
    def _apply_step(self, command: commands.ApplyStep, now_seconds: float) -> StepResult:
        pool, session = self.sessions.find(command.session_id, now_seconds)
        session.last_seen_seconds = now_seconds
        return apply.apply_step(pool, session, command.step, command.message)

    @handles(commands.MarkExecuted)
    def _mark_executed(self, command: commands.MarkExecuted, now_seconds: float) -> None:
        pool, session = self._renew_lease(command.session_id, now_seconds)
        check_range("executed_sequence", command.executed_sequence, 0, session.sequence)
        apply.mark_executed(pool, session, command.executed_sequence)

    @handles(commands.SetWeightsVersion)
    def _set_weights_version(self, command: commands.SetWeightsVersion, _: float) -> bool:
        check_weights_version(command.weights_version)
        check_key("set_key", command.set_key)
        found = self.sessions.get(command.session_id)
        if found is None:
            raise self.sessions.ends.error(command.session_id)
        pool, session = found
        is_newest = is_newest_key(session.weights_keys, command.set_key)
        if is_newest is False:
            raise WrongStateError("WEIGHTS_SET_LATER", "a later call has set the weights version", field="set_key")
        if is_newest or command.weights_version == session.weights_version:
            session.weights_keys = with_key(session.weights_keys, command.set_key)
            return False
        with _memory_errors_refused():
            process_memory.reserve(_SESSION_BYTES)
        pool.set_weights_version(session, command.weights_version)
        session.weights_keys = with_key(session.weights_keys, command.set_key)
        return True

    @handles(commands.FreePart)
    def _free_part(self, command: commands.FreePart, now_seconds: float) -> int:
        return end_session.free_part(*self._renew_lease(command.session_id, now_seconds))

    @handles(commands.CloseSession)
    def _close_session(self, command: commands.CloseSession, now_seconds: float) -> commands.SessionClosed:
        count = self.sessions.ends.num_freed_by_close(command.session_id)
        if count is not None:
            return commands.SessionClosed(count)
        pool, session = self.sessions.find(command.session_id, now_seconds)
        num_freed_requests, end = command.num_freed_requests + len(session.requests), end_of(pool, session)
        end_session.end_session(pool, session)
        self.sessions.remove(session.session_id, "SESSION_CLOSED", num_freed_requests)
        pool.activity.sessions_closed += 1
        return commands.SessionClosed(num_freed_requests, end)

    @handles(commands.EndSession)
    def _end_session(self, command: commands.EndSession, now_seconds: float) -> SessionEnd:
        pool, session = self.sessions[command.session_id]
        match command.reason:
            case EndReason.LEASE_EXPIRED:
                pool.activity.leases_expired += 1
            case EndReason.SESSION_EVICTED:
                pool.activity.evicted_sessions += 1
            case EndReason.PROCESS_GONE:
                pool.activity.processes_gone += 1
            case _:
                assert_never(command.reason)
        end = end_of(pool, session)
        end_session.quarantine_session(pool, session, now_seconds, command.quarantine_seconds)
        self.sessions.remove(session.session_id, command.reason.name)
        return replace(end, is_quarantined=pool.quarantine.find(session.session_number) is not None)

    @handles(commands.EndQuarantine)
    def _end_quarantine(self, command: commands.EndQuarantine, now_seconds: float) -> tuple[QuarantineEnd, ...]:
        pool = self.pools.get(command.pool_name)
        found = [each for each in map(pool.quarantine.find, command.session_numbers) if each]
        ends = tuple(QuarantineEnd(end_of(pool, each.session), now_seconds - each.since_seconds) for each in found)
        for each in found:
            end_session.end_quarantine(pool, each)
        return ends

    @handles(commands.LoseSessions)
    def _lose_sessions(self, _: commands.LoseSessions, __: float) -> None:
        self.sessions.ends.is_incomplete = True
        self.lost_may_run = True

    @handles(commands.EndLostSteps)
    def _end_lost_steps(self, _: commands.EndLostSteps, __: float) -> None:
        self.lost_may_run = False

    @handles(commands.RenewLeases)
    def _renew_leases(self, _command: commands.RenewLeases, now_seconds: float) -> None:
        for _, session in self.sessions:
            session.open_streams = 0
            session.last_seen_seconds = now_seconds
            session.waits_since_seconds = now_seconds if session.waits_since_seconds < inf else inf
        for pool in self.pools:
            pool.quarantine.restart_waits(now_seconds)


@contextmanager
def _memory_errors_refused() -> Iterator[None]:
    """Makes a lack of memory a refusal. Nothing may have been changed yet in the block."""
    try:
        yield
    except MemoryError:
        raise out_of_memory() from None


def _open_arguments(command: commands.OpenSession) -> tuple[str | float, ...]:
    return (
        command.pool_name,
        command.client_name,
        command.memory_id,
        command.weights_version,
        command.reserve_tokens,
        *command.requested,
    )


def _with_none_hash(config: PoolConfig, none_hash: bytes) -> PoolConfig:
    """Returns the configuration with this none_hash, unless it has one."""
    if config.hash_scheme.none_hash:
        return config
    return replace(config, hash_scheme=replace(config.hash_scheme, none_hash=none_hash))
