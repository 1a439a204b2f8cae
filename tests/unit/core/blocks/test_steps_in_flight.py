"""Rules of steps in flight, by number."""

from math import inf
from typing import Any

import pytest

from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import ExhaustedError, InvalidArgumentError, KvpoolError
from kvpool.core.sessions.session import MAX_STEP_SECONDS, Session
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.steps.columns import Operation, Outcome, StepResult
from kvpool.server.journal.frames import FrameParser
from kvpool.server.journal.snapshot import load_snapshot, snapshot_frames
from support.core import World, block_hashes, opened
from support.journal import assert_alike
from support.state import DrivenState, restored

FREE, PREEMPT = Operation.FREE, Operation.PREEMPT
NO_BLOCKS = [Outcome.NO_BLOCKS]


@pytest.fixture
def world() -> World:
    """Nine blocks, of which requests can have eight."""
    return World(num_blocks=9)


def leave(world: World, session: Session, number: int, *, launched: int, executed: int = 0) -> StepResult:
    """Frees a request while the steps after `executed` up to `launched` are in flight."""
    return world.run(session, FREE, request_numbers=[number], launched_sequence=launched, executed=executed)


def admit(world: World, session: Session, number: int, content: str, num_blocks: int) -> StepResult:
    return world.admit(session, number, content, 4 * num_blocks - 3)


@pytest.mark.parametrize("operation", [FREE, PREEMPT])
def test_rule_2_others_get_freed_blocks_after_the_last_launched_step(world: World, operation: Operation) -> None:
    one, other = world.open(), world.open()
    admit(world, one, 1, "abcde", 5)  # step 1
    admit(world, one, 2, "v", 1)  # step 2
    world.run(one, operation, request_numbers=[1], launched_sequence=2, executed=1)
    assert set(admit(world, other, 1, "xy", 2).block_ids) == {7, 8}
    refused = admit(world, other, 2, "w", 1)
    assert (refused.outcomes, refused.free_blocks) == (NO_BLOCKS, 0)
    world.executed(one, 1)
    assert admit(world, other, 3, "w", 1).outcomes == NO_BLOCKS
    world.executed(one, 2)
    assert set(admit(world, other, 4, "wxyzt", 5).block_ids) <= {1, 2, 3, 4, 5}


def test_rule_1_frees_wait_for_work_on_credit_which_has_no_number(world: World, one: Session, other: Session) -> None:
    admit(world, one, 1, "abcdefgh", 8)  # step 1, and a step on credit after it
    leave(world, one, 1, launched=2, executed=1)
    assert one.launched_sequence == 0, "step 2 itself is not launched"
    assert admit(world, other, 1, "v", 1).outcomes == NO_BLOCKS
    world.executed(one, 2)
    assert len(admit(world, other, 2, "stuvwxyz", 8).block_ids) == 8


def test_rule_2_the_session_itself_gets_them_at_once(world: World, one: Session, other: Session) -> None:
    admit(world, one, 1, "abcdefgh", 8)
    freed = leave(world, one, 1, launched=1)
    assert freed.free_blocks == 8
    assert admit(world, other, 1, "v", 1).outcomes == NO_BLOCKS
    assert len(admit(world, one, 2, "stuvwxyz", 8).block_ids) == 8


def test_rule_2_frees_wait_only_for_the_steps_launched_before_them(world: World, one: Session, other: Session) -> None:
    admit(world, one, 1, "abcd", 4)  # step 1
    admit(world, one, 2, "vwxy", 4)  # step 2
    leave(world, one, 1, launched=1)
    leave(world, one, 2, launched=2)
    world.executed(one, 1)
    assert set(admit(world, other, 1, "mnop", 4).block_ids) == {1, 2, 3, 4}
    assert admit(world, other, 2, "t", 1).outcomes == NO_BLOCKS


