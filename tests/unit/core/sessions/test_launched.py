"""Launched steps: certain to be executed, in order, but not executed yet; see rule 4 of apply."""

from typing import Any

import pytest

from kvpool.core.blocks.quota import NO_QUOTA, Quota
from kvpool.core.ids import BlockId, RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Step
from support.core import World, opened

ALLOCATE, CACHE, FREE, PREEMPT = Operation.ALLOCATE, Operation.CACHE, Operation.FREE, Operation.PREEMPT
LEAVING = pytest.mark.parametrize("leaving", [FREE, PREEMPT])


def leave(world: World, session: Session, leaving: Operation, number: int = 1, launched: int = 0) -> None:
    world.run(session, leaving, request_numbers=[number], launched_sequence=launched)


@LEAVING
def test_blocks_of_launched_steps_are_hit_by_their_session_and_after_execution_by_others(
    leaving: Operation, world: World, one: Session, other: Session
) -> None:
    world.admit(one, 1, "abc", 13)
    leave(world, one, leaving, launched=1)
    assert (world.num_found(one, "abc"), world.num_found(other, "abc")) == (12, 0)
    world.run(one, executed=1)
    assert (world.num_found(one, "abc"), world.num_found(other, "abc")) == (12, 12)


@LEAVING
def test_blocks_of_steps_not_launched_are_hit_by_no_session(leaving: Operation, world: World) -> None:
    one, other = world.open(), world.open()
    world.admit(one, 1, "ab", 9)  # step 1
    world.decode(one, 1, "abc", 4, launched_sequence=1)  # step 2
    leave(world, one, leaving, launched=1)
    assert (world.num_found(one, "abc"), world.num_found(other, "abc")) == (8, 0)
    world.run(one, executed=one.sequence)
    assert world.num_found(other, "abc") == 8


def test_a_lower_launched_number_changes_nothing(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    world.run(session, launched_sequence=1)
    leave(world, session, FREE, launched=0)
    assert world.num_found(session, "abc") == 12


def test_a_session_that_reports_only_execution_does_not_hit_unexecuted_blocks(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    world.run(session, executed=1)
    world.admit(session, 2, "xyz", 13)
    leave(world, session, FREE, number=2)
    assert (world.num_found(session, "abc"), world.num_found(session, "xyz")) == (12, 0)


@pytest.mark.parametrize("launched", [-1, 3, 2**40, 2**64])
@pytest.mark.parametrize("operations", [[], [ALLOCATE], [FREE]])
def test_steps_that_were_not_sent_cannot_be_launched(launched: int, operations: list[Operation]) -> None:
    world, session = opened()
    world.admit(session, 1, "abc", 13)
    ones = [1] * len(operations)
    with world.refuses(field="launched_sequence"):
        world.run(session, *operations, launched_sequence=launched, request_numbers=ones, num_new_tokens=ones)


def delayed(world: World, session: Session) -> None:
    """Adds a request of three full blocks, filled by step 1 and not cached."""
    world.admit(session, 1, "abc", 13, delay_cache_blocks=[True])


def test_blocks_cached_late_count_as_filled_by_the_allocating_step(world: World, one: Session, other: Session) -> None:
    delayed(world, one)
    world.run(one, CACHE, request_numbers=[1], num_new_tokens=[12], launched_sequence=1)
    world.free(one, 1)
    assert (world.num_found(one, "abc"), world.num_found(other, "abc")) == (12, 0)
    world.run(one, executed=1)
    assert world.num_found(other, "abc") == 12


def test_blocks_cached_after_execution_are_visible_at_once(world: World, one: Session, other: Session) -> None:
    delayed(world, one)
    world.run(one, CACHE, request_numbers=[1], num_new_tokens=[12], launched_sequence=1, executed=1)
    assert world.num_found(other, "abc") == 12
    assert not world.pool.blocks.prefix_map.pending.steps


def test_without_launch_reports_blocks_count_as_filled_by_the_caching_step(world: World) -> None:
    one, other = world.open(), world.open()
    delayed(world, one)
    world.run(one, CACHE, request_numbers=[1], num_new_tokens=[12], executed=1)
    assert world.num_found(other, "abc") == 0
    world.run(one, executed=2)
    assert world.num_found(other, "abc") == 12


def test_blocks_cached_late_count_as_filled_by_the_newest_allocation(world: World, session: Session) -> None:
    delayed(world, session)
    world.decode(session, 1, "abcd", 3, delay_cache_blocks=[True], launched_sequence=1, executed=1)
    world.run(session, CACHE, request_numbers=[1], num_new_tokens=[16])
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
    world.run(session)
    world.run(session, Operation.APPEND, request_numbers=[1], num_taken_tokens=[2], num_appended_tokens=[2])
    assert session.by_number[RequestNumber(1)].filling_sequence == 2
