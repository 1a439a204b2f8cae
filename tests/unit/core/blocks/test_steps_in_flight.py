"""Rules of steps in flight, by number."""

from typing import Any

import pytest

from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import InvalidArgumentError, KvpoolError
from kvpool.core.sessions.session import Session
from kvpool.core.state import State
from kvpool.core.steps.columns import Operation, Outcome, StepResult
from support.core import World, block_hashes
from support.integrity import check_integrity
from support.journal import assert_alike

FREE, PREEMPT = Operation.FREE, Operation.PREEMPT
NO_BLOCKS = [Outcome.NO_BLOCKS]


@pytest.fixture
def world() -> World:
    """Nine blocks, of which requests can have eight."""
    return World(num_blocks=9)


def leave(world: World, session: Session, number: int, *, launched: int, executed: int = 0) -> StepResult:
    """Frees a request while the steps after `executed` up to `launched` are in flight."""
    result = world.run(session, FREE, request_numbers=[number], launched_sequence=launched, executed=executed)
    check_integrity(world.pool, world.sessions())
    return result


def admit(world: World, session: Session, number: int, content: str, num_blocks: int) -> StepResult:
    result = world.admit(session, number, content, 4 * num_blocks - 3)
    check_integrity(world.pool, world.sessions())
    return result


def executed(world: World, session: Session, sequence: int) -> None:
    world.allocator.mark_executed(world.pool, session, sequence)
    check_integrity(world.pool, world.sessions())


@pytest.mark.parametrize("operation", [FREE, PREEMPT])
def test_rule_2_others_get_freed_blocks_after_the_last_launched_step(world: World, operation: Operation) -> None:
    one, other = world.open(), world.open()
    admit(world, one, 1, "abcde", 5)  # step 1
    admit(world, one, 2, "v", 1)  # step 2
    world.run(one, operation, request_numbers=[1], launched_sequence=2, executed=1)
    assert set(admit(world, other, 1, "xy", 2).block_ids) == {7, 8}
    refused = admit(world, other, 2, "w", 1)
    assert (refused.outcomes, refused.free_blocks) == (NO_BLOCKS, 0)
    executed(world, one, 1)
    assert admit(world, other, 3, "w", 1).outcomes == NO_BLOCKS
    executed(world, one, 2)
    assert set(admit(world, other, 4, "wxyzt", 5).block_ids) <= {1, 2, 3, 4, 5}


def test_rule_1_frees_wait_for_work_on_credit_which_has_no_number(world: World) -> None:
    one, other = world.open(), world.open()
    admit(world, one, 1, "abcdefgh", 8)  # step 1, and a step on credit after it
    leave(world, one, 1, launched=2, executed=1)
    assert one.launched_sequence == 0, "step 2 itself is not launched"
    assert admit(world, other, 1, "v", 1).outcomes == NO_BLOCKS
    executed(world, one, 2)
    assert len(admit(world, other, 2, "stuvwxyz", 8).block_ids) == 8


def test_rule_2_the_session_itself_gets_them_at_once(world: World) -> None:
    one, other = world.open(), world.open()
    admit(world, one, 1, "abcdefgh", 8)
    freed = leave(world, one, 1, launched=1)
    assert freed.free_blocks == 8
    assert admit(world, other, 1, "v", 1).outcomes == NO_BLOCKS
    assert len(admit(world, one, 2, "stuvwxyz", 8).block_ids) == 8


def test_rule_2_frees_wait_only_for_the_steps_launched_before_them(world: World) -> None:
    one, other = world.open(), world.open()
    admit(world, one, 1, "abcd", 4)  # step 1
    admit(world, one, 2, "vwxy", 4)  # step 2
    leave(world, one, 1, launched=1)
    leave(world, one, 2, launched=2)
    executed(world, one, 1)
    assert set(admit(world, other, 1, "mnop", 4).block_ids) == {1, 2, 3, 4}
    assert admit(world, other, 2, "t", 1).outcomes == NO_BLOCKS