def test_rule_2_a_refused_allocation_changes_nothing(world: World, one: Session, other: Session) -> None:
    admit(world, one, 1, "abcdefgh", 8)
    leave(world, one, 1, launched=1)
    world.declare(other, Operation.APPEND, 1, "x", 5)
    before = world.pool.blocks.snapshot(), world.snapshot()
    world.pool.blocks.end_snapshot()
    result = world.allocate(other, 1, 5)
    assert result.outcomes == NO_BLOCKS
    after = world.snapshot()
    assert before[1][:3] == after[:3]  # type: ignore[index]  # free list, counts, hashes
    held = [list(each.held_chunks.values) for each in (before[0].free_list, world.pool.blocks.free_list.snapshot())]
    assert held[0] == held[1] != []


def test_rule_2_a_refused_step_holds_nothing_back(world: World, one: Session, other: Session) -> None:
    admit(world, one, 1, "abcdefgh", 8)
    with pytest.raises(InvalidArgumentError):
        leave(world, one, 1, launched=3)
    with pytest.raises(KvpoolError):
        leave(world, one, 7, launched=1)
    leave(world, one, 1, launched=1, executed=1)
    assert len(admit(world, other, 1, "stuvwxyz", 8).block_ids) == 8


@pytest.mark.parametrize("hits_first", [False, True])
def test_rule_3_a_block_that_another_session_hit_and_freed_waits(
    world: World, one: Session, other: Session, *, hits_first: bool
) -> None:
    def hit() -> None:
        assert admit(world, other, 1, "abcdef", 6).num_hit_tokens == [20]

    third = world.open()
    admit(world, one, 1, "abcdef", 6)  # step 1
    world.executed(one, 1)
    if hits_first:
        hit()
    world.run(one)  # step 2 reads the blocks
    leave(world, one, 1, launched=2, executed=1)
    if not hits_first:
        hit()
    world.free(other, 1)
    assert admit(world, third, 1, "mnp", 3).outcomes == NO_BLOCKS
    world.executed(one, 2)
    assert len(admit(world, third, 2, "stuvwxyz", 8).block_ids) == 8


@pytest.mark.parametrize("lag", [1, 2])
def test_rule_3_a_session_alone_gets_the_blocks_of_one_without_steps_in_flight(lag: int) -> None:
    found = []
    for behind in (0, lag):
        world, given = World(num_blocks=12), list[Any]()
        session = world.open()
        for number in range(1, 30):
            content = "abcdefghijklmnop"[number % 3 : number % 3 + 4] if number % 2 else f"{number:04}"
            launched, done = session.sequence, max(session.sequence - behind, 0)
            result = world.admit(session, number, content, 14, launched_sequence=launched, executed=done)
            given.append((list(result.block_ids), list(result.outcomes), result.free_blocks))
            if number > 2:
                leave(world, session, number - 2, launched=launched + 1, executed=max(session.sequence - behind, 0))
        found.append(given)
    assert found[0] == found[1]


@pytest.mark.parametrize(("launched", "closes"), [(0, False), (1, True)])
def test_rules_1_and_4_without_launched_steps_or_after_a_close_blocks_are_free_at_once(
    world: World, one: Session, other: Session, launched: int, *, closes: bool
) -> None:
    admit(world, one, 1, "abcdefgh", 8)
    leave(world, one, 1, launched=launched)
    if closes:
        world.allocator.close_session(one.session_id, 0.0)
    assert len(admit(world, other, 1, "stuvwxyz", 8).block_ids) == 8


def test_rule_4_the_quarantine_takes_freed_blocks_over(world: World, one: Session, other: Session) -> None:
    admit(world, one, 1, "abcdef", 6)
    world.executed(one, 1)
    admit(world, one, 2, "abcdef", 6)
    admit(world, other, 1, "abcd", 4)  # holds three of them, and one of its own
    leave(world, one, 1, launched=2)
    leave(world, one, 2, launched=2)
    world.allocator.evict_session("m", one.session_number, 0.0, quarantine_seconds=5.0)
    info = world.info()
    assert (info.quarantined_sessions, info.quarantined_blocks, info.free_blocks) == (1, 7, 0)
    assert_alike(world.allocator, restored(world.allocator))
    world.free(other, 1)
    assert admit(world, other, 2, "st", 2).outcomes == NO_BLOCKS
    world.allocator.end_quarantine("m", [one.session_number])
    assert len(admit(world, other, 3, "stuvwxyz", 8).block_ids) == 8


