"""Allocation options: each alone and combined, refusals that change nothing, and hits of the same allocation."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import KvpoolError
from kvpool.core.ids import BlockId, RequestNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.steps.columns import Operation, Outcome, Step, StepResult
from support.core import BLOCK_SIZE, World, opened

ADMIT, ALLOCATE, APPEND = Operation.ADMIT, Operation.ALLOCATE, Operation.APPEND
CACHE, LOOKUP = Operation.CACHE, Operation.LOOKUP
FULL, WINDOW = FullAttentionSpec(BLOCK_SIZE), SlidingWindowSpec(BLOCK_SIZE, sliding_window=5)
"""A window of 5 tokens needs the block that holds the 4 tokens before the next one."""
TERMS = (
    "num_external_tokens",
    "num_in_flight_tokens",
    "num_reserved_blocks",
    "num_watermark_blocks",
    "full_sequence_must_fit",
)


def add(world: World, session: Session, number: int, content: str, num_tokens: int) -> None:
    world.declare(session, APPEND, number, content, num_tokens)


def ask(world: World, session: Session, operation: Operation, number: int, new: int, **columns: Any) -> StepResult:
    """Applies one operation, with its columns as single values."""
    step = Step(session.sequence + 1, operations=[operation], request_numbers=[number], num_new_tokens=[new])
    hit: Sequence[Sequence[int]] = columns.pop("hit", ())
    if hit:
        step.num_block_ids = [len(ids) for ids in hit]
        step.block_ids = [block_id for ids in hit for block_id in ids]
    for name, value in columns.items():
        setattr(step, name, [value])
    return world.apply(session, step)


def outcome(result: StepResult) -> Outcome:
    return Outcome(result.outcomes[0] if result.outcomes else 0)


def tables(session: Session, number: int) -> list[list[BlockId]]:
    return [table.block_ids for table in the(session, number).tables]


def the(session: Session, number: int) -> Request:
    return session.by_number[RequestNumber(number)]


def num_counted(session: Session) -> int:
    """Number of blocks that a session's quota counts."""
    return len(session.holding.counts) if session.holding else -1


def free_of(world: World) -> int:
    return world.pool.blocks.num_free_blocks


@pytest.mark.parametrize("name", ["num_reserved_blocks", "num_watermark_blocks"])
@pytest.mark.parametrize("operation", [ADMIT, ALLOCATE])
def test_reserved_and_watermark_blocks_stay_free(operation: Operation, name: str) -> None:
    world, session = opened(num_blocks=11)
    add(world, session, 1, "abc", 12)  # takes three of ten blocks
    before = world.snapshot()
    assert outcome(ask(world, session, operation, 1, 12, **{name: 8})) is Outcome.NO_BLOCKS
    assert (free_of(world), tables(session, 1)) == (10, [[]])
    assert before != world.snapshot()  # the refusal and the step are counted
    assert outcome(ask(world, session, operation, 1, 12, **{name: 7})) is Outcome.OK
    assert tables(session, 1) == [[1, 2, 3]]


def test_reserve_and_watermark_add_up() -> None:
    world, session = opened(num_blocks=11)
    add(world, session, 1, "abc", 12)
    refused = ask(world, session, ADMIT, 1, 0, num_reserved_blocks=4, num_watermark_blocks=4)
    assert outcome(refused) is Outcome.NO_BLOCKS
    assert outcome(ask(world, session, ADMIT, 1, 0, num_reserved_blocks=4, num_watermark_blocks=3)) is Outcome.OK


def test_an_allocation_without_new_blocks_is_refused_below_the_reserve() -> None:
    world, session = opened(num_blocks=4)
    world.admit(session, 1, "ab", 5)  # two of three blocks, with three free slots
    assert outcome(ask(world, session, ALLOCATE, 1, 1, num_reserved_blocks=2)) is Outcome.NO_BLOCKS
    assert the(session, 1).num_computed_tokens == 5
    assert outcome(ask(world, session, ALLOCATE, 1, 1, num_reserved_blocks=1)) is Outcome.OK