def test_rule_2_a_refused_allocation_changes_nothing(world: World) -> None:
    one, other = world.open(), world.open()
    admit(world, one, 1, "abcdefgh", 8)
    leave(world, one, 1, launched=1)
    world.run(other, Operation.APPEND, request_numbers=[1], num_appended_tokens=[5], request_ids=["r1"],
              block_hashes=block_hashes("x", 1))  # fmt: skip
    before = world.pool.blocks.snapshot(), world.snapshot()
    world.pool.blocks.end_snapshot()
    result = world.run(other, Operation.ALLOCATE, request_numbers=[1], num_new_tokens=[5])
    assert result.outcomes == NO_BLOCKS
    after = world.snapshot()
    assert before[1][:3] == after[:3]  # type: ignore[index]  # free list, counts, hashes
    assert before[0].free_list.held_chunks == world.pool.blocks.free_list.snapshot().held_chunks


def test_rule_2_a_refused_step_holds_nothing_back(world: World) -> None:
    one, other = world.open(), world.open()
    admit(world, one, 1, "abcdefgh", 8)
    with pytest.raises(InvalidArgumentError):
        leave(world, one, 1, launched=3)
    with pytest.raises(KvpoolError):
        leave(world, one, 7, launched=1)
    check_integrity(world.pool, world.sessions())
    leave(world, one, 1, launched=1, executed=1)
    assert len(admit(world, other, 1, "stuvwxyz", 8).block_ids) == 8


def test_rule_1_without_launched_steps_blocks_are_free_at_once(world: World) -> None:
    one, other = world.open(), world.open()
    admit(world, one, 1, "abcdefgh", 8)
    leave(world, one, 1, launched=0)
    assert len(admit(world, other, 1, "stuvwxyz", 8).block_ids) == 8


def test_rule_3_a_block_that_another_session_hit_and_freed_waits(world: World) -> None:
    one, other, third = world.open(), world.open(), world.open()
    admit(world, one, 1, "abcdef", 6)  # step 1
    executed(world, one, 1)
    world.run(one)  # step 2 reads the blocks
    leave(world, one, 1, launched=2)
    assert admit(world, other, 1, "abcdef", 6).num_hit_tokens == [20]
    world.free(other, 1)
    check_integrity(world.pool, world.sessions())
    assert admit(world, third, 1, "mnp", 3).outcomes == NO_BLOCKS
    executed(world, one, 2)
    assert len(admit(world, third, 2, "stuvwxyz", 8).block_ids) == 8


def test_rule_3_a_block_that_another_session_holds_waits_when_that_frees_it(world: World) -> None:
    one, other, third = world.open(), world.open(), world.open()
    admit(world, one, 1, "abcdef", 6)
    executed(world, one, 1)
    assert admit(world, other, 1, "abcdef", 6).num_hit_tokens == [20]
    world.run(one)  # step 2 reads the blocks
    leave(world, one, 1, launched=2, executed=1)
    world.free(other, 1)
    check_integrity(world.pool, world.sessions())
    assert admit(world, third, 1, "mnp", 3).outcomes == NO_BLOCKS
    executed(world, one, 2)
    assert len(admit(world, third, 2, "stuvwxyz", 8).block_ids) == 8


@pytest.mark.parametrize("lag", [1, 2])
def test_rule_3_a_session_alone_gets_the_blocks_of_one_without_steps_in_flight(lag: int) -> None:
    found = []
    for behind in (0, lag):
        world, given = World(num_blocks=12), list[Any]()
        session = world.open()
        for number in range(1, 30):
            content = "abcdefghijklmnop"[number % 3 : number % 3 + 4] if number % 2 else f"{number:04}"
            result = world.run(
                session, Operation.ADMIT, request_numbers=[number], num_appended_tokens=[14], request_ids=[f"{number}"],
                block_hashes=block_hashes(content, 3), launched_sequence=session.sequence,
                executed=max(session.sequence - behind, 0),
            )  # fmt: skip
            given.append((list(result.block_ids), list(result.outcomes), result.free_blocks))
            if number > 2:
                leave(world, session, number - 2, launched=session.sequence, executed=max(session.sequence - behind, 0))
        found.append(given)
    assert found[0] == found[1]


