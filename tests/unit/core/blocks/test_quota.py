"""Quotas of sessions: guaranteed minimum and enforced maximum numbers of blocks."""

import pytest

from kvpool.core.blocks.quota import NO_QUOTA, Quota
from kvpool.core.errors import ExhaustedError, InvalidArgumentError
from kvpool.core.ids import BlockId, RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import SinkFullAttentionSpec, SlidingWindowSpec
from kvpool.core.steps.columns import Operation, Outcome
from support.core import World, block_hashes


def outcome(world: World, session: Session, number: int, content: str, num_tokens: int) -> Outcome:
    """Declares and admits a request; returns the outcome."""
    result = world.admit(session, number, content, num_tokens, executed=session.sequence)
    return Outcome(result.outcomes[0] if result.outcomes else 0)


def grow(world: World, session: Session, number: int, num_tokens: int) -> Outcome:
    """Allocates slots for more known tokens."""
    result = world.allocate(session, number, num_tokens)
    return Outcome(result.outcomes[0] if result.outcomes else 0)


@pytest.mark.parametrize(
    ("quota", "field"),
    [
        (Quota(-1), "min_blocks"),
        (Quota(20), "min_blocks"),  # the null block is not available
        (Quota(5, 4), "max_blocks"),
        (Quota(0, -1), "max_blocks"),
        (Quota(0, 2**31), "max_blocks"),
    ],
)
def test_out_of_range(quota: Quota, field: str, world: World) -> None:
    with world.refuses(field=field):
        world.open(quota=quota)


def test_sinks_do_not_count_as_available_for_quotas() -> None:
    world = World(num_blocks=20, specs=[SinkFullAttentionSpec(4, sink_len=8)])
    with pytest.raises(InvalidArgumentError, match="18 is not in"):
        world.open(quota=Quota(18))
    world.open(quota=Quota(17))


def test_a_minimum_that_cannot_be_guaranteed_now_is_refused(world: World) -> None:
    world.open(quota=Quota(10))
    other = world.open()
    assert outcome(world, other, 1, "a" * 5, 20) is Outcome.OK
    words = "5 blocks cannot be guaranteed now, at most 4"
    with world.refuses(ExhaustedError, field="min_blocks", reason="QUOTA_UNAVAILABLE", match=words) as caught:
        world.open(quota=Quota(5))
    assert caught.value.retry_seconds
    world.free(other, 1)
    world.open(quota=Quota(9))


def test_blocks_reserved_for_other_sessions_are_not_allocated(world: World) -> None:
    kept, other = world.open(quota=Quota(10)), world.open()
    assert outcome(world, other, 1, "a" * 10, 40) is Outcome.NEVER_FITS
    assert outcome(world, other, 2, "b" * 9, 36) is Outcome.OK
    assert outcome(world, other, 3, "c", 1) is Outcome.NO_BLOCKS
    assert outcome(world, kept, 1, "d" * 10, 40) is Outcome.OK
    assert world.pool.blocks.num_free_blocks == 0


def test_reported_free_blocks_are_those_available_to_the_session(world: World) -> None:
    kept, capped, other = world.open(quota=Quota(10)), world.open(quota=Quota(0, 3)), world.open()
    assert [world.run(session).free_blocks for session in (kept, capped, other)] == [19, 3, 9]
    info = world.info()
    assert (info.free_blocks, info.reserved_blocks) == (19, 10)
    assert outcome(world, kept, 1, "a" * 4, 16) is Outcome.OK
    assert outcome(world, capped, 1, "b" * 2, 8) is Outcome.OK
    assert [world.run(session).free_blocks for session in (kept, capped, other)] == [13, 1, 7]
    assert world.info().reserved_blocks == 6


def test_a_maximum_is_never_exceeded_and_later_operations_are_skipped(world: World) -> None:
    session = world.open(quota=Quota(0, 5))
    assert outcome(world, session, 1, "a" * 4, 16) is Outcome.OK
    for number in (2, 3, 4):
        world.declare(session, Operation.APPEND, number, f"{number}", 5)
    result = world.run(session, Operation.ADMIT, Operation.ADMIT, Operation.PREEMPT, request_numbers=[2, 3, 4])
    assert result.outcomes == [Outcome.OVER_QUOTA, Outcome.SKIPPED, Outcome.OK]
    assert result.free_blocks == 1
    assert world.pool.blocks.num_free_blocks == 15
    world.free(session, 1)
    assert world.run(session, Operation.ADMIT, request_numbers=[2]).outcomes == []