def test_a_free_hit_counts_against_the_reserve_and_a_hit_in_use_does_not() -> None:
    world, session = opened(num_blocks=8)
    world.admit(session, 1, "abc", 13)  # four of seven blocks
    add(world, session, 2, "abc", 13)  # three of these blocks, and one new
    assert outcome(ask(world, session, ADMIT, 2, 0, num_reserved_blocks=3)) is Outcome.NO_BLOCKS
    assert outcome(ask(world, session, ADMIT, 2, 0, num_reserved_blocks=2)) is Outcome.OK
    assert tables(session, 2) == [[1, 2, 3, 5]]
    for number in (1, 2):
        world.free(session, number)
    add(world, session, 3, "abc", 13)  # seven free blocks, three of them the hit
    assert outcome(ask(world, session, ADMIT, 3, 0, num_reserved_blocks=4)) is Outcome.NO_BLOCKS
    assert outcome(ask(world, session, ADMIT, 3, 0, num_reserved_blocks=3)) is Outcome.OK


def test_the_full_sequence_must_fit_even_if_a_chunk_fits() -> None:
    world, session = opened(num_blocks=6)
    add(world, session, 1, "abcdefg", 24)  # six blocks of five
    assert outcome(ask(world, session, ADMIT, 1, 4, full_sequence_must_fit=True)) is Outcome.NEVER_FITS
    assert (free_of(world), world.pool.stats.requests) == (5, 0)
    assert outcome(ask(world, session, ADMIT, 1, 4)) is Outcome.OK
    assert tables(session, 1) == [[1]]


def test_a_watermark_applies_to_the_full_sequence_and_a_reserve_does_not() -> None:
    world, session = opened(num_blocks=8)
    add(world, session, 1, "abcdef", 20)  # five blocks of seven, one at first
    whole = {"full_sequence_must_fit": True}
    assert outcome(ask(world, session, ADMIT, 1, 4, num_watermark_blocks=3, **whole)) is Outcome.NO_BLOCKS
    assert outcome(ask(world, session, ADMIT, 1, 4, num_reserved_blocks=6, **whole)) is Outcome.OK
    world.run(session, Operation.PREEMPT, request_numbers=[1])
    assert outcome(ask(world, session, ADMIT, 1, 4, num_watermark_blocks=2, **whole)) is Outcome.OK


def test_blocks_of_a_hit_in_use_need_not_fit_and_free_ones_must() -> None:
    world = World(num_blocks=8)  # seven usable blocks
    session = world.open()
    world.admit(session, 1, "abc", 12)
    add(world, session, 2, "abcdefg", 28)  # three shared blocks, four new
    assert outcome(ask(world, session, ADMIT, 2, 1, full_sequence_must_fit=True)) is Outcome.OK
    world.free(session, 2)
    add(world, session, 3, "abcdefgh", 32)  # five new blocks
    assert outcome(ask(world, session, ADMIT, 3, 1, full_sequence_must_fit=True)) is Outcome.NEVER_FITS
    world.free(session, 1)
    assert outcome(ask(world, session, ADMIT, 3, 1, full_sequence_must_fit=True)) is Outcome.NEVER_FITS
    add(world, session, 4, "abcdefg", 28)  # three free blocks of the hit, four new
    assert outcome(ask(world, session, ADMIT, 4, 1, full_sequence_must_fit=True)) is Outcome.OK


def test_a_running_request_continues_if_its_missing_blocks_are_free() -> None:
    world, session = opened(num_blocks=6)
    add(world, session, 1, "abcde", 20)
    assert outcome(ask(world, session, ADMIT, 1, 4, full_sequence_must_fit=True)) is Outcome.OK
    assert outcome(ask(world, session, ALLOCATE, 1, 4, full_sequence_must_fit=True)) is Outcome.OK
    world.admit(session, 2, "x", 4)  # two blocks are free, three are missing
    assert outcome(ask(world, session, ALLOCATE, 1, 4, full_sequence_must_fit=True)) is Outcome.NO_BLOCKS
    assert tables(session, 1) == [[1, 2]]


@pytest.mark.parametrize(("in_flight", "fits"), [(4, True), (8, True), (9, False), (0, False)])
def test_a_window_is_counted_with_the_maximum_tokens_in_flight(in_flight: int, *, fits: bool) -> None:
    """Blocks of window - 1 and the tokens in flight, plus one for an unaligned window: 3, 4, 5; 10 for all."""
    world, session = opened(num_blocks=5, specs=[WINDOW], max_in_flight_tokens=in_flight)
    add(world, session, 1, "abcdefghij", 40)
    result = ask(world, session, ADMIT, 1, 4, full_sequence_must_fit=True)
    assert outcome(result) is (Outcome.OK if fits else Outcome.NEVER_FITS)


