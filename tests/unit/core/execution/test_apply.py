"""Application of steps: outcomes, budgets, and visibility of blocks to other sessions."""

import pytest

from kvpool.core.execution import apply
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Outcome
from support.core import World, opened

LOOKUP, ADMIT, ALLOCATE = Operation.LOOKUP, Operation.ADMIT, Operation.ALLOCATE


def test_after_the_first_refusal_no_operation_takes_blocks_but_frees_continue() -> None:
    world = World(num_blocks=7)  # six usable blocks
    session = world.open()
    for number, content in ((1, "ab"), (2, "cd"), (3, "ef")):
        world.admit(session, number, content, 8)
    result = world.run(session, ALLOCATE, ALLOCATE, Operation.FREE, request_numbers=[1, 2, 3], num_new_tokens=[4, 1, 0])
    assert result.outcomes == [Outcome.NO_BLOCKS, Outcome.SKIPPED, Outcome.OK]
    assert result.free_blocks == 2


def test_admissions_share_the_steps_budget_in_order(world: World, session: Session) -> None:
    result = world.declare_all(session, [ADMIT] * 3, "abc", 7, admission_budget_tokens=10)
    assert result.num_new_tokens == [7, 3, 0]
    assert result.outcomes == [Outcome.OK, Outcome.OK, Outcome.SKIPPED]


def test_a_hit_is_not_charged_to_the_budget(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    result = world.admit(session, 2, "abc", 13, admission_budget_tokens=1)
    assert (result.num_hit_tokens, result.num_new_tokens) == ([12], [1])
    assert result.block_ids == [1, 2, 3, 5]


def test_common_prefix_counts_the_sessions_own_requests_only(world: World, one: Session, other: Session) -> None:
    world.admit(one, 1, "abc", 13)
    world.run(one, executed=1)
    world.admit(other, 1, "abc", 13)
    world.admit(other, 2, "abX", 13)
    assert world.run(other, Operation.COMMON_PREFIX, request_numbers=[1]).num_prefix_blocks == [2]
    assert world.run(one, Operation.COMMON_PREFIX, request_numbers=[1]).num_prefix_blocks == [4]


def test_a_common_prefix_is_cut_where_its_comparison_would_exceed_the_work_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apply, "MAX_STEP_WORK", 4)
    monkeypatch.setattr(apply, "BLOCKS_COMPARED_PER_HASH", 1)
    world, session = opened()
    for number in (1, 2):
        world.admit(session, number, "abc", 13)
    result = world.run(session, *[Operation.COMMON_PREFIX] * 2, request_numbers=[1, 2])
    assert (result.num_prefix_blocks, result.outcomes) == ([2, 0], [0, Outcome.SKIPPED])


def test_a_hit_evicted_before_allocation_is_reported_as_changed() -> None:
    world = World(num_blocks=6)  # five usable blocks
    one, other = world.open(), world.open()
    world.admit(one, 1, "abc", 12)
    world.run(one, executed=1)
    world.free(one, 1)
    looked = world.declare(other, LOOKUP, 1, "abc", 13)
    assert looked.block_ids == [1, 2, 3]
    world.admit(one, 2, "xyz", 12)  # takes two free blocks and evicts the last block of the hit
    before = list(world.pool.blocks.free_list)
    changed = world.allocate(other, 1, 1, hit=[[1, 2, 3]])
    assert (changed.outcomes, changed.num_hit_tokens, changed.block_ids) == ([Outcome.HIT_CHANGED], [8], [1, 2])
    assert list(world.pool.blocks.free_list) == before
    assert not other.by_number[next(iter(other.by_number))].holds_blocks


def test_blocks_are_private_to_their_session_until_their_step_is_executed(world: World) -> None:
    one, other = world.open(), world.open()
    world.admit(one, 1, "abc", 13)  # change 1
    world.decode(one, 1, "abcd", 3)  # change 2
    assert world.admit(one, 2, "abcd", 17).num_hit_tokens == [16]
    assert world.admit(other, 1, "abcd", 17).num_hit_tokens == []
    world.run(one, executed=1)
    world.free(other, 1)
    assert world.admit(other, 2, "abcd", 17).num_hit_tokens == [16]  # its own copies of all blocks
    world.run(other, Operation.PREEMPT, request_numbers=[2])
    third = world.open()
    assert world.admit(third, 1, "abcd", 17).num_hit_tokens == [12]
    world.run(one, executed=2)
    assert world.admit(third, 2, "abcd", 17).num_hit_tokens == [16]


def test_reported_execution_does_not_publish_the_new_contents_of_an_evicted_block(
    world: World, one: Session, other: Session
) -> None:
    world.admit(one, 1, "a", 4)
    world.run(one, Operation.EVICT, num_block_ids=[1], block_ids=[1])
    world.free(one, 1)
    assert world.admit(one, 2, "b", 4).block_ids == [1]
    world.executed(one, 3)  # all but the last
    assert world.num_found(other, "b") == 0


def test_a_block_of_a_hit_refilled_by_another_session_is_private_until_executed() -> None:
    world, one = opened(3)
    other = world.open()
    world.admit(one, 1, "a", 4)
    world.executed(one)
    assert world.declare(other, LOOKUP, 1, "a", 5).block_ids == [1]
    world.run(one, Operation.EVICT, num_block_ids=[1], block_ids=[1])
    world.free(one, 1)
    assert world.admit(one, 2, "a", 4).block_ids == [1]  # with the same contents, not yet executed
    changed = world.allocate(other, 1, 1, hit=[[1]])
    assert (changed.outcomes, changed.block_ids) == ([Outcome.HIT_CHANGED], [])


def test_ending_a_session_hides_its_unexecuted_blocks(world: World, one: Session, other: Session) -> None:
    world.admit(one, 1, "abc", 13)
    world.admit(one, 2, "xyz", 13, executed=1)
    world.allocator.close_session(one.session_id, 0.0)
    assert len(world.pool.blocks.prefix_map) == 3
    assert world.admit(other, 1, "abc", 13).num_hit_tokens == [12]
    assert world.admit(other, 2, "xyz", 13).num_hit_tokens == []
