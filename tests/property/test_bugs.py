"""A bug in any function that a command calls leaves nothing of the command behind."""

import os
from dataclasses import replace
from functools import partial
from itertools import cycle
from types import CodeType
from typing import Any, Final, NamedTuple

import pytest

from fuzz.configs import CONFIGS
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import Command, OpenSession
from kvpool.core.errors import KvpoolError
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.state import State
from kvpool.server.config import ServerConfig
from kvpool.server.services.components import Components
from kvpool.server.services.executor import ChangeFailedError, Executor
from support.injection import Moment, called_functions, failing
from support.integrity import check_integrity
from support.journal import Recorder, Traffic
from support.state import DrivenState, with_message

_MOMENTS: Final[tuple[Moment, ...]] = ("call", "return")
_MIN_FUNCTIONS: Final = 400
"""Functions that the changes call at least."""


class _Change(NamedTuple):
    command: Command[Any]
    now_seconds: float

    def made_in(self, executor: State | Executor) -> object:
        """The result, or the reason of a refusal."""
        try:
            return executor.execute(self.command, self.now_seconds)
        except KvpoolError as error:
            return error.reason


class _Noted(DrivenState):
    """Keeps the commands that it executes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[_Change] = []

    def execute(self, command: Command[Any], now_seconds: float) -> Any:
        self.changes.append(_Change(with_message(command), now_seconds))
        return super().execute(command, now_seconds)


class _Recorder(Recorder):
    """A journal that lets the process continue after a bug."""

    def crash_after_bug(self, method: str) -> None:
        super().crash_after_bug(method)
        assert not self.records, "the command that failed is recorded"


def _components(state: State, journal: _Recorder | None = None) -> Components:
    parts = Components(ServerConfig(), state, journal)
    for pool in state.pools:
        parts.executor.open_log(pool)
    return parts


def _changes(config: PoolConfig) -> list[_Change]:
    state = _Noted()
    traffic = Traffic(state, replace(config, name=PoolName("m")), seed=1)
    for _ in range(60):
        traffic.change()
    return state.changes


@pytest.fixture(autouse=True)
def _processes_that_exit_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail(f"exits with {status}"))


@pytest.mark.slow
def test_the_command_is_not_recorded_and_without_a_journal_the_pool_begins_a_new_epoch() -> None:
    seen, with_journal = set[CodeType](), cycle((True, True, False, False))  # both moments of a function alike
    for config in CONFIGS:
        changes = _changes(config)
        for i, change in enumerate(changes):
            for function, moment in _new(called_functions(partial(change.made_in, _after(changes[:i]))), seen):
                state = _after(changes[:i])
                recorder = _Recorder() if next(with_journal) else None
                epoch, parts = state.pools.get("m").epoch if i else 0, _components(state, recorder)
                with pytest.raises(ChangeFailedError), failing(function, moment):
                    change.made_in(parts.executor)
                assert recorder is None or recorder.num_bugs == 1
                if "m" in state.pools:
                    _check_new(state, state.pools.get("m"), epoch)
                _check_usable(parts, changes[0])
    assert len(seen) > _MIN_FUNCTIONS


def _new(functions: list[CodeType], seen: set[CodeType]) -> list[tuple[CodeType, Moment]]:
    """The moments of those functions that were not seen."""
    new = [each for each in functions if each not in seen]
    seen.update(new)
    return [(each, moment) for each in new for moment in _MOMENTS]


def _after(changes: list[_Change]) -> State:
    state = State()
    for change in changes:
        change.made_in(state)
    return state


def _check_new(state: State, pool: KVCacheManager, epoch: int) -> None:
    assert pool.epoch > epoch
    assert not pool.is_suspended
    assert (len(state.sessions), len(pool.sessions), len(pool.quarantine)) == (0, 0, 0)
    assert pool.blocks.num_free_blocks == pool.blocks.num_blocks - 1 - len(pool.sink_blocks)
    assert len(pool.blocks.prefix_map) == 0
    check_integrity(pool, ())


def _check_usable(parts: Components, creation: _Change) -> None:
    creation.made_in(parts.executor)
    parts.executor.execute(OpenSession("m", SessionId("another"), "client", 10.0, memory_id="one"))
    check_integrity(parts.state.pools.get("m"), parts.state.pools.get("m").sessions.values())