def test_rule_4_a_session_that_reports_no_step_as_executed_ends(world: World) -> None:
    one, other = world.open(), world.open(lease_seconds=3600.0)
    world.allocator.attach_stream(one)
    admit(world, one, 1, "abcde", 5)
    admit(world, one, 2, "v", 1)
    assert one.expires_seconds == inf, "nothing waits"
    leave(world, one, 1, launched=2)
    assert one.expires_seconds == MAX_STEP_SECONDS
    world.allocator.touch_session(one.session_id, 300.0)  # a call is no report
    assert not world.allocator.expire(300.0)
    world.executed(one, 1)  # a report of an earlier step begins the time again
    assert one.expires_seconds == 300.0 + MAX_STEP_SECONDS
    assert_alike(world.allocator, restored(world.allocator))
    world.allocator.renew_leases(400.0)
    world.allocator.attach_stream(one)
    assert not world.allocator.expire(999.0)
    assert [each for _, each, _ in world.allocator.expire(1000.0, quarantine_seconds=5.0)] == [one]
    assert world.pool.quarantine.num_blocks == 6
    world.allocator.end_due_quarantines(1005.0)
    assert len(admit(world, other, 1, "stuvwxyz", 8).block_ids) == 8


def test_rule_4_a_session_that_reports_its_steps_lives(world: World, one: Session) -> None:
    world.allocator.attach_stream(one)
    admit(world, one, 1, "abcde", 5)
    leave(world, one, 1, launched=1)
    world.executed(one, 1)
    assert one.expires_seconds == inf
    assert not world.allocator.expire(1e6)


def test_rule_4_a_session_without_requests_is_quarantined_for_what_it_freed(world: World, one: Session) -> None:
    admit(world, one, 1, "abc", 3)
    leave(world, one, 1, launched=1)
    world.allocator.evict_session("m", one.session_number, 0.0, quarantine_seconds=5.0)
    assert world.pool.quarantine.num_blocks == 3


def test_rule_5_a_freed_block_is_hit_by_others_after_its_step(world: World, one: Session, other: Session) -> None:
    admit(world, one, 1, "abc", 3)
    world.run(one, launched_sequence=1)  # a second step in flight
    leave(world, one, 1, launched=2)
    assert not world.admit(other, 1, "abc", 9).num_hit_tokens
    world.executed(one, 1)
    assert world.admit(other, 2, "abc", 9).num_hit_tokens == [8]


def take_and_free(world: World, session: Session, num_rounds: int, num_blocks: int) -> None:
    """Frees blocks again and again behind steps that are reported as launched and never as executed."""
    for number in range(1, num_rounds + 1):
        if not admit(world, session, number, chr(0x100 + number), num_blocks).outcomes:
            leave(world, session, number, launched=session.sequence)


def test_quotas_hold_while_steps_are_never_reported_as_executed() -> None:
    """Rule 5 of quotas: a session keeps no more than its maximum, and nothing of the minima of others."""
    world = World(num_blocks=100)
    bounded, unbounded, covered = world.open(quota=Quota(0, 20)), world.open(), world.open(quota=Quota(50))
    take_and_free(world, bounded, 30, 10)
    assert 15 < world.pool.blocks.free_list.num_held <= 20
    take_and_free(world, unbounded, 30, 10)
    assert 40 < world.pool.blocks.free_list.num_held <= 99 - 50
    assert len(admit(world, covered, 1, "x", 50).block_ids) == 50
    leave(world, covered, 1, launched=1)
    assert len(admit(world, covered, 2, "y", 50).block_ids) == 50, "it can take what waits for its own steps"
    for session in (bounded, unbounded):
        world.executed(session, session.sequence)
    leave(world, covered, 2, launched=1, executed=1)
    assert world.pool.quotas.num_left == 99 - 50