def test_over_quota_is_reported_even_if_no_block_is_free() -> None:
    world = World(num_blocks=4)
    capped, other = world.open(quota=Quota(0, 1)), world.open()
    assert outcome(world, capped, 1, "d", 4) is Outcome.OK
    assert outcome(world, other, 1, "ab", 8) is Outcome.OK
    assert outcome(world, capped, 2, "e", 4) is Outcome.OVER_QUOTA
    assert outcome(world, other, 2, "f", 4) is Outcome.NO_BLOCKS


@pytest.mark.parametrize(
    ("quota", "reserved", "most"),
    [(Quota(0, 5), 0, 5), (NO_QUOTA, 12, 7), (Quota(4, 0), 8, 11), (Quota(2, 9), 12, 7), (NO_QUOTA, 0, 19)],
)
def test_a_request_that_exceeds_what_its_session_can_ever_hold_never_fits(
    quota: Quota, reserved: int, most: int
) -> None:
    """One that needs as much as that waits for the session's other requests."""
    world = World(num_blocks=20)
    session, other = world.open(quota=quota), world.open(quota=Quota(reserved))
    assert outcome(world, session, 1, "x", 4) is Outcome.OK
    before = world.pool.blocks.num_free_blocks
    waits = Outcome.OVER_QUOTA if quota.max_blocks == most else Outcome.NO_BLOCKS
    assert outcome(world, session, 2, "a" * most, most * 4) is waits
    assert outcome(world, session, 3, "b" * most, most * 4 + 1) is Outcome.NEVER_FITS
    assert grow(world, session, 1, most * 4 - 3) is Outcome.NEVER_FITS
    assert world.pool.blocks.num_free_blocks == before
    world.free(session, 1)
    assert world.run(session, Operation.ADMIT, request_numbers=[2]).outcomes == []
    world.free(session, 2)
    world.allocator.close_session(other.session_id, 0.0)
    assert (world.run(session, Operation.ADMIT, request_numbers=[3]).outcomes == []) == (reserved > 0)


def test_a_block_shared_by_requests_counts_once(world: World) -> None:
    session = world.open(quota=Quota(0, 5))
    assert outcome(world, session, 1, "aaa", 13) is Outcome.OK
    assert outcome(world, session, 2, "aaa", 13) is Outcome.OK  # three shared blocks and one of its own
    assert outcome(world, session, 3, "aaa", 13) is Outcome.OVER_QUOTA
    world.free(session, 1)
    assert world.run(session, Operation.ADMIT, request_numbers=[3]).outcomes == []


def test_shared_blocks_do_not_reduce_a_minimum(world: World) -> None:
    """Rule 2: the other session keeps the shared blocks, and this session still gets its minimum."""
    kept, other = world.open(quota=Quota(10)), world.open()
    assert outcome(world, kept, 1, "a" * 10, 40) is Outcome.OK
    world.run(kept, executed=kept.sequence)
    assert outcome(world, other, 1, "a" * 9, 37) is Outcome.NEVER_FITS  # needs nine to hold and one more; nine are left
    assert outcome(world, other, 2, "a" * 8, 33) is Outcome.OK
    assert world.info().reserved_blocks == 8
    world.free(kept, 1)
    assert outcome(world, kept, 2, "z" * 10, 40) is Outcome.OK


def test_hits_on_blocks_of_other_sessions_fit_the_minimum(world: World) -> None:
    """Rule 2, from the other side: sharing another session's blocks never fails within the own minimum."""
    one, two = world.open(quota=Quota(10)), world.open(quota=Quota(9))
    assert outcome(world, one, 1, "a" * 10, 40) is Outcome.OK
    world.run(one, executed=one.sequence)
    assert outcome(world, two, 1, "a" * 9, 36) is Outcome.OK
    world.free(one, 1)
    assert outcome(world, one, 2, "z" * 10, 40) is Outcome.OK