def test_a_chunk_is_counted_with_the_maximum_tokens_in_flight() -> None:
    for num_blocks, fits in ((4, False), (5, True)):
        world = World(
            num_blocks,
            specs=[ChunkedLocalAttentionSpec(BLOCK_SIZE, attention_chunk_size=8)],
            max_in_flight_tokens=8,
            enable_caching=False,
        )
        session = world.open()
        add(world, session, 1, "abcdefghij", 40)
        assert (outcome(ask(world, session, ADMIT, 1, 4, full_sequence_must_fit=True)) is Outcome.OK) is fits


def test_tokens_in_flight_keep_blocks_before_a_window() -> None:
    world, session = opened(specs=[WINDOW])
    world.admit(session, 1, "abcd", 16)
    ask(world, session, ALLOCATE, 1, 1, num_in_flight_tokens=16)  # 16 are computed, none is executed
    assert tables(session, 1) == [[1, 2, 3, 4, 5]]
    ask(world, session, ALLOCATE, 1, 1, num_in_flight_tokens=9)  # 8 are executed: the next token attends to 4 to 8
    assert tables(session, 1) == [[0, 2, 3, 4, 5]]
    ask(world, session, ALLOCATE, 1, 1, num_in_flight_tokens=200)  # freed blocks stay freed
    assert tables(session, 1) == [[0, 2, 3, 4, 5]]
    ask(world, session, ALLOCATE, 1, 1)
    assert tables(session, 1) == [[0, 0, 0, 4, 5]]


@pytest.mark.parametrize(
    "spec", [ChunkedLocalAttentionSpec(BLOCK_SIZE, attention_chunk_size=8), MambaSpec(BLOCK_SIZE), FULL, WINDOW]
)
def test_more_tokens_may_be_in_flight_than_are_computed(spec: KVCacheSpec) -> None:
    world, session = opened(specs=[spec], enable_caching=False)
    world.admit(session, 1, "", 12)
    assert outcome(ask(world, session, ALLOCATE, 1, 1, num_in_flight_tokens=256)) is Outcome.OK
    assert tables(session, 1) == [[1, 2, 3, 4]]


def test_a_refusal_frees_only_blocks_behind_the_window_of_executed_tokens() -> None:
    world, session = opened(num_blocks=6, specs=[WINDOW])
    world.admit(session, 1, "abcd", 16)
    refused = ask(world, session, ALLOCATE, 1, 8, num_in_flight_tokens=8, num_reserved_blocks=4)
    assert outcome(refused) is Outcome.NO_BLOCKS
    assert tables(session, 1) == [[0, 2, 3, 4]]
    refused = ask(world, session, ALLOCATE, 1, 4, full_sequence_must_fit=True, num_watermark_blocks=5)
    assert outcome(refused) is Outcome.NO_BLOCKS
    assert tables(session, 1) == [[0, 2, 3, 4]]  # the refused allocation did not advance the window


def test_external_tokens_get_slots_and_count_as_computed(world: World, session: Session) -> None:
    add(world, session, 1, "abcd", 17)
    result = ask(world, session, ALLOCATE, 1, 5, num_external_tokens=12)
    assert result.block_ids == [1, 2, 3, 4, 5]
    assert the(session, 1).num_computed_tokens == 17
    assert len(world.pool.blocks.prefix_map) == 4


def test_external_tokens_can_follow_a_hit_without_new_tokens(world: World, session: Session) -> None:
    world.admit(session, 1, "ab", 9)
    add(world, session, 2, "abcd", 17)
    result = ask(world, session, ALLOCATE, 2, 0, num_external_tokens=9, hit=[[1, 2]])
    assert (result.block_ids, tables(session, 2)) == ([4, 5, 6], [[1, 2, 4, 5, 6]])
    assert the(session, 2).num_computed_tokens == 17
    assert outcome(ask(world, session, ALLOCATE, 2, 3)) is Outcome.OK
    assert the(session, 2).num_computed_tokens == 20


def test_external_tokens_advance_windows_and_leave_null_blocks() -> None:
    world, session = opened(specs=[FULL, WINDOW])
    world.admit(session, 1, "ab", 9)
    hit = tables(session, 1)
    promise = [hit[0][:2], [0, hit[1][1]]]
    add(world, session, 2, "abcdef", 24)
    held = world.pool.blocks.ref_cnt(hit[1][1])
    result = ask(world, session, ALLOCATE, 2, 4, num_external_tokens=12, hit=promise)
    assert outcome(result) is Outcome.OK
    full, window = tables(session, 2)
    assert (full[:2], len(full)) == (promise[0], 6)
    assert (window[:4], len(window)) == ([0, 0, 0, 0], 6)  # 20 are computed: the next token attends to 16 to 20
    assert world.pool.blocks.ref_cnt(hit[1][1]) == held
    assert result.num_new_blocks == [4, 2]


