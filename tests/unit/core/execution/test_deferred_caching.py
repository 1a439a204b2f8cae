"""Blocks that decodes filled without asking: told with the next step, cached before all else of it."""

from typing import Any

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.core.steps.columns import Operation, Outcome
from support.core import BLOCK_SIZE, World, block_hashes
from support.integrity import check_integrity

ALLOCATE, FREE, PREEMPT, CACHE = Operation.ALLOCATE, Operation.FREE, Operation.PREEMPT, Operation.CACHE
FILLED = block_hashes("ab", 2)[32:]
"""The hash of the second block of request 1, which is what it fills."""
TELLING: dict[str, tuple[list[Operation], dict[str, Any]]] = {
    "the decode that needs the next block": ([ALLOCATE], {"num_new_tokens": [1]}),
    "an allocation that looks ahead": ([ALLOCATE], {"num_new_tokens": [1], "num_lookahead_tokens": [1]}),
    "a call to cache": ([CACHE], {"num_new_tokens": [8]}),
    "growth": ([Operation.APPEND], {}),
    "a preemption": ([PREEMPT], {}),
    "the end": ([FREE], {}),
}


def two_blocks(executed: int = 0, **options: Any) -> tuple[World, Session]:
    """A pool and a session, whose change 2 fills the second block of its request 1 without asking."""
    world = World(**options)
    session = world.open()
    world.admit(session, 1, "ab", 2 * BLOCK_SIZE - 1)
    world.admit(session, 2, "x", 2, executed=executed)
    return world, session


def tell(world: World, session: Session, operations: list[Operation], executed: int, **columns: Any) -> None:
    world.run(
        session, *operations, executed=executed, request_numbers=[1], num_appended_tokens=[1], num_taken_tokens=[1],
        block_hashes=FILLED, **columns,
    )  # fmt: skip
    check_integrity(world.pool, world.sessions())


def hit_tokens(world: World, content: str = "ab") -> int:
    """What another session finds."""
    other = world.open()
    world.run(
        other, Operation.ADD, request_numbers=[9], num_appended_tokens=[12], request_ids=["other"],
        block_hashes=block_hashes(content, 3),
    )  # fmt: skip
    result = world.run(other, Operation.LOOKUP_UNCOUNTED, request_numbers=[9])
    return sum(result.num_hit_tokens)


@pytest.mark.parametrize("case", TELLING)
def test_others_find_what_was_filled_once_the_step_before_is_said_to_have_run(case: str) -> None:
    world, session = two_blocks()
    tell(world, session, TELLING[case][0], 2, **TELLING[case][1])
    assert hit_tokens(world) == 2 * BLOCK_SIZE


@pytest.mark.parametrize("case", ["the decode that needs the next block", "a call to cache"])
def test_others_find_nothing_before(case: str) -> None:
    world, session = two_blocks()
    tell(world, session, TELLING[case][0], 1, **TELLING[case][1])
    assert hit_tokens(world) == BLOCK_SIZE
    world.allocator.mark_executed(world.pool, session, 2)
    assert hit_tokens(world) == 2 * BLOCK_SIZE


def test_what_is_freed_before_it_has_run_is_found_by_nobody() -> None:
    world, session = two_blocks(executed=1)
    tell(world, session, [FREE], 1)
    assert hit_tokens(world) == BLOCK_SIZE


def test_what_was_said_to_have_run_before_it_was_told_is_found_at_once() -> None:
    world, session = two_blocks()
    world.allocator.mark_executed(world.pool, session, 2)
    tell(world, session, [CACHE], 0, num_new_tokens=[0])
    assert hit_tokens(world) == 2 * BLOCK_SIZE


def test_it_is_found_by_operations_before_the_one_that_tells() -> None:
    world, session = two_blocks()
    result = world.run(
        session, Operation.ADD, Operation.LOOKUP_UNCOUNTED, ALLOCATE,
        request_numbers=[3, 3, 1], num_appended_tokens=[12, 0, 1],
        num_new_tokens=[0, 0, 1], num_taken_tokens=[0, 0, 1], request_ids=["third"],
        block_hashes=block_hashes("ab", 3) + FILLED,
    )  # fmt: skip
    assert result.num_hit_tokens == [0, 2 * BLOCK_SIZE, 0]


def test_it_is_cached_though_no_blocks_are_found() -> None:
    world, session = two_blocks(num_blocks=4)
    result = world.run(
        session, ALLOCATE, executed=2, request_numbers=[1], num_appended_tokens=[1], num_taken_tokens=[1],
        num_new_tokens=[1], block_hashes=FILLED,
    )  # fmt: skip
    assert result.outcomes == [Outcome.NO_BLOCKS]
    assert hit_tokens(world) == 2 * BLOCK_SIZE


def test_tokens_that_are_not_known_fill_nothing() -> None:
    world, session = two_blocks()
    world.run(session, ALLOCATE, executed=2, request_numbers=[1], num_taken_tokens=[1], num_new_tokens=[1])
    check_integrity(world.pool, world.sessions())
    assert hit_tokens(world) == BLOCK_SIZE


@pytest.mark.parametrize(
    "options",
    [
        {"specs": [FullAttentionSpec(4), FullAttentionSpec(4)]},
        {"specs": [SlidingWindowSpec(4, sliding_window=8)]},
        {"enable_events": True},
    ],
)
def test_where_more_hangs_on_a_full_block_it_is_refused(options: dict[str, Any]) -> None:
    world = World(**options)
    session = world.open()
    tokens: dict[str, Any] = {"token_ids": list(range(7))} if world.pool.config.makes_events else {}
    world.run(
        session, Operation.ADD, Operation.ADMIT, request_numbers=[1, 1], num_appended_tokens=[7, 0],
        block_hashes=block_hashes("ab", 1), request_ids=["r1"], **tokens,
    )  # fmt: skip
    before = world.snapshot()
    with pytest.raises(InvalidArgumentError, match=r"num_taken_tokens\[0\]: 1 is not in \[0, 0\]"):
        world.run(session, ALLOCATE, request_numbers=[1], num_new_tokens=[1], num_taken_tokens=[1])
    assert world.snapshot() == before


def test_a_block_of_one_token_is_asked_for() -> None:
    """By a decode alone, too, which is taken together with its like."""
    world = World(block_size=1)
    session = world.open()
    world.run(
        session, Operation.ADD, Operation.ADMIT, request_numbers=[1, 1], num_appended_tokens=[3, 0],
        num_lookahead_tokens=[0, 2], block_hashes=block_hashes("abc", 3), request_ids=["r1"],
    )  # fmt: skip
    before = world.snapshot()
    with pytest.raises(InvalidArgumentError, match=r"num_taken_tokens\[0\]: 1 is not in \[0, 0\]"):
        world.run(session, ALLOCATE, request_numbers=[1], num_new_tokens=[1], num_taken_tokens=[1])
    assert world.snapshot() == before
