"""Launched steps: certain to be executed, in order, but not executed yet; see rule 4 of apply."""

from typing import Any

import pytest

from kvpool.core.blocks.quota import NO_QUOTA, Quota
from kvpool.core.ids import BlockId, RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Step, StepResult
from support.core import World, block_hashes, opened
from support.refusals import refused

ADMIT, ALLOCATE, CACHE, FREE, PREEMPT = (
    Operation.ADMIT,
    Operation.ALLOCATE,
    Operation.CACHE,
    Operation.FREE,
    Operation.PREEMPT,
)
LEAVING = pytest.mark.parametrize("leaving", [FREE, PREEMPT])


def run(world: World, session: Session, *operations: Operation, launched: int = 0, **columns: Any) -> StepResult:
    return world.run(session, *operations, launched_sequence=launched, **columns)


def leave(world: World, session: Session, leaving: Operation, number: int = 1, **columns: Any) -> None:
    run(world, session, leaving, request_numbers=[number], **columns)


@LEAVING
def test_blocks_of_launched_steps_are_hit_by_their_session_and_after_execution_by_others(
    leaving: Operation,
) -> None:
    world = World()
    one, other = world.open(), world.open()
    world.admit(one, 1, "abc", 13)
    leave(world, one, leaving, launched=1)
    assert (world.num_found(one, "abc"), world.num_found(other, "abc")) == (12, 0)
    run(world, one, executed=1)
    assert (world.num_found(one, "abc"), world.num_found(other, "abc")) == (12, 12)


@LEAVING
def test_blocks_of_steps_not_launched_are_hit_by_no_session(leaving: Operation, world: World) -> None:
    one, other = world.open(), world.open()
    world.admit(one, 1, "ab", 9)  # step 1
    run(world, one, ALLOCATE, request_numbers=[1], num_appended_tokens=[4], num_new_tokens=[4],
        block_hashes=block_hashes("abc", 3)[-32:], launched=1)  # step 2  # fmt: skip
    leave(world, one, leaving, launched=1)
    assert (world.num_found(one, "abc"), world.num_found(other, "abc")) == (8, 0)
    run(world, one, executed=one.sequence)
    assert world.num_found(other, "abc") == 8


def test_a_lower_launched_number_changes_nothing(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    run(world, session, launched=1)
    leave(world, session, FREE, launched=0)
    assert world.num_found(session, "abc") == 12


def test_a_session_that_reports_only_execution_does_not_hit_unexecuted_blocks(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    run(world, session, executed=1)
    world.admit(session, 2, "xyz", 13)
    leave(world, session, FREE, number=2)
    assert (world.num_found(session, "abc"), world.num_found(session, "xyz")) == (12, 0)


@pytest.mark.parametrize("launched", [-1, 3, 2**40, 2**64])
@pytest.mark.parametrize("operations", [[], [ALLOCATE], [FREE]])
def test_steps_that_were_not_sent_cannot_be_launched(launched: int, operations: list[Operation]) -> None:
    world, session = opened()
    world.admit(session, 1, "abc", 13)
    before = world.snapshot()
    step = Step(2, launched_sequence=launched, operations=[int(operation) for operation in operations])
    step.request_numbers = step.num_new_tokens = [1] * len(operations)
    with refused(field="launched_sequence"):
        world.apply(session, step)
    assert (world.snapshot(), session.launched_sequence) == (before, 0)


def test_the_end_of_a_session_withdraws_launched_but_unexecuted_blocks(world: World) -> None:
    one, other = world.open(), world.open()
    world.admit(one, 1, "abc", 13)
    world.admit(one, 2, "xyz", 13)
    leave(world, one, FREE, launched=2)
    world.allocator.close_session(one.session_id, 0.0)
    assert (world.num_found(other, "abc"), world.num_found(other, "xyz")) == (0, 0)


def delayed(world: World, session: Session) -> None:
    """Adds a request of three full blocks, filled by step 1 and not cached."""
    run(
        world, session, ADMIT, request_numbers=[1], num_appended_tokens=[13],
        block_hashes=block_hashes("abc", 3), request_ids=["r1"], delay_cache_blocks=[True],
    )  # fmt: skip


def test_blocks_cached_late_count_as_filled_by_the_allocating_step(world: World, one: Session, other: Session) -> None:
    delayed(world, one)
    run(world, one, CACHE, request_numbers=[1], num_new_tokens=[12], launched=1)
    world.free(one, 1)
    assert (world.num_found(one, "abc"), world.num_found(other, "abc")) == (12, 0)
    run(world, one, executed=1)
    assert world.num_found(other, "abc") == 12


def test_blocks_cached_after_execution_are_visible_at_once(world: World, one: Session, other: Session) -> None:
    delayed(world, one)
    run(world, one, CACHE, request_numbers=[1], num_new_tokens=[12], launched=1, executed=1)
    assert world.num_found(other, "abc") == 12
    assert not world.pool.blocks.prefix_map.pending.steps


def test_without_launch_reports_blocks_count_as_filled_by_the_caching_step(world: World) -> None:
    one, other = world.open(), world.open()
    delayed(world, one)
    run(world, one, CACHE, request_numbers=[1], num_new_tokens=[12], executed=1)
    assert world.num_found(other, "abc") == 0
    run(world, one, executed=2)
    assert world.num_found(other, "abc") == 12


def test_blocks_cached_late_count_as_filled_by_the_newest_allocation(world: World, session: Session) -> None:
    delayed(world, session)
    run(
        world, session, ALLOCATE, request_numbers=[1], num_appended_tokens=[3], num_new_tokens=[3],
        block_hashes=block_hashes("abcd", 4)[-32:], delay_cache_blocks=[True], launched=1, executed=1,
    )  # fmt: skip
    run(world, session, CACHE, request_numbers=[1], num_new_tokens=[16])
    assert world.pool.blocks.prefix_map.pending.steps == dict.fromkeys(map(BlockId, (1, 2, 3, 4)), 2)
    leave(world, session, FREE, launched=1)
    assert world.num_found(session, "abcd") == 0


@pytest.mark.parametrize("quota", [NO_QUOTA, Quota(max_blocks=10)])
def test_allocations_record_the_filling_step_in_the_fast_loop_and_one_by_one(quota: Quota, world: World) -> None:
    session = world.open(quota=quota)
    world.admit(session, 1, "ab", 9)
    columns: dict[str, Any] = {"operations": [ALLOCATE], "request_numbers": [1], "num_new_tokens": [1]}
    for launched in (1, 2):
        step = Step(session.sequence + 1, launched_sequence=launched, num_appended_tokens=[1], **columns)
        world.apply(session, step)
        request = session.by_number[RequestNumber(1)]
        assert (request.filling_sequence, session.launched_sequence) == (launched + 1, launched)


def test_slots_taken_on_credit_are_filled_by_the_previous_step(world: World, session: Session) -> None:
    world.admit(session, 1, "ab", 9)
    run(world, session)
    run(world, session, Operation.APPEND, request_numbers=[1], num_taken_tokens=[2], num_appended_tokens=[2])
    assert session.by_number[RequestNumber(1)].filling_sequence == 2