def test_external_tokens_outside_the_window_take_no_blocks() -> None:
    """A block shared with new tokens is allocated with these, after the external blocks of all groups."""
    world, session = opened(specs=[SlidingWindowSpec(BLOCK_SIZE, sliding_window=1), FULL], enable_caching=False)
    add(world, session, 1, "", 8)
    ask(world, session, ALLOCATE, 1, 2, num_external_tokens=6)
    assert tables(session, 1) == [[0, 3], [1, 2]]


def test_delayed_external_blocks_are_cached_by_cache_and_never_beyond_known_tokens() -> None:
    world, session = opened()
    add(world, session, 1, "abc", 12)
    ask(world, session, ALLOCATE, 1, 0, num_external_tokens=12, delay_cache_blocks=True)
    assert len(world.pool.blocks.prefix_map) == 0
    ask(world, session, CACHE, 1, 8)
    assert [world.pool.blocks.prefix_map.block_hash(BlockId(i)) is not None for i in (1, 2, 3)] == [
        True,
        True,
        False,
    ]
    ask(world, session, CACHE, 1, 12)
    assert len(world.pool.blocks.prefix_map) == 3


def test_options_apply_together() -> None:
    """Five external and new blocks, a free hit of two blocks, a watermark of two and a reserve of one: ten blocks."""
    for num_blocks, fits in ((10, False), (11, True)):
        world, session = opened(num_blocks)
        world.admit(session, 1, "ab", 8)
        world.free(session, 1)
        add(world, session, 2, "abcdefg", 28)
        result = ask(
            world, session, ALLOCATE, 2, 8, hit=[[1, 2]], num_external_tokens=12, num_in_flight_tokens=3,
            num_reserved_blocks=1, num_watermark_blocks=2, full_sequence_must_fit=True,
        )  # fmt: skip
        assert (outcome(result) is Outcome.OK) is fits


def test_a_quota_limits_an_allocation_with_options(world: World) -> None:
    session = world.open(quota=Quota(2, 5))
    add(world, session, 1, "abcdef", 24)
    assert outcome(ask(world, session, ADMIT, 1, 4, full_sequence_must_fit=True)) is Outcome.NEVER_FITS
    assert outcome(ask(world, session, ALLOCATE, 1, 0, num_external_tokens=24)) is Outcome.NEVER_FITS
    assert outcome(ask(world, session, ALLOCATE, 1, 4, num_external_tokens=16)) is Outcome.OK
    assert num_counted(session) == 5


def test_reserves_count_blocks_available_to_the_session() -> None:
    world = World(num_blocks=20)  # nineteen usable blocks
    one, other = world.open(quota=Quota(10, 0)), world.open(quota=Quota(0, 5))
    for session, content in ((one, "abc"), (other, "xyz")):
        add(world, session, 1, content, 12)  # takes three blocks
    assert outcome(ask(world, other, ADMIT, 1, 0, num_reserved_blocks=3)) is Outcome.OVER_QUOTA
    assert outcome(ask(world, other, ADMIT, 1, 0, num_watermark_blocks=2)) is Outcome.OK  # the rest of its five blocks
    third = world.open()  # six blocks are free beside those of the first session
    add(world, third, 1, "uvw", 12)
    before = free_of(world)
    assert outcome(ask(world, third, ADMIT, 1, 0, num_reserved_blocks=4)) is Outcome.NO_BLOCKS
    assert free_of(world) == before
    assert outcome(ask(world, third, ADMIT, 1, 0, num_reserved_blocks=3)) is Outcome.OK
    assert outcome(ask(world, one, ADMIT, 1, 0, num_reserved_blocks=11)) is Outcome.NO_BLOCKS
    assert outcome(ask(world, one, ADMIT, 1, 0, num_reserved_blocks=10)) is Outcome.OK