def test_rule_4_a_closed_session_holds_nothing_back(world: World) -> None:
    one, other = world.open(), world.open()
    admit(world, one, 1, "abcdefgh", 8)
    leave(world, one, 1, launched=1)
    world.allocator.close_session(one.session_id, 0.0)
    check_integrity(world.pool, world.sessions())
    assert len(admit(world, other, 1, "stuvwxyz", 8).block_ids) == 8


def test_rule_4_the_quarantine_takes_freed_blocks_over(world: World) -> None:
    one, other = world.open(), world.open()
    admit(world, one, 1, "abcdef", 6)
    executed(world, one, 1)
    admit(world, one, 2, "abcdef", 6)
    admit(world, other, 1, "abcd", 4)  # holds three of them, and one of its own
    leave(world, one, 1, launched=2)
    leave(world, one, 2, launched=2)
    world.allocator.evict_session("m", one.session_number, 0.0, quarantine_seconds=5.0)
    check_integrity(world.pool, world.sessions())
    info = world.allocator.pools.describe(world.pool)
    assert (info.quarantined_sessions, info.quarantined_blocks, info.free_blocks) == (1, 7, 0)
    with world.allocator.snapshot() as snapshot:
        made = State()
        made.restore(snapshot)
    assert_alike(world.allocator, made)
    world.free(other, 1)
    assert admit(world, other, 2, "st", 2).outcomes == NO_BLOCKS
    world.allocator.end_quarantine("m", [one.session_number])
    check_integrity(world.pool, world.sessions())
    assert len(admit(world, other, 3, "stuvwxyz", 8).block_ids) == 8


def test_rule_4_a_session_without_requests_is_quarantined_for_what_it_freed(world: World) -> None:
    one = world.open()
    admit(world, one, 1, "abc", 3)
    leave(world, one, 1, launched=1)
    world.allocator.evict_session("m", one.session_number, 0.0, quarantine_seconds=5.0)
    assert world.pool.quarantine.num_blocks == 3


def test_rule_5_a_freed_block_is_hit_by_others_after_its_step(world: World) -> None:
    one, other = world.open(), world.open()
    admit(world, one, 1, "abc", 3)
    world.run(one, launched_sequence=1)  # a second step in flight
    leave(world, one, 1, launched=2)
    assert not world.admit(other, 1, "abc", 9).num_hit_tokens
    executed(world, one, 1)
    assert world.admit(other, 2, "abc", 9).num_hit_tokens == [8]


def test_a_resumed_session_holds_its_blocks_under_its_new_number(world: World) -> None:
    one, other = world.open(), world.open()
    admit(world, one, 1, "abcdefgh", 8)
    leave(world, one, 1, launched=1)
    world.allocator.resume_session(one.session_id, one.sequence, resume_key="", now_seconds=0.0)
    check_integrity(world.pool, world.sessions())
    assert admit(world, other, 1, "s", 1).outcomes == NO_BLOCKS
    executed(world, one, 1)
    assert len(admit(world, other, 2, "stuvwxyz", 8).block_ids) == 8


def test_a_kept_block_counts_for_no_quota(world: World) -> None:
    one, other = world.open(quota=Quota(min_blocks=3)), world.open(quota=Quota(min_blocks=2))
    admit(world, one, 1, "abcd", 4)
    executed(world, one, 1)
    assert admit(world, other, 1, "abcd", 4).num_hit_tokens == [12]
    world.run(one)
    leave(world, one, 1, launched=2, executed=1)
    assert len(world.pool.in_flight.kept[one.session_number]) == 3
    world.free(other, 1)
    check_integrity(world.pool, world.sessions())
    executed(world, one, 2)
    assert world.pool.blocks.num_free_blocks == 8
    assert world.pool.quotas.num_left == 3