def test_blocks_behind_a_window_no_longer_count() -> None:
    world = World(num_blocks=20, specs=[SlidingWindowSpec(4, sliding_window=4)])
    session = world.open(quota=Quota(3, 3))
    assert outcome(world, session, 1, "abc", 12) is Outcome.OK
    assert world.decode(session, 1, "abcde", 8).outcomes == []  # two blocks fell behind the window, two were allocated
    assert session.holding
    assert len(session.holding.counts) == 3


def test_lookahead_counts(world: World) -> None:
    session = world.open(quota=Quota(0, 3))
    assert outcome(world, session, 1, "a", 4) is Outcome.OK
    world.run(session, Operation.PREEMPT, request_numbers=[1])
    beyond = world.run(session, Operation.ADMIT, request_numbers=[1], num_lookahead_tokens=[9])
    assert beyond.outcomes == [Outcome.NEVER_FITS]
    within = world.run(session, Operation.ADMIT, request_numbers=[1], num_lookahead_tokens=[8])
    assert within.outcomes == []


def test_quotas_check_a_hit_when_it_is_allocated(world: World) -> None:
    session_number, reader = world.open(), world.open(quota=Quota(0, 2))
    outcome(world, session_number, 1, "abc", 12)
    world.run(session_number, executed=session_number.sequence)
    found = world.declare(reader, Operation.LOOKUP, 1, "abc", 13)
    assert found.block_ids == table_of(session_number, 1)
    taken = world.allocate(reader, 1, 1, hit=[table_of(session_number, 1)])
    assert taken.outcomes == [Outcome.NEVER_FITS]
    assert table_of(reader, 1) == []


def table_of(session: Session, number: int) -> list[BlockId]:
    return list(session.by_number[RequestNumber(number)].tables[0].block_ids)


def test_an_ended_session_releases_its_minimum(world: World) -> None:
    kept, other = world.open(quota=Quota(10)), world.open()
    outcome(world, kept, 1, "a" * 12, 48)
    world.run(kept, executed=kept.sequence)
    assert outcome(world, other, 1, "a" * 6, 25) is Outcome.OK
    world.allocator.close_session(kept.session_id, 0.0)
    assert world.pool.quotas.num_left == world.pool.blocks.num_free_blocks
    assert not world.pool.quotas.num_covering


def test_blocks_in_quarantine_count_for_no_quota(world: World) -> None:
    kept, other = world.open(quota=Quota(10, 12)), world.open()
    outcome(world, kept, 1, "a" * 12, 48)
    world.allocator.evict_session("m", kept.session_number, 0.0, quarantine_seconds=5.0)
    assert world.pool.blocks.num_free_blocks == world.pool.quotas.num_left == 7
    world.open(quota=Quota(7))
    assert world.run(other).free_blocks == 0
    world.allocator.end_due_quarantines(5.0)
    assert world.run(other).free_blocks == 12


def test_a_new_epoch_removes_all_quotas(world: World) -> None:
    outcome(world, world.open(quota=Quota(10, 12)), 1, "a" * 3, 12)
    world.allocator.pass_epoch(world.pool, 2)
    assert world.pool.quotas.num_left == 19


@pytest.mark.parametrize("quota", [Quota(), Quota(1), Quota(5), Quota(2, 6), Quota(0, 3)])
def test_a_block_twice_in_one_table_counts_once(quota: Quota, world: World) -> None:
    """The hashes of a correct client do not repeat, but those of a faulty client can."""
    world.open(quota=Quota(3))
    filler, reader = world.open(quota=Quota(2)), world.open(quota=quota)
    assert outcome(world, filler, 1, "a", 5) is Outcome.OK
    world.run(filler, Operation.COMMON_PREFIX, request_numbers=[1], executed=filler.sequence)
    for _ in range(2):
        world.admit(reader, 2, "a", 13, block_hashes=block_hashes("a", 1) * 3)
        table = table_of(reader, 2)
        assert len(table) == 4
        assert len(set(table)) == 2
        world.free(reader, 2)
    world.free(filler, 1)
    assert world.pool.quotas.num_reserved == 5 + quota.min_blocks
