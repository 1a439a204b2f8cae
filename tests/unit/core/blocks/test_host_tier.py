"""The second tier: copies to host memory and back, who finds them, and what a death, a reset or an eviction leaves."""

from array import array
from collections import Counter
from functools import partial
from itertools import compress
from math import inf
from typing import Any

import pytest

from kvpool.client.prefix_index import PrefixIndex
from kvpool.client.transports.transport import EventBatch
from kvpool.core.blocks.host_tier import MAX_CLEANED, MAX_UNREPORTED, HostTier
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, Medium
from kvpool.core.execution.apply import mark_executed
from kvpool.core.execution.end_session import MAX_PART_BLOCKS
from kvpool.core.ids import NULL_BLOCK, BlockHash, BlockId, GroupId, RequestNumber
from kvpool.core.pools.snapshots import end_pool_snapshot, pool_snapshot, restored_pool
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import CircularBufferSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.statistics import HostCounters
from kvpool.core.steps.columns import Operation, Outcome, StepResult
from kvpool.core.views.snapshot_cursor import SnapshotCursor
from support.core import BLOCK_SIZE, World, block_hashes, config
from support.integrity import check_integrity
from support.router import announced

PROMPT = 4 * BLOCK_SIZE
NUM_BLOCKS = 18
FIRST_HOST = BlockId(NUM_BLOCKS)


