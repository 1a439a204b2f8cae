"""After each command of a test of the core, also a refused one, all pools are consistent."""

from typing import Any

import pytest

from kvpool.core.sessions.session import Session
from support.core import World
from support.integrity import check_integrity
from support.state import DrivenState

MAX_CHECKED_BLOCKS = 5000


@pytest.fixture(autouse=True)
def _integrity(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = DrivenState.execute

    def checked(state: DrivenState, *command: Any) -> Any:
        try:
            return execute(state, *command)
        finally:
            for pool in state.pools:
                if max(pool.config.num_blocks, 50 * len(pool.sessions)) <= MAX_CHECKED_BLOCKS:
                    check_integrity(pool, pool.sessions.values())

    monkeypatch.setattr(DrivenState, "execute", checked)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def session(world: World) -> Session:
    return world.open()


@pytest.fixture
def one(world: World) -> Session:
    return world.open()


@pytest.fixture
def other(world: World) -> Session:
    return world.open()
