"""The fast loop for plain allocations: which rows it allocates, and that one row at a time gives the same results."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.execution.allocate_batch import allocate_plain_rows
from kvpool.core.ids import BlockId
from kvpool.core.sessions.session import Session
from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.core.steps.columns import Operation, Outcome
from support.core import BLOCK_SIZE, World, config
from support.journal import Recorder, Traffic, assert_alike, replay
from support.state import DrivenState
from transcripts import transcript
from transcripts.test_transcripts import PATHS

Row = tuple[Operation, int]
"""An operation, and the number of its request."""


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_one_row_at_a_time_gives_the_recorded_results(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results were recorded with the fast loop, and `test_transcripts` compares them with it."""
    monkeypatch.setattr("kvpool.core.execution.apply.allocate_plain_rows", lambda *_: None)
    assert transcript.replay(path, 5_000) == 5_000


@given(seed=st.integers(0, 2**32), order=st.sampled_from(ReuseOrder), caching=st.booleans())
def test_one_row_at_a_time_leaves_the_same_state(seed: int, order: ReuseOrder, caching: bool) -> None:  # noqa: FBT001
    allocator = DrivenState()
    records = Recorder(allocator).records
    short = replace(config(24, reuse_order=order, enable_caching=caching), max_model_len=42)
    traffic = Traffic(allocator, short, seed)
    for _ in range(120):
        traffic.change()
    again = DrivenState()
    with patch("kvpool.core.execution.apply.allocate_plain_rows", lambda *_: None):
        replay(again, records)
    assert_alike(again, allocator)


@pytest.fixture
def batch_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call of the fast loop that allocated them."""
    lengths: list[int] = []

    def counted(*args: Any) -> tuple[list[int], list[BlockId]] | None:
        allocated = allocate_plain_rows(*args)
        if allocated:
            lengths.append(len(allocated[0]))
        return allocated

    monkeypatch.setattr("kvpool.core.execution.apply.allocate_plain_rows", counted)
    return lengths


def full(world: World, num_requests: int) -> Session:
    """A session with requests that fill a block each, so that their decodes need new blocks."""
    session = world.open()
    for number in range(1, num_requests + 1):
        world.admit(session, number, chr(0x100 + number), BLOCK_SIZE)
    return session


def decodes(*numbers: int) -> list[Row]:
    return [(Operation.ALLOCATE, number) for number in numbers]


def outcomes(world: World, session: Session, *rows: Row) -> list[int]:
    operations, numbers = zip(*rows, strict=True)
    new = [int(operation is Operation.ALLOCATE) for operation in operations]
    result = world.run(session, *operations, request_numbers=list(numbers), num_new_tokens=new)
    return result.outcomes or [Outcome.OK] * len(rows)


def test_decodes_are_batched(batch_lengths: list[int]) -> None:
    world = World(50)
    session = full(world, 2)
    assert batch_lengths == []
    for _ in range(20):
        outcomes(world, session, *decodes(1, 2))
    assert batch_lengths == [2] * 20


def test_decodes_between_other_operations_are_batched(batch_lengths: list[int]) -> None:
    world = World(50)
    session = full(world, 4)
    assert outcomes(world, session, (Operation.FREE, 3), *decodes(1, 2), (Operation.PREEMPT, 4)) == [Outcome.OK] * 4
    assert batch_lengths == [2]
    assert outcomes(world, session, *decodes(1), (Operation.CACHE, 4), *decodes(2)) == [Outcome.OK] * 3
    assert batch_lengths == [2, 1, 1]


def test_decodes_with_too_few_blocks_are_applied_one_by_one(batch_lengths: list[int]) -> None:
    world = World(4)
    assert outcomes(world, full(world, 2), *decodes(1, 2)) == [Outcome.OK, Outcome.NO_BLOCKS]
    assert batch_lengths == []


def test_decodes_beyond_the_work_limit_are_applied_one_by_one(
    batch_lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(50)
    session = full(world, 7)
    monkeypatch.setattr("kvpool.core.execution.apply.MAX_STEP_WORK", 2)
    assert outcomes(world, session, *decodes(1, 2, 3)) == [Outcome.OK, Outcome.OK, Outcome.SKIPPED]
    assert batch_lengths == []
    monkeypatch.setattr("kvpool.core.execution.apply.MAX_STEP_WORK", 3)
    found = outcomes(world, session, *decodes(3, 4), (Operation.FREE, 7), *decodes(5, 6))
    assert found == [Outcome.OK] * 4 + [Outcome.SKIPPED]
    assert batch_lengths == [2]