@pytest.mark.parametrize("name", TERMS)
def test_a_column_of_another_length_is_refused(name: str, world: World, session: Session) -> None:
    add(world, session, 1, "abc", 12)
    for values in ([1, 1], [0] * 7):
        columns: dict[str, Any] = {name: values}
        with world.refuses(field=name, match="needs 0 or 1"):
            world.allocate(session, 1, 1, **columns)


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"num_external_tokens": 257, "new": 0}, "num_external_tokens[0]"),
        ({"num_external_tokens": 250, "new": 7}, "num_new_tokens[0]"),
        ({"num_external_tokens": 249, "new": 0, "hit": [[1, 2]]}, "num_external_tokens[0]"),
        ({"num_in_flight_tokens": 1, "new": 0}, "num_new_tokens[0]"),
        ({"num_in_flight_tokens": 257, "new": 1}, "num_in_flight_tokens[0]"),
        ({"operation": ADMIT, "num_external_tokens": 4, "new": 0}, "num_external_tokens[0]"),
        ({"number": 1, "num_external_tokens": 4, "new": 1}, "num_external_tokens[0]"),  # which holds blocks
        *(({name: value, "new": 1}, f"{name}[0]") for name in TERMS[:4] for value in (-1, 2**31, 2**40, 2**64)),
    ],
)
def test_options_out_of_range_or_that_exclude_each_other_are_refused_by_name(
    columns: dict[str, Any], field: str
) -> None:
    world, session = opened()
    world.admit(session, 1, "ab", 9)
    add(world, session, 2, "abc", 12)
    operation = columns.pop("operation", ALLOCATE)
    with world.refuses(field=field):
        ask(world, session, operation, columns.pop("number", 2), columns.pop("new"), **columns)


def test_external_tokens_can_fill_a_request_completely() -> None:
    world, session = opened(num_blocks=80, enable_caching=False)
    add(world, session, 1, "", 256)
    assert outcome(ask(world, session, ALLOCATE, 1, 0, num_external_tokens=256)) is Outcome.OK
    assert the(session, 1).num_computed_tokens == 256


def test_a_preempted_request_can_have_external_tokens(world: World, session: Session) -> None:
    world.admit(session, 1, "ab", 9)
    world.run(session, Operation.PREEMPT, request_numbers=[1])
    assert outcome(ask(world, session, ALLOCATE, 1, 0, num_external_tokens=9)) is Outcome.OK
    assert the(session, 1).num_computed_tokens == 9


def test_options_apply_to_their_operation_only(world: World, session: Session) -> None:
    for number in (1, 2):
        add(world, session, number, "abc"[number:], 8)
    result = world.run(
        session, ALLOCATE, ALLOCATE, request_numbers=[1, 2], num_new_tokens=[4, 0], num_external_tokens=[0, 8]
    )
    assert (result.outcomes, result.num_new_blocks) == ([], [1, 2])


def test_a_lookup_is_counted_at_allocation_with_the_allocated_hit() -> None:
    world, session = opened(num_blocks=12)
    world.admit(session, 1, "abc", 13)
    stats = world.pool.stats
    counted = (stats.requests, stats.queries_tokens, stats.hits_tokens)
    add(world, session, 2, "abcd", 17)
    found = ask(world, session, LOOKUP, 2, 0)
    assert (found.num_hit_tokens, found.block_ids) == ([12], [1, 2, 3])
    assert outcome(ask(world, session, ALLOCATE, 2, 5, hit=[[1, 2, 3]], num_reserved_blocks=9)) is Outcome.NO_BLOCKS
    assert counted == (stats.requests, stats.queries_tokens, stats.hits_tokens)
    assert outcome(ask(world, session, ALLOCATE, 2, 5, hit=[[1, 2]])) is Outcome.OK
    assert (stats.requests, stats.queries_tokens, stats.hits_tokens) == (counted[0] + 1, counted[1] + 17, 8)
    ask(world, session, ALLOCATE, 2, 4)
    assert stats.requests == counted[0] + 1


@pytest.mark.parametrize(
    ("operations", "count"),
    [
        ([LOOKUP], 0),
        ([LOOKUP, ALLOCATE], 1),
        ([LOOKUP, ADMIT], 1),
        ([LOOKUP, LOOKUP, ALLOCATE], 1),
        ([LOOKUP, Operation.LOOKUP_UNCOUNTED, ALLOCATE], 0),
        ([LOOKUP, Operation.LOOKUP_COUNTED_AT_ONCE, ALLOCATE], 1),
    ],
)
def test_the_newest_lookup_is_counted_once_when_its_request_gets_slots(operations: list[Operation], count: int) -> None:
    world, session = opened()
    add(world, session, 1, "abc", 13)
    for operation in operations:
        ask(world, session, operation, 1, 13 if operation is ALLOCATE else 0)
    assert world.pool.stats.requests == count


def test_a_deferred_lookup_requires_a_request_without_blocks(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    with pytest.raises(KvpoolError, match="holds blocks"):
        ask(world, session, LOOKUP, 1, 0)
