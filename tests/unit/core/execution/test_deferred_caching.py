"""Deferred caching: blocks that decodes on credit fill are cached at the start of the next step."""

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
"""The hash of the second block of request 1, which the request fills."""
REPORTS: dict[str, tuple[list[Operation], dict[str, Any]]] = {
    "the decode that needs the next block": ([ALLOCATE], {"num_new_tokens": [1]}),
    "an allocation with lookahead": ([ALLOCATE], {"num_new_tokens": [1], "num_lookahead_tokens": [1]}),
    "a cache operation": ([CACHE], {"num_new_tokens": [8]}),
    "an append": ([Operation.APPEND], {}),
    "a preemption": ([PREEMPT], {}),
    "a free": ([FREE], {}),
}


def two_blocks(executed: int = 0, **options: Any) -> tuple[World, Session]:
    """A pool and a session, whose change 2 fills the second block of request 1 on credit."""
    world = World(**options)
    session = world.open()
    world.admit(session, 1, "ab", 2 * BLOCK_SIZE - 1)
    world.admit(session, 2, "x", 2, executed=executed)
    return world, session


def report(world: World, session: Session, operations: list[Operation], executed: int, **columns: Any) -> None:
    world.run(
        session, *operations, executed=executed, request_numbers=[1], num_appended_tokens=[1], num_taken_tokens=[1],
        block_hashes=FILLED, **columns,
    )  # fmt: skip
    check_integrity(world.pool, world.sessions())


def hit_tokens(world: World, content: str = "ab") -> int:
    """The number of hit tokens of another session."""
    other = world.open()
    world.run(
        other, Operation.ADD, request_numbers=[9], num_appended_tokens=[12], request_ids=["other"],
        block_hashes=block_hashes(content, 3),
    )  # fmt: skip
    result = world.run(other, Operation.LOOKUP_UNCOUNTED, request_numbers=[9])
    return sum(result.num_hit_tokens)


@pytest.mark.parametrize("case", REPORTS)
def test_other_sessions_find_the_block_once_the_previous_step_is_reported_as_executed(case: str) -> None:
    world, session = two_blocks()
    report(world, session, REPORTS[case][0], 2, **REPORTS[case][1])
    assert hit_tokens(world) == 2 * BLOCK_SIZE


@pytest.mark.parametrize("case", ["the decode that needs the next block", "a cache operation"])
def test_other_sessions_do_not_find_the_block_before_it_is_executed(case: str) -> None:
    world, session = two_blocks()
    report(world, session, REPORTS[case][0], 1, **REPORTS[case][1])
    assert hit_tokens(world) == BLOCK_SIZE
    world.allocator.mark_executed(world.pool, session, 2)
    assert hit_tokens(world) == 2 * BLOCK_SIZE


def test_a_block_freed_before_execution_is_never_found() -> None:
    world, session = two_blocks(executed=1)
    report(world, session, [FREE], 1)
    assert hit_tokens(world) == BLOCK_SIZE


def test_a_block_reported_after_its_execution_is_found_at_once() -> None:
    world, session = two_blocks()
    world.allocator.mark_executed(world.pool, session, 2)
    report(world, session, [CACHE], 0, num_new_tokens=[0])
    assert hit_tokens(world) == 2 * BLOCK_SIZE


def test_the_block_is_found_by_earlier_operations_of_the_same_step() -> None:
    world, session = two_blocks()
    result = world.run(
        session, Operation.ADD, Operation.LOOKUP_UNCOUNTED, ALLOCATE,
        request_numbers=[3, 3, 1], num_appended_tokens=[12, 0, 1],
        num_new_tokens=[0, 0, 1], num_taken_tokens=[0, 0, 1], request_ids=["third"],
        block_hashes=block_hashes("ab", 3) + FILLED,
    )  # fmt: skip
    assert result.num_hit_tokens == [0, 2 * BLOCK_SIZE, 0]


def test_the_block_is_cached_even_if_the_operation_finds_too_few_blocks() -> None:
    world, session = two_blocks(num_blocks=4)
    result = world.run(
        session, ALLOCATE, executed=2, request_numbers=[1], num_appended_tokens=[1], num_taken_tokens=[1],
        num_new_tokens=[1], block_hashes=FILLED,
    )  # fmt: skip
    assert result.outcomes == [Outcome.NO_BLOCKS]
    assert hit_tokens(world) == 2 * BLOCK_SIZE


def test_unknown_tokens_fill_no_block() -> None:
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
def test_pools_without_deferred_caching_refuse_a_filled_block(options: dict[str, Any]) -> None:
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


def test_blocks_of_one_token_are_never_filled_on_credit() -> None:
    """This also holds for a single decode, which is applied as a batch."""
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