@pytest.mark.parametrize("quota", [Quota(0, 5), Quota(5, 5), Quota(5), Quota()])
def test_a_session_at_its_quota_gets_what_it_frees_in_the_same_round(quota: Quota) -> None:
    world = World(num_blocks=11)
    world.open(quota=Quota(5))
    one = world.open(quota=quota)
    admit(world, one, 1, "abcde", 5)
    world.run(one, Operation.PREEMPT, request_numbers=[1], launched_sequence=1)
    result = admit(world, one, 2, "vwxyz", 5)
    assert set(result.block_ids) == {1, 2, 3, 4, 5}
    assert result.free_blocks == 0


def test_a_session_within_its_quota_takes_the_blocks_that_wait_last() -> None:
    world = World(num_blocks=21)
    one = world.open(quota=Quota(0, 10))
    admit(world, one, 1, "abcd", 4)
    leave(world, one, 1, launched=1)
    assert admit(world, one, 2, "vwxyz", 5).block_ids == [4, 5, 6, 7, 8], "as without steps in flight"
    assert admit(world, one, 3, "st", 2).block_ids == [9, 10]
    assert set(admit(world, one, 4, "q", 1).block_ids) <= {1, 2, 3}, "the maximum leaves it no others"


def test_a_hit_that_waits_for_others_is_not_taken_from_the_own_blocks_that_wait() -> None:
    world = World(num_blocks=12)
    one, other = world.open(quota=Quota(min_blocks=3)), world.open()
    admit(world, one, 1, "abcd", 4)
    leave(world, one, 1, launched=1)
    world.executed(one, 1)  # found by others
    admit(world, one, 2, "abcd", 4)
    leave(world, one, 2, launched=2)
    admit(world, other, 1, "vwxyz", 5)
    leave(world, other, 1, launched=1)
    admit(world, other, 2, "st", 2)
    assert admit(world, other, 3, "abcd", 4).outcomes == NO_BLOCKS
    assert not admit(world, other, 4, "mnop", 4).outcomes


def test_a_minimum_is_not_guaranteed_from_blocks_that_wait(world: World, one: Session) -> None:
    admit(world, one, 1, "abcde", 5)
    leave(world, one, 1, launched=1)
    with world.refuses(ExhaustedError, match="at most 3"):
        world.open(quota=Quota(4))
    world.executed(one, 1)
    world.open(quota=Quota(4))


def test_a_kept_block_counts_for_the_session_whose_step_may_use_it(world: World) -> None:
    one, other = world.open(quota=Quota(min_blocks=3)), world.open(quota=Quota(min_blocks=2))
    admit(world, one, 1, "abcd", 4)
    world.executed(one, 1)
    assert admit(world, other, 1, "abcd", 4).num_hit_tokens == [12]
    world.run(one)
    leave(world, one, 1, launched=2, executed=1)
    assert len(world.pool.in_flight.kept[one.session_number]) == 3
    assert one.holding is not None
    assert one.holding.num_lacking == 0
    world.free(other, 1)
    world.executed(one, 2)
    assert world.pool.blocks.num_free_blocks == 8
    assert world.pool.quotas.num_left == 3


@pytest.mark.parametrize("caches", [True, False])
def test_rule_4_blocks_of_a_session_that_vanished_count_under_their_groups(*, caches: bool) -> None:
    world, session = opened(specs=[FullAttentionSpec(4), FullAttentionSpec(4)], enable_caching=caches)
    admit(world, session, 1, "abc", 3)
    used = [counters.used_blocks for counters in world.pool.blocks.group_counters]
    assert used == [3, 3]
    leave(world, session, 1, launched=1)
    world.allocator.evict_session("m", session.session_number, 0.0, quarantine_seconds=9.0)
    assert [counters.used_blocks for counters in world.pool.blocks.group_counters] == used
    world.allocator.end_quarantine("m", [session.session_number])
    assert [counters.used_blocks for counters in world.pool.blocks.group_counters] == [0, 0]


