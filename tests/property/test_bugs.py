"""A bug in any function that a command calls leaves nothing of the command behind."""

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple

import pytest

from fuzz.configs import CONFIGS
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import Command, OpenSession, RenewLeases
from kvpool.core.errors import KvpoolError
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.state import State
from kvpool.server.config import ServerConfig
from kvpool.server.crash import EXIT_STATUS
from kvpool.server.journal.config import JournalConfig
from kvpool.server.journal.journal import Journal
from kvpool.server.services.components import Components
from kvpool.server.services.executor import ChangeFailedError, Executor
from support.injection import Moment, called_functions, failing
from support.integrity import check_integrity
from support.journal import WRITER, Traffic, assert_alike, kill
from support.state import DrivenState, with_message

_MOMENTS: Final[tuple[Moment, ...]] = ("call", "return")
_MIN_FUNCTIONS: Final = 400
"""Functions that the changes call at least."""


class _ExitedError(BaseException):
    """The process has ended."""


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


class _Server:
    """A server's executor with a journal, restarted again and again, and a twin without that is never killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.twin = State()
        self._journal = self._recovered()
        self.parts = _components(self._journal.state, self._journal)

    def _recovered(self) -> Journal:
        journal = Journal(JournalConfig(str(self._folder)), State, WRITER)
        assert not journal.recovery.dropped, journal.recovery.detail
        return journal

    def functions_of(self, change: _Change) -> list[CodeType]:
        """The functions that a change calls."""
        self._journal.close()  # with a snapshot, so that the restarts have few logs to read
        self._journal = self._recovered()
        self._journal.state.execute(RenewLeases(), change.now_seconds)
        found = called_functions(lambda: change.made_in(self._journal.state))
        self.restart(change.now_seconds)
        return found

    def restart(self, now_seconds: float) -> None:
        """Recovers the state from the journal, which is that of the twin."""
        self.end()
        self._journal = self._recovered()
        assert_alike(self.twin, self._journal.state)
        self._journal.begin()
        self.parts = _components(self._journal.state, self._journal)
        self.renew_leases(now_seconds)

    def renew_leases(self, now_seconds: float) -> None:
        """Keeps the sessions open, in the twin as well."""
        for each in (self.twin, self.parts.executor):
            each.execute(RenewLeases(), now_seconds)

    def end(self) -> None:
        """Ends the process, as a kill does."""
        kill(self._journal)


def _components(state: State, journal: Journal | None = None) -> Components:
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
def _processes_that_exit_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_(status: int) -> None:
        assert status == EXIT_STATUS
        raise _ExitedError

    monkeypatch.setattr(os, "_exit", exit_)
    monkeypatch.setattr(logging, "shutdown", lambda: None)


@pytest.mark.slow
def test_with_a_journal_the_process_ends_and_the_next_one_is_as_before_the_command(tmp_path: Path) -> None:
    seen = set[CodeType]()
    for config in CONFIGS:
        server, scout = _Server(tmp_path / config.name), State()
        for change in _changes(config):
            server.renew_leases(change.now_seconds)
            if not seen.issuperset(called_functions(partial(change.made_in, scout))):
                for function, moment in _new(server.functions_of(change), seen):
                    with pytest.raises(_ExitedError), failing(function, moment):
                        change.made_in(server.parts.executor)
                    server.restart(change.now_seconds)
            assert change.made_in(server.parts.executor) == change.made_in(server.twin)
        server.end()
    assert len(seen) > _MIN_FUNCTIONS


def test_without_a_journal_the_pool_begins_a_new_epoch() -> None:
    seen = set[CodeType]()
    for config in CONFIGS:
        changes = _changes(config)
        for i, change in enumerate(changes):
            for function, moment in _new(called_functions(partial(change.made_in, _after(changes[:i]))), seen):
                state = _after(changes[:i])
                epoch, parts = state.pools.get("m").epoch if i else 0, _components(state)
                with pytest.raises(ChangeFailedError), failing(function, moment):
                    change.made_in(parts.executor)
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
