"""The core's state with a method per command, so that tests read shortly."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from kvpool.core import commands
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import Command, QuarantineEnd
from kvpool.core.errors import InvalidArgumentError, KvpoolError
from kvpool.core.ids import PoolName, SessionId, SessionNumber
from kvpool.core.ranks.messages import RankGroup
from kvpool.core.sessions.session import Session
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.state import State
from kvpool.core.steps.columns import Step, StepResult
from kvpool.server.services.executor import CommandRecorder
from kvpool.wire.changes import change_bytes
from kvpool.wire.steps import step_to_proto

_ResultT = TypeVar("_ResultT")


class DrivenState(State):
    """A state. Each method executes the command of its name; methods without a time execute it at time 0.

    Attributes:
        journal: Records the commands; None for none.
    """

    journal: CommandRecorder | None = None

    def execute(self, command: Command[_ResultT], now_seconds: float) -> _ResultT:
        try:
            result = super().execute(command, now_seconds)
        except KvpoolError:
            raise
        except BaseException:
            if self.journal:
                self.journal.crash_after_bug("method")
            raise
        if self.journal and command.recorded:
            self.journal.record(command, now_seconds, result)
        return result

    def create_pool(
        self, config: PoolConfig, none_hash: bytes, epoch: int = 1, *, owner: str = "", memory_id: str = ""
    ) -> tuple[KVCacheManager, bool]:
        created = self.execute(commands.CreatePool(config, none_hash, epoch, owner, memory_id), 0.0)
        return self.pools.get(config.name), created

    def open_epoch(
        self, config: PoolConfig, none_hash: bytes, epoch: int, *, ranks_fence: bool = False, owner: str = ""
    ) -> KVCacheManager:
        self.execute(commands.OpenEpoch(config, none_hash, epoch, ranks_fence, owner), 0.0)
        return self.pools.get(config.name)

    def pass_epoch(self, pool: KVCacheManager, epoch: int) -> list[Session]:
        sessions = list(pool.sessions.values())
        ends = self.execute(commands.PassEpoch(pool.config.name, epoch), 0.0)
        assert [end.session_id for end in ends] == [session.session_id for session in sessions]
        return sessions

    def suspend(self, pool: KVCacheManager) -> None:
        self.execute(commands.SuspendPool(pool.config.name), 0.0)

    def resume(self, pool: KVCacheManager) -> None:
        self.execute(commands.ResumePool(pool.config.name), 0.0)

    def keep_rank_group(self, name: PoolName, rank_group: RankGroup) -> None:
        self.execute(commands.KeepRankGroup(name, rank_group), 0.0)

    def remove_pool(self, name: str) -> None:
        self.execute(commands.RemovePool(name), 0.0)

    def reset_prefix_cache(self, pool: KVCacheManager) -> bool:
        return self.execute(commands.ResetPrefixCache(pool.config.name), 0.0)

    def drain(self, name: PoolName | None) -> None:
        self.execute(commands.Drain(name), 0.0)

    def undrain(self, name: PoolName | None) -> None:
        self.execute(commands.Undrain(name), 0.0)

    def open_session(
        self, pool_name: str, client_name: str, lease_seconds: float, *, now_seconds: float, **options: Any
    ) -> tuple[KVCacheManager, Session]:
        command = commands.OpenSession(pool_name, options.pop("session_id"), client_name, lease_seconds, **options)
        opened = self.execute(command, now_seconds)
        return self.sessions.find(opened.session_id, now_seconds)

    def touch_session(self, session_id: str, now_seconds: float) -> tuple[KVCacheManager, Session]:
        self.execute(commands.KeepAlive(session_id), now_seconds)
        return self.sessions.find(session_id, now_seconds)

    def attach_stream(self, session: Session) -> None:
        self.execute(commands.AttachStream(session.session_id), 0.0)

    def detach_stream(self, session: Session, now_seconds: float) -> None:
        self.execute(commands.DetachStream(session.session_id), now_seconds)

    def apply(self, pool: KVCacheManager, session: Session, step: Step, message: bytes = b"") -> StepResult:
        del pool
        command = commands.ApplyStep(session.session_id, step, message or _message(step))
        return self.execute(command, session.last_seen_seconds)

    def mark_executed(self, pool: KVCacheManager, session: Session, executed_sequence: int) -> None:
        del pool
        self.execute(commands.MarkExecuted(session.session_id, executed_sequence), session.last_seen_seconds)

    def set_weights_version(self, session: Session, weights_version: str) -> bool:
        return self.execute(commands.SetWeightsVersion(session.session_id, weights_version), 0.0)

    def close_session(self, session_id: str, now_seconds: float) -> tuple[KVCacheManager, int]:
        pool, _ = self.sessions.find(session_id, now_seconds)
        return pool, self.execute(commands.CloseSession(session_id), now_seconds).num_freed_requests

    def evict_session(
        self, pool_name: str, number: int, now_seconds: float, *, quarantine_seconds: float = 0.0
    ) -> tuple[KVCacheManager, Session]:
        found = self.find_session(pool_name, number)
        reason = commands.EndReason.SESSION_EVICTED
        self.execute(commands.EndSession(found[1].session_id, reason, quarantine_seconds), now_seconds)
        return found

    def expire_session(
        self, session_id: SessionId, now_seconds: float, quarantine_seconds: float
    ) -> tuple[KVCacheManager, Session, int]:
        pool, session = next(found for found in self.sessions if found[1].session_id == session_id)
        reason = commands.EndReason.LEASE_EXPIRED
        end = self.execute(commands.EndSession(session_id, reason, quarantine_seconds), now_seconds)
        return pool, session, end.num_requests

    def expire(
        self, now_seconds: float, *, quarantine_seconds: float = 0.0
    ) -> list[tuple[KVCacheManager, Session, int]]:
        due = self.sessions.due(now_seconds)
        return [self.expire_session(session_id, now_seconds, quarantine_seconds) for session_id in due]

    def end_due_quarantines(self, now_seconds: float) -> list[tuple[KVCacheManager, QuarantineEnd]]:
        due = self.pools.due_quarantines(now_seconds)
        return [(self.pools.get(name), end) for name, numbers in due for end in self.end_quarantine(name, numbers)]

    def end_quarantine(self, pool_name: str, numbers: Sequence[SessionNumber]) -> list[QuarantineEnd]:
        return list(self.execute(commands.EndQuarantine(pool_name, tuple(numbers)), 0.0))

    def lose_sessions(self) -> None:
        self.execute(commands.LoseSessions(), 0.0)

    def renew_leases(self, now_seconds: float) -> None:
        self.execute(commands.RenewLeases(), now_seconds)


def restored(state: State) -> DrivenState:
    """A new state, made of a snapshot of another."""
    made = DrivenState()
    with state.snapshot() as snapshot:
        made.restore(snapshot)
    return made


def driven(owner: Any) -> DrivenState:
    """The state of a journal, a recovery or a server that was made with a `DrivenState`."""
    state = owner.state
    assert isinstance(state, DrivenState)
    return state


def with_message(command: Command[_ResultT]) -> Command[_ResultT]:
    """Returns a command as it comes over the wire. The embedded transport sends its steps without a message."""
    if not isinstance(command, commands.ApplyStep) or command.message:
        return command
    return cast("Command[_ResultT]", replace(command, message=_message(command.step)))


def _message(step: Step) -> bytes:
    try:
        return change_bytes(step_to_proto(step, ""))
    except InvalidArgumentError:  # the core refuses it, too
        return repr(step).encode()