class HostWorld(World):
    """A pool with host memory, whose sessions run each step before they make the next one."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 32, **options: Any) -> None:
        super().__init__(num_blocks, num_host_blocks=num_host_blocks, **options)
        self._number = 0

    @property
    def host(self) -> HostTier:
        assert self.pool.blocks.host
        return self.pool.blocks.host

    def serve(self, session: Session, content: str, num_tokens: int = PROMPT, num_later: int = 0) -> StepResult:
        """Admits a request, computes its last tokens with a later step, and frees it when it has run."""
        self._number += 1
        most, token_ids = [num_tokens - num_later], list(range(num_tokens)) if self.pool.config.makes_events else []
        columns = {"num_new_tokens": most, "token_ids": token_ids, **executed(session)}
        result = self.admit(session, self._number, content, num_tokens, **columns)
        self.check()
        computed = session.by_number[RequestNumber(self._number)].num_computed_tokens
        if computed < num_tokens:
            self.allocate(session, self._number, num_tokens - computed, **executed(session))
            self.check()
        self.free(session, self._number, **executed(session))
        self.check()
        return result

    def fill(self, session: Session, *contents: str) -> list[tuple[int, int]]:
        """Serves prompts; returns the copies to host memory."""
        copies = [copy for content in contents for copy in copies_of(self.serve(session, content))]
        return [copy for copy in copies if copy[1] >= self.pool.blocks.num_blocks]

    def check(self) -> None:
        check_integrity(self.pool, self.sessions())


def executed(session: Session) -> dict[str, Any]:
    """What a session reports that has run all of its steps."""
    return {"executed": session.sequence, "launched_sequence": session.sequence}


def copies_of(result: StepResult) -> list[tuple[int, int]]:
    ids = result.copied_block_ids
    return list(zip(ids[1::3], ids[2::3], strict=True))


def hit_tokens(result: StepResult) -> int:
    return sum(result.num_hit_tokens)


@pytest.fixture
def world() -> HostWorld:
    return HostWorld()


def test_blocks_that_will_be_allocated_soon_are_copied_and_found_after_their_eviction(world: HostWorld) -> None:
    session = world.open()
    assert world.fill(session, "aaaa") == []
    assert world.fill(session, "bbbb") == [(4, 18), (3, 19), (2, 20), (1, 21)]
    world.fill(session, "cccc", "dddd", "eeee", "ffff")
    result = world.serve(session, "aaaa")
    assert (result.num_hit_tokens, result.num_prefix_blocks) == ([PROMPT - BLOCK_SIZE], [3])
    assert result.num_host_hit_tokens == [PROMPT - BLOCK_SIZE]
    assert copies_of(result)[:3] == list(zip((21, 20, 19), result.block_ids[:3], strict=True))
    assert max(result.block_ids) < FIRST_HOST
    assert world.pool.stats.host_hits_tokens == PROMPT - BLOCK_SIZE
    assert world.pool.stats.shared_hits_tokens == 0
    assert world.host.counters.copied_in_blocks == 3
    assert world.pool.blocks.take_events() == []


def test_a_hit_of_both_tiers_copies_its_part_in_host_memory_only(world: HostWorld) -> None:
    session = world.open()
    world.fill(session, *(each * 4 for each in "abcde"))
    assert world.pool.blocks.block_hash(BlockId(1)) is not None
    result = world.serve(session, "aaaa")
    assert (result.num_hit_tokens, result.block_ids[0]) == ([PROMPT - BLOCK_SIZE], 1)
    assert copies_of(result) == list(zip((20, 19), result.block_ids[1:3], strict=True))
    assert world.pool.stats.host_hits_tokens == 2 * BLOCK_SIZE


def test_what_is_in_host_memory_or_on_its_way_there_is_not_copied_again(world: HostWorld) -> None:
    session, other = world.open(), world.open()
    world.fill(session, "aaaa")
    copies = copies_of(world.admit(session, 50, "bbbb", PROMPT, **executed(session)))
    assert copies == [(4, 18), (3, 19), (2, 20), (1, 21)]
    assert copies_of(world.admit(other, 50, "cccc", PROMPT)) == []
    world.free(session, 50, **executed(session))
    world.free(other, 50, **executed(other))
    world.fill(session, *(each * 4 for each in "defg"))
    assert hit_tokens(world.serve(session, "aaaa")) == PROMPT - BLOCK_SIZE
    world.fill(session, *(each * 4 for each in "hijk"))
    assert set(in_host_memory(world).values()) == {1}


def test_contents_that_are_taken_before_they_are_copied_count_as_lost(world: HostWorld) -> None:
    session = world.open()
    world.fill(session, "aaaa")
    world.admit(session, 50, "b" * 16, 16 * BLOCK_SIZE, **executed(session))
    assert world.host.counters == HostCounters(copied_out_blocks=1, lost_blocks=3)


def test_host_memory_changes_no_block_that_a_pool_gives_out() -> None:
    answers = []
    for world in (World(NUM_BLOCKS), HostWorld()):
        session, ids = world.open(), []
        for number, content in enumerate(("aaaa", "bbbb", "cccc", "dddd", "eeee", "eeee"), 1):
            result = world.admit(session, number, content, PROMPT, **executed(session))
            ids.append((result.block_ids, result.num_hit_tokens, result.free_blocks))
            world.free(session, number, **executed(session))
        answers.append(ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("limit", "num_new"), [(0, 4), (3, 4), (2, 0)])
def test_a_hit_of_more_host_blocks_than_the_limit_is_admitted_alone(world: HostWorld, limit: int, num_new: int) -> None:
    session = world.open()
    world.fill(session, "aaaa", "bbbb", "cccc", "dddd", "eeee", "ffff")
    options = {"max_promoted_blocks": limit, "num_lookahead_tokens": [1], **executed(session)}
    result = world.admit(session, 99, "aaaa", PROMPT, **options)
    assert (result.num_hit_tokens, result.num_new_tokens or [0]) == ([PROMPT - BLOCK_SIZE], [num_new])
    assert (result.num_prefix_blocks, sum(result.num_new_blocks)) == ([3], 2 if num_new else 0)
    assert len([source for source, _ in copies_of(result) if source >= FIRST_HOST]) == 3
    world.check()
    if not num_new:
        result = world.allocate(session, 99, BLOCK_SIZE, **executed(session))
        assert sum(result.num_new_blocks) == 1
    world.free(session, 99, **executed(session))
    world.check()


def test_the_time_of_copies_is_counted(world: HostWorld) -> None:
    session = world.open()
    for number in (1, 2):
        world.admit(session, number, "abcd", 4, copying_out_microseconds=20, copying_in_microseconds=number)
    counters = world.host.counters
    assert (counters.copying_out_microseconds, counters.copying_in_microseconds) == (40, 3)


def test_a_step_that_takes_no_block_orders_no_copy(world: HostWorld) -> None:
    session = world.open()
    world.fill(session, "aaaa", "bbbb", "cccc")
    assert world.run(session, **executed(session)).copied_block_ids == []


def test_the_copies_keep_pace_with_the_blocks_that_are_taken() -> None:
    num_blocks, num_taken = 4 * MAX_CLEANED, 32
    world = HostWorld(num_blocks, num_blocks)
    session = world.open()
    contents = iter(map(chr, range(0x100, 0x1000)))
    for content, _ in zip(contents, range(num_blocks // num_taken - 8), strict=False):
        assert world.serve(session, content, num_taken * BLOCK_SIZE).copied_block_ids == []
    for content, _ in zip(contents, range(100), strict=False):
        assert len(copies_of(world.serve(session, content, num_taken * BLOCK_SIZE))) <= 2 * num_taken + 8
    assert world.host.counters.lost_blocks == 0
    assert world.host.counters.evicted_blocks > 0


def test_nobody_finds_a_copy_before_its_step_is_executed(world: HostWorld) -> None:
    writer, reader = world.open(), world.open()
    world.fill(writer, "aaaa")
    world.admit(writer, 50, "bbbb", PROMPT, **executed(writer))
    target, visible = world.host.uses[0].block_ids[-1], world.pool.blocks.prefix_map.is_visible
    assert not visible(target, writer.session_number)
    assert not visible(target, reader.session_number)
    world.run(writer, **executed(writer))
    assert visible(target, reader.session_number)
    assert world.host.uses == []


def in_flight(world: HostWorld) -> tuple[Session, Session, list[BlockId]]:
    """A session whose step copies blocks [4, 3, 2, 1], another one, and the targets."""
    copier, other = world.open(), world.open()
    world.fill(copier, "aaaa")
    world.admit(copier, 50, "bbbb", PROMPT, **executed(copier))
    (use,) = world.host.uses
    assert use.sources == [4, 3, 2, 1]
    return copier, other, use.block_ids


def test_a_source_that_another_session_takes_before_leaves_no_copy(world: HostWorld) -> None:
    copier, other, targets = in_flight(world)
    world.admit(other, 1, "cdefghijk", 10 * BLOCK_SIZE)  # the last block that it takes is 4
    assert [world.pool.blocks.block_hash(each) is None for each in targets] == [True, False, False, False]
    assert world.host.uses[0].block_ids == targets  # the copy may be writing there
    world.check()
    world.run(copier, **executed(copier))
    assert world.host.num_free == world.host.num_blocks
    world.check()


def test_a_source_that_the_same_session_takes_leaves_its_copy(world: HostWorld) -> None:
    copier, _, targets = in_flight(world)
    world.admit(copier, 51, "cdefghijk", 10 * BLOCK_SIZE)
    world.run(copier, **executed(copier))
    assert None not in [world.pool.blocks.block_hash(each) for each in targets]


def test_a_session_that_dies_leaves_no_copy_that_may_be_half_made(world: HostWorld) -> None:
    copier, _, targets = in_flight(world)
    world.allocator.evict_session("m", copier.session_number, 0.0, quarantine_seconds=5.0)
    assert [world.pool.blocks.block_hash(each) for each in targets] == [None] * 4
    assert world.host.num_free == world.host.num_blocks - 4
    world.check()
    world.allocator.end_quarantine("m", [copier.session_number])
    assert world.host.num_free == world.host.num_blocks
    world.check()


def test_a_session_that_closes_releases_its_copies(world: HostWorld) -> None:
    copier, _, targets = in_flight(world)
    world.allocator.close_session(copier.session_id, 0.0)
    assert world.host.num_free == world.host.num_blocks
    assert [world.pool.blocks.block_hash(each) for each in targets] == [None] * 4
    world.check()


def test_the_steps_of_a_session_that_reports_none_have_run_before_the_next_one(world: HostWorld) -> None:
    session = world.open()
    world.admit(session, 1, "aaaa", PROMPT)
    for number, content in ((2, "bbbb"), (3, "cccc"), (4, "dddd")):
        world.free(session, number - 1)
        world.admit(session, number, content, PROMPT)
        world.check()
        assert {use.sequence for use in world.host.uses} <= {session.sequence}


def test_a_session_that_stops_to_report_execution_holds_no_host_memory_for_long(world: HostWorld) -> None:
    session = world.open()
    world.admit(session, 1, "aaaa", PROMPT)
    world.free(session, 1, executed=1)
    for number, content in enumerate("bcdefg", 2):
        world.admit(session, number, content * 4, PROMPT)
        world.free(session, number)
    assert world.host.uses
    assert session.waits_since_seconds == 0.0
    world.run(session, executed=session.sequence)
    assert (world.host.uses, session.waits_since_seconds) == ([], inf)


def test_a_session_that_stops_to_report_leaves_host_memory_to_others() -> None:
    world = HostWorld(num_host_blocks=400)
    silent, other = world.open(), world.open()
    world.admit(silent, 1, "aaaa", PROMPT)
    world.free(silent, 1, executed=1, launched_sequence=1)
    for number in range(2, 3 * MAX_UNREPORTED):
        world.admit(silent, number, chr(0x100 + number) * 4, PROMPT)
        world.free(silent, number)
        world.serve(other, chr(0x1000 + number) * 4)
    assert sum(use.session_number == silent.session_number for use in world.host.uses) == MAX_UNREPORTED
    assert silent.waits_since_seconds == 0.0
    assert world.host.num_free > 0
    assert MAX_UNREPORTED * MAX_CLEANED <= MAX_PART_BLOCKS, "its end or report releases at most what one turn frees"
    copied = world.host.counters.copied_out_blocks
    world.fill(other, "bbbb", "cccc", "dddd")
    assert world.host.counters.copied_out_blocks > copied


def test_copies_that_are_read_and_written_are_not_replaced() -> None:
    world = HostWorld(num_host_blocks=4)
    session = world.open()
    world.fill(session, "aaaa", "bbbb", "cccc", "dddd", "eeee")
    kept = world.host.uses
    assert kept == []
    for number, content in enumerate("fghij", 50):  # none of these steps is executed
        world.admit(session, number, content * 4, 2 * BLOCK_SIZE)
        used = [block_id for use in world.host.uses for block_id in use.block_ids]
        assert len(used) == len(set(used)) <= 4
        world.check()


def test_the_blocks_of_host_memory_that_were_copied_least_recently_are_replaced() -> None:
    world = HostWorld(num_host_blocks=8)
    session = world.open()
    world.fill(session, *(each * 4 for each in "abcdefgh"))
    assert world.host.counters.evicted_blocks > 0
    assert sum(world.host.num_cached) == 8
    assert hit_tokens(world.serve(session, "aaaa")) == 0
    world.check()


def test_a_hit_in_host_memory_keeps_it_there_for_longer() -> None:
    world = HostWorld(num_host_blocks=20)
    session = world.open()
    world.fill(session, *(each * 4 for each in "abcdef"))
    assert in_host_memory(world).keys() >= {*names("aaaa"), *names("bbbb")}
    assert hit_tokens(world.serve(session, "aaaa")) == PROMPT - BLOCK_SIZE
    world.serve(session, "gggg")
    assert in_host_memory(world).keys() >= {*names("aaaa")[:3]}
    assert in_host_memory(world).keys().isdisjoint(names("bbbb"))


def in_host_memory(world: HostWorld) -> Counter[BlockHash]:
    """The hashes that blocks of host memory have, each with their number."""
    first = world.pool.config.num_blocks
    hashes = (world.pool.blocks.block_hash(BlockId(first + i)) for i in range(world.host.num_blocks))
    return Counter(each for each in hashes if each is not None)


def test_an_allocation_with_a_promised_hit_answers_it_with_the_blocks_of_the_copies(world: HostWorld) -> None:
    session = world.open()
    world.fill(session, *(each * 4 for each in "abcdef"))
    promise = world.declare(session, Operation.LOOKUP, 50, "aaaa", PROMPT, **executed(session))
    assert (promise.block_ids, promise.num_host_hit_tokens) == ([21, 20, 19], [3 * BLOCK_SIZE])
    result = world.allocate(session, 50, PROMPT - hit_tokens(promise), hit=[promise.block_ids], **executed(session))
    assert (result.num_prefix_blocks, result.num_new_blocks) == ([3], [1])
    assert copies_of(result)[:3] == list(zip((21, 20, 19), result.block_ids[:3], strict=True))
    assert session.by_number[RequestNumber(50)].tables[0].block_ids == result.block_ids
    assert world.pool.stats.host_hits_tokens == 3 * BLOCK_SIZE
    world.check()


def test_a_promised_block_that_is_gone_is_answered_as_a_changed_hit(world: HostWorld) -> None:
    session = world.open()
    world.fill(session, *(each * 4 for each in "abcdef"))
    world.declare(session, Operation.LOOKUP, 50, "aaaa", PROMPT, **executed(session))
    world.run(session, Operation.EVICT, num_block_ids=[1], block_ids=[19])
    result = world.allocate(session, 50, PROMPT, hit=[[21, 20, 19]])
    assert (result.outcomes, result.block_ids, result.copied_block_ids) == ([Outcome.HIT_CHANGED], [21, 20], [])
    world.check()


def test_a_promised_hit_neither_prevents_a_reset_nor_survives_it(world: HostWorld) -> None:
    session = world.open()
    world.fill(session, *(each * 4 for each in "abcdef"))
    promise = world.declare(session, Operation.LOOKUP, 50, "aaaa", PROMPT, **executed(session))
    assert world.run(session, Operation.RESET).outcomes == []
    result = world.allocate(session, 50, PROMPT, hit=[promise.block_ids])
    assert (result.outcomes, result.block_ids, result.copied_block_ids) == ([Outcome.HIT_CHANGED], [], [])
    world.check()


def test_an_admission_without_room_for_the_copies_changes_nothing(world: HostWorld) -> None:
    session = world.open()
    world.fill(session, *(each * 4 for each in "abcdef"))
    world.admit(session, 50, "x", 14 * BLOCK_SIZE, **executed(session))
    world.run(session, **executed(session))
    before = world.snapshot()
    result = world.admit(session, 51, "aaaa", PROMPT, **executed(session))
    assert (result.outcomes, result.copied_block_ids) == ([Outcome.NO_BLOCKS], [])
    assert world.snapshot()[:4] == before[:4]  # type: ignore[index]  # a tuple
    assert world.host.uses == []
    world.check()


def test_a_block_that_is_evicted_by_name_loses_its_copy_too(world: HostWorld) -> None:
    session = world.open()
    world.fill(session, "aaaa", "bbbb")
    assert world.pool.blocks.block_hash(BlockId(21)) is not None
    world.run(session, Operation.EVICT, num_block_ids=[1], block_ids=[1])
    assert world.pool.blocks.block_hash(BlockId(21)) is None
    world.run(session, Operation.EVICT, num_block_ids=[2], block_ids=[20, 49])
    assert world.pool.blocks.block_hash(BlockId(20)) is None
    assert world.pool.blocks.block_hash(BlockId(2)) is not None
    world.check()


def test_a_block_beyond_host_memory_is_refused(world: HostWorld) -> None:
    session = world.open()
    before = world.snapshot()
    with pytest.raises(InvalidArgumentError, match=r"50 is not in \[1, 49\]") as caught:
        world.run(session, Operation.EVICT, num_block_ids=[1], block_ids=[50])
    assert caught.value.field == "block_ids[0]"
    assert world.snapshot() == before


def test_a_reset_empties_both_tiers_and_a_copy_under_way_is_not_published(world: HostWorld) -> None:
    session = world.open()
    world.fill(session, "aaaa", "bbbb", "cccc")
    world.admit(session, 50, "dddd", PROMPT, **executed(session))
    world.free(session, 50, launched_sequence=session.sequence)
    assert world.host.uses
    assert world.run(session, Operation.RESET, launched_sequence=session.sequence).outcomes == []
    assert sum(world.host.num_cached) == 0
    world.check()
    world.run(session, **executed(session))
    assert (sum(world.host.num_cached), world.host.num_free) == (0, world.host.num_blocks)
    assert hit_tokens(world.serve(session, "aaaa")) == 0


@pytest.mark.parametrize("ends", [Operation.FREE, Operation.PREEMPT])
def test_copies_are_under_way_beyond_the_end_of_their_request_and_a_reset(ends: Operation, world: HostWorld) -> None:
    session = world.open()
    world.fill(session, *(each * 4 for each in "abcdef"))
    copies = copies_of(world.admit(session, 50, "aaaa", PROMPT, **executed(session)))
    used = {block_id for copy in copies for block_id in copy if block_id >= FIRST_HOST}
    assert used >= {19, 20, 21}
    world.run(session, ends, request_numbers=[50], launched_sequence=session.sequence)
    assert world.run(session, Operation.RESET, launched_sequence=session.sequence).outcomes == []
    assert {block_id for use in world.host.uses for block_id in use.block_ids} == used
    counters = world.info().host_memory
    assert counters.used_blocks == len(used)
    world.check()
    world.run(session, **executed(session))
    assert (world.host.num_free, in_host_memory(world)) == (world.host.num_blocks, {})
    assert world.host.counters.copied_in_blocks == counters.copied_in_blocks == 3
    world.check()


def test_a_new_epoch_empties_both_tiers_and_counters_continue(world: HostWorld) -> None:
    session = world.open()
    world.fill(session, "aaaa", "bbbb", "cccc")
    world.pool.begin_epoch(world.pool.config, 2)
    assert (sum(world.host.num_cached), world.host.uses) == (0, [])
    assert world.host.counters.copied_out_blocks > 0


def test_sessions_of_another_namespace_or_version_do_not_find_a_copy(world: HostWorld) -> None:
    session = world.open(namespace=b"one")
    world.fill(session, *(each * 4 for each in "abcdef"))
    assert hit_tokens(world.serve(world.open(namespace=b"two"), "aaaa")) == 0
    assert hit_tokens(world.serve(session, "aaaa")) > 0
    world.allocator.set_weights_version(session, "2")
    assert hit_tokens(world.serve(session, "aaaa")) == 0
    world.check()


def test_a_restored_pool_goes_on_as_the_pool_itself(world: HostWorld) -> None:
    session = world.open()
    world.fill(session, *(each * 4 for each in "abcdef"))
    world.admit(session, 50, "aaaa", PROMPT, **executed(session))
    snapshot = pool_snapshot(world.pool)
    restored = restored_pool(snapshot, None)
    end_pool_snapshot(world.pool)
    other = HostWorld()
    other.allocator.pools.remove(other.pool)
    other.allocator.pools.add(restored)
    other.allocator.sessions.restore(other.allocator.pools, [])
    other.pool, (twin,) = restored, restored.sessions.values()
    other.check()
    both = ((world, session), (other, twin))
    for number, content in enumerate("ghiabjklmbcn", 51):
        first, second = (each.admit(of, number, content * 4, PROMPT) for each, of in both)
        assert first == second
        first, second = (each.free(of, number, **executed(of)) for each, of in both)
        assert first == second
    assert other.host.counters == world.host.counters
    assert world.host.counters.copied_in_blocks > 0


@pytest.mark.parametrize(
    "specs",
    [
        (FullAttentionSpec(BLOCK_SIZE), SlidingWindowSpec(BLOCK_SIZE, sliding_window=6)),
        (FullAttentionSpec(BLOCK_SIZE), MambaSpec(BLOCK_SIZE, only_step_ends=True)),
    ],
    ids=["window", "states"],
)
def test_groups_of_hybrids_are_found_together(specs: Any) -> None:
    world = HostWorld(24, 64, specs=specs)
    session = world.open()
    for content in "abcdefghi":
        world.serve(session, content * 4, PROMPT + 1, num_later=1)
    hit = world.serve(session, "aaaa", PROMPT + 1)
    assert hit_tokens(hit) == PROMPT
    assert set(hit.copied_block_ids[::3]) == {0, 1}


FULL, HALF = FullAttentionSpec(BLOCK_SIZE), FullAttentionSpec(BLOCK_SIZE // 2)
WINDOW, STATES = SlidingWindowSpec(BLOCK_SIZE, sliding_window=6), MambaSpec(BLOCK_SIZE, only_step_ends=True)


@pytest.mark.parametrize(
    ("specs", "options", "num_copied"),
    [
        ((FULL,), {"use_eagle": True}, {0: 3}),
        ((FULL, WINDOW), {"use_eagle": True}, {0: 3, 1: 2}),
        ((FULL, WINDOW), {"retention_tokens": 0}, {0: 4, 1: 2}),
        ((HALF,), {"dcp_world_size": 2}, {0: 4}),
        ((HALF, STATES), {"dcp_world_size": 2}, {0: 4, 1: 1}),
        ((FULL, CircularBufferSpec(BLOCK_SIZE)), {}, {0: 4}),
    ],
    ids=["drafts", "drafts_and_a_window", "a_sparse_window", "context_parallel", "and_states", "a_ring"],
)
def test_what_was_hit_before_its_eviction_is_hit_after_it(
    specs: Any, options: dict[str, Any], num_copied: dict[int, int]
) -> None:
    world = HostWorld(18 * len(specs), 48 * len(specs), specs=specs, enable_events=True, **options)
    session = world.open()
    serve = partial(world.serve, session, num_tokens=PROMPT + 1, num_later=1)
    serve("aaaa")
    before = serve("aaaa")
    for content in "bcdefghijk":
        serve(content * 4)
    after = serve("aaaa")
    assert after.num_hit_tokens == before.num_hit_tokens
    copies = copies_of(after)
    is_from_host = [world.host.contains(BlockId(source)) for source, _ in copies]
    assert Counter(compress(after.copied_block_ids[::3], is_from_host)) == num_copied
    assert NULL_BLOCK not in {block_id for copy in copies for block_id in copy}
    stored = [e for e in of_host_memory(world.pool.blocks.take_events()) if isinstance(e, BlockStored)]
    assert {(event.group_id, event.block_size) for event in stored} == {(i, BLOCK_SIZE) for i in num_copied}


def test_a_hit_that_ends_within_a_block_of_host_memory_is_copied_to_the_block_that_continues_it() -> None:
    specs = (FullAttentionSpec(16), MambaSpec(16, only_step_ends=True))
    world = HostWorld(12, 32, specs=specs, prefix_match_unit=4, partial_hits=True)
    session = world.open()
    for number, content in enumerate(("abc", *map(str, range(5))), 1):
        world.admit(session, number, content, 14, num_new_tokens=[12], **executed(session))
        world.allocate(session, number, 2, **executed(session))
        world.free(session, number, **executed(session))
        world.check()
    result = world.admit(session, 9, "abc", 14, num_new_tokens=[2], **executed(session))
    assert result.num_hit_tokens == [12]
    assert max(result.block_ids) < 12
    tables = [table.block_ids for table in session.by_number[RequestNumber(9)].tables]
    assert {target for source, target in copies_of(result) if source >= 12} == {table[-1] for table in tables}
    world.check()
    world.free(session, 9, **executed(session))
    world.check()


@pytest.mark.parametrize(
    ("options", "most"), [({"num_host_blocks": 2**31}, 2**31 - 1), ({"num_host_blocks": 1, "enable_caching": False}, 0)]
)
def test_a_number_of_host_blocks_is_checked(options: dict[str, Any], most: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"not in \[0, {most}\]") as caught:
        config(**options).check()
    assert caught.value.field == "config.num_host_blocks"


def test_the_picture_of_a_pool_shows_host_memory(world: HostWorld) -> None:
    session = world.open()
    world.fill(session, "aaaa", "bbbb")
    info = world.info()
    assert (info.cached_blocks, info.groups[0].cached_blocks, info.host_memory.cached_blocks) == (8, 8, 4)
    assert info.host_memory.copied_out_blocks == 4
    assert not World(NUM_BLOCKS).info().HasField("host_memory")
    assert HostCounters(4) == world.host.counters


def event_world(**options: Any) -> tuple[HostWorld, Session]:
    """A pool with events, and a session whose newest step copies the blocks of "aaaa"; earlier events are taken."""
    world = HostWorld(enable_events=True, **options)
    session = world.open()
    world.serve(session, "aaaa")
    world.admit(session, 50, "bbbb", PROMPT, token_ids=list(range(PROMPT)), **executed(session))
    events = world.pool.blocks.take_events()
    assert {event.medium for event in events if not isinstance(event, AllBlocksCleared)} == {Medium.FIRST_TIER}
    assert len(world.host.uses[0].sources) == 4
    return world, session


def names(content: str) -> tuple[BlockHash, ...]:
    joined = block_hashes(content, len(content))
    return tuple(BlockHash(joined[i : i + 32]) for i in range(0, len(joined), 32))


def of_host_memory(events: list[BlockEvent]) -> list[BlockEvent]:
    return [e for e in events if not isinstance(e, AllBlocksCleared) and e.medium is Medium.HOST_MEMORY]


def test_a_copy_is_named_by_an_event_when_its_step_is_executed() -> None:
    world, session = event_world()
    assert not any(each in names("aaaa") for _, each in listed_by_snapshot(world, Medium.HOST_MEMORY))
    world.executed(session)
    (stored,) = world.pool.blocks.take_events()
    tokens = array("I", range(PROMPT))
    assert stored == BlockStored(names("aaaa"), None, tokens, BLOCK_SIZE, None, GroupId(0), medium=Medium.HOST_MEMORY)
    assert listed_by_snapshot(world, Medium.HOST_MEMORY) == {(0, each) for each in names("aaaa")}


def test_a_copy_has_the_adapter_of_its_contents() -> None:
    world = HostWorld(enable_events=True)
    session = world.open()
    for number, name in enumerate(("adapter", ""), 1):
        tokens = list(range(PROMPT))
        world.admit(session, number, name[:1] * 4, PROMPT, token_ids=tokens, lora_names=[name], **executed(session))
        world.free(session, number, **executed(session))
    (stored,) = of_host_memory(world.pool.blocks.take_events())
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.lora_name) == (names("aaaa"), "adapter")


def listed_by_snapshot(world: HostWorld, medium: Medium) -> set[tuple[int, BlockHash]]:
    """What a snapshot lists of a tier; both tiers are what events have announced."""
    cursor, stored = SnapshotCursor(world.pool), list[BlockStored]()
    while not cursor.is_done:
        stored += cursor.next_chunk(3)
    assert {(run.group_id, each) for run in stored for each in run.block_hashes} == announced(world.pool)
    return {(run.group_id, each) for run in stored if run.medium is medium for each in run.block_hashes}


def test_a_copy_whose_source_was_evicted_meanwhile_is_named_by_the_contents_of_then() -> None:
    world, session = event_world()
    tokens = list(range(100, 100 + 10 * BLOCK_SIZE))
    world.admit(session, 51, "cdefghijkl", 10 * BLOCK_SIZE, token_ids=tokens)
    removed = [event for event in world.pool.blocks.take_events() if isinstance(event, BlockRemoved)]
    assert [event.block_hash for event in removed] == [names("aaaa")[3]]
    assert removed[0] == BlockRemoved(names("aaaa")[3], GroupId(0))
    world.executed(session)
    stored = of_host_memory(world.pool.blocks.take_events())
    assert stored[0] == BlockStored(
        names("aaaa"), None, array("I", range(PROMPT)), BLOCK_SIZE, None, GroupId(0), medium=Medium.HOST_MEMORY
    )


@pytest.mark.parametrize("way", ["taken", "died", "closed", "evicted", "weights", "reset"])
def test_a_copy_that_is_lost_before_it_is_published_makes_no_event(way: str) -> None:
    world, session = event_world()
    targets = world.host.uses[0].block_ids
    match way:
        case "taken":
            tokens = list(range(12 * BLOCK_SIZE))
            world.admit(world.open(), 1, "cdefghijklmn", 12 * BLOCK_SIZE, token_ids=tokens)
        case "died":
            world.allocator.evict_session("m", session.session_number, 0.0, quarantine_seconds=5.0)
            world.allocator.end_quarantine("m", [session.session_number])
        case "closed":
            world.allocator.close_session(session.session_id, 0.0)
        case "evicted":
            world.run(session, Operation.EVICT, num_block_ids=[4], block_ids=targets)
        case "weights":
            world.allocator.set_weights_version(session, "2")
        case "reset":
            world.free(session, 50, launched_sequence=session.sequence)
            assert world.run(session, Operation.RESET, launched_sequence=session.sequence).outcomes == []
    lost = [each for each in targets if world.pool.blocks.block_hash(each) is None]
    if session.session_number in world.pool.sessions:
        world.executed(session)
    assert len(lost) == (3 if way == "taken" else 4)
    events = of_host_memory(world.pool.blocks.take_events())
    assert [len(event.block_hashes) for event in events if isinstance(event, BlockStored)] == [1] * (4 - len(lost))
    world.check()
    assert not [event for event in events if isinstance(event, BlockRemoved)]


def test_copies_are_counted_by_tier() -> None:
    world, session = event_world()
    world.executed(session)
    world.pool.blocks.take_events()
    first, (host,) = names("aaaa")[0], world.host.copies_of([BlockId(1)])
    world.pool.blocks.evict_blocks([BlockId(1)])
    assert world.pool.blocks.take_events() == [BlockRemoved(first, GroupId(0), 0)]
    world.pool.blocks.evict_blocks([host])
    assert world.pool.blocks.take_events() == [BlockRemoved(first, GroupId(0), 0, Medium.HOST_MEMORY)]


def test_a_promotion_stores_the_blocks_in_the_first_tier_again() -> None:
    world, session = event_world()
    world.executed(session)
    world.free(session, 50)
    world.pool.blocks.evict_blocks([BlockId(i) for i in range(1, 5)])
    world.pool.blocks.take_events()
    assert hit_tokens(world.serve(session, "aaaa")) == 3 * BLOCK_SIZE
    promoted, computed, *_ = (e for e in world.pool.blocks.take_events() if isinstance(e, BlockStored))
    tokens = array("I", range(PROMPT))
    assert promoted == BlockStored(names("aaaa")[:3], None, tokens[:12], BLOCK_SIZE, None, GroupId(0))
    assert computed == BlockStored(names("aaaa")[3:], names("aaaa")[2], tokens[12:], BLOCK_SIZE, None, GroupId(0))
    assert announced(world.pool) >= {(0, each) for each in names("aaaa")}


def test_the_eviction_from_host_memory_is_an_event() -> None:
    world = HostWorld(num_host_blocks=8, enable_events=True)
    session = world.open()
    for content in "abcdefgh":
        world.serve(session, content * 4)
    events = of_host_memory(world.pool.blocks.take_events())
    removed = [event.block_hash for event in events if isinstance(event, BlockRemoved)]
    assert len(removed) == world.host.counters.evicted_blocks > 0
    stored = [each for event in events if isinstance(event, BlockStored) for each in event.block_hashes]
    left = Counter(each for _, each in listed_by_snapshot(world, Medium.HOST_MEMORY))
    assert Counter(stored) - Counter(removed) == left


def test_a_reset_and_an_epoch_clear_both_tiers_with_one_event() -> None:
    world, session = event_world()
    world.executed(session)
    world.free(session, 50)
    world.pool.blocks.take_events()
    assert world.pool.reset_prefix_cache()
    assert world.pool.blocks.take_events() == [AllBlocksCleared()]
    assert announced(world.pool) == set()
    world.pool.begin_epoch(world.pool.config, 2)
    assert world.pool.blocks.take_events() == [AllBlocksCleared()]


@pytest.mark.parametrize("is_published", [False, True])
def test_a_restored_pool_makes_the_same_events(is_published: bool) -> None:  # noqa: FBT001 - a parameter
    world, session = event_world()
    if is_published:
        world.executed(session)
        world.pool.blocks.take_events()
    restored = restored_pool(pool_snapshot(world.pool), None)
    end_pool_snapshot(world.pool)
    assert announced(restored) == announced(world.pool)
    events = []
    for pool in (world.pool, restored):
        mark_executed(pool, pool.sessions[session.session_number], session.sequence)
        pool.blocks.evict_blocks([BlockId(i) for i in range(1, pool.config.num_ids)])
        events.append(pool.blocks.take_events())
    assert events[0] == events[1]
    assert len(of_host_memory(events[0])) == (4 if is_published else 5)


def test_hashes_within_blocks_and_of_tails_are_named_in_both_tiers() -> None:
    specs = (FullAttentionSpec(16), MambaSpec(16, only_step_ends=True))
    options = {"specs": specs, "prefix_match_unit": 4, "partial_hits": True, "enable_events": True}
    world = HostWorld(12, 32, **options)
    session, index = world.open(), PrefixIndex()
    for number, content in enumerate(("abc", *map(str, range(5)), "abc", "abc"), 1):
        tokens = list(range(14))
        world.admit(session, number, content, 14, num_new_tokens=[12], token_ids=tokens, **executed(session))
        computed = session.by_number[RequestNumber(number)].num_computed_tokens
        if computed < 14:
            world.allocate(session, number, 14 - computed, **executed(session))
        world.free(session, number, **executed(session))
        world.check()
        index.apply(EventBatch(number, tuple(world.pool.blocks.take_events())))
        assert index.entries(Medium.HOST_MEMORY) == listed_by_snapshot(world, Medium.HOST_MEMORY)
        assert index.entries(Medium.FIRST_TIER) == listed_by_snapshot(world, Medium.FIRST_TIER)
    assert {(GroupId(i), each) for i in range(2) for each in names("abc")[2:]} <= index.entries(Medium.HOST_MEMORY)
    assert (GroupId(0), names("abc")[0]) in index.entries(Medium.HOST_MEMORY)