def test_chunks_that_others_pass_are_parked_until_they_are_released(world: World, one: Session, other: Session) -> None:
    for number, content in enumerate("abc", 1):
        admit(world, one, number, content, 1)
    for number in (1, 2, 3):
        leave(world, one, number, launched=3 + number)
    free_list = world.pool.blocks.free_list
    assert free_list._order[next(iter(free_list._order))].holder == one.session_number
    admit(world, other, 1, "v", 1)
    assert [chunk.holder for chunk in free_list._order.values()] == [0], "passed once, and not again"
    restored = DrivenState()
    with world.allocator.snapshot() as snapshot:
        frames = FrameParser().feed(b"".join(snapshot_frames(snapshot)))
    load_snapshot(restored, iter(list(frames)))
    assert_alike(world.allocator, restored)
    assert admit(world, one, 4, "stuv", 4).block_ids == [3, 2, 1, 5], "its holder takes its own first"
    world.executed(one, 6)
    assert not free_list.num_held
    assert len(admit(world, other, 2, "yz", 2).block_ids) == 2


def test_released_chunks_return_to_the_front_in_the_order_in_which_they_were_freed(world: World) -> None:
    one, other = world.open(), world.open()
    for number, content in enumerate("abc", 1):
        admit(world, one, number, content, 1)
    for number in (1, 2, 3):
        leave(world, one, number, launched=3 + number)
    admit(world, other, 1, "v", 1)
    world.executed(one, 5)
    assert list(world.pool.blocks.free_list)[:3] == [3, 1, 2], "3 is still parked"
    world.executed(one, 6)
    assert list(world.pool.blocks.free_list)[:3] == [3, 1, 2]


@pytest.mark.parametrize("in_flight", [False, True])
def test_blocks_that_wait_stay_covered_before_those_that_others_share(world: World, *, in_flight: bool) -> None:
    one, other, third = world.open(quota=Quota(2)), world.open(quota=Quota(2)), world.open()
    world.admit(one, 1, "xy", 8)
    world.admit(one, 2, "zq", 4)
    world.executed(one, 2)
    assert world.admit(third, 1, "zpqr", 16).num_hit_tokens == [4]
    leave(world, one, 1, launched=3 if in_flight else 2, executed=2)
    assert not world.admit(other, 1, "mn", 8).outcomes, "within its minimum"
    world.executed(one, 3)


def test_a_session_that_takes_back_all_that_waits_does_not_end(world: World, one: Session) -> None:
    world.open(lease_seconds=3600.0)
    world.allocator.attach_stream(one)
    admit(world, one, 1, "abcdefgh", 8)
    leave(world, one, 1, launched=1)
    admit(world, one, 2, "stuvwxyz", 8)
    world.executed(one, 3)
    assert not world.allocator.expire(MAX_STEP_SECONDS)


def test_a_refusal_has_no_reason_of_an_earlier_one(world: World) -> None:
    one, other = world.open(quota=Quota(max_blocks=6)), world.open()
    admit(world, one, 1, "abcd", 4)
    assert admit(world, one, 2, "efg", 3).outcomes == [Outcome.OVER_QUOTA]
    admit(world, other, 1, "xyz", 3)
    more: dict[str, Any] = {
        "num_appended_tokens": [8],
        "num_new_tokens": [8],
        "block_hashes": block_hashes("abcdef", 5)[96:],
    }
    assert world.run(one, Operation.ALLOCATE, request_numbers=[1], **more).outcomes == NO_BLOCKS


def test_blocks_that_replace_waiting_ones_are_covered_before_shared_ones(world: World) -> None:
    one, other, third = world.open(quota=Quota(2)), world.open(quota=Quota(2)), world.open()
    world.admit(one, 1, "xy", 8)
    world.admit(one, 2, "zq", 4)
    world.executed(one, 2)
    assert world.admit(third, 1, "zp", 8).num_hit_tokens == [4]
    leave(world, one, 1, launched=3, executed=2)
    world.admit(one, 3, "uvst", 16)  # two of them have waited
    assert not world.admit(other, 1, "mn", 8).outcomes, "within its minimum"
