"""Hits that end within blocks, and the copies that they need. Blocks of states have 16 tokens, hashes cover 4."""

from typing import Any

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import BlockId, RequestNumber
from kvpool.core.pools.snapshots import pool_snapshot, restored_pool
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.steps.columns import Operation, Outcome, StepResult
from support.core import World, block_hashes, opened
from support.integrity import check_integrity
from support.router import Router

STATES = MambaSpec(16, only_step_ends=True)
FULL = FullAttentionSpec(4)
LARGE = FullAttentionSpec(16)
PROMPT = 14
TAIL = 12


def world_of(*specs: Any, num_blocks: int = 20, **options: Any) -> tuple[World, Session]:
    return opened(num_blocks, specs=specs, prefix_match_unit=4, partial_hits=True, **options)


def admit(world: World, session: Session, number: int, *, content: str = "abc", **columns: Any) -> StepResult:
    """Admits a request up to the tail of its prompt, or what it hits and the rest."""
    return world.admit(session, number, content, PROMPT, num_new_tokens=[TAIL], **columns)


def go_on(world: World, session: Session, number: int, count: int = PROMPT - TAIL, **columns: Any) -> StepResult:
    return world.allocate(session, number, count, **columns)


def prompted(*specs: Any) -> tuple[World, Session]:
    """A world in which request 1 has computed its prompt."""
    world, session = world_of(*specs)
    admit(world, session, 1)
    go_on(world, session, 1)
    return world, session


def tables_of(session: Session, number: int) -> list[list[BlockId]]:
    return [table.block_ids for table in session.by_number[RequestNumber(number)].tables]


def hit_tokens(world: World, session: Session, number: int, **columns: Any) -> int:
    """Looks a new request up, and frees it."""
    result = world.declare(session, Operation.LOOKUP_UNCOUNTED, number, "abc", PROMPT, **columns)
    world.free(session, number)
    return sum(result.num_hit_tokens)


def test_the_step_after_a_cached_state_copies_it_and_the_copy_keeps_the_hash() -> None:
    world, session = world_of(FULL, STATES)
    assert admit(world, session, 1).block_ids == [1, 2, 3, 4]
    result = go_on(world, session, 1)
    assert (result.block_ids, result.copied_block_ids) == ([5], [1, 4, 6])
    assert tables_of(session, 1) == [[1, 2, 3, 5], [4]]
    result = admit(world, session, 2)
    assert (result.num_hit_tokens, result.block_ids) == ([TAIL], [1, 2, 3, 6, 7, 8])
    assert result.copied_block_ids == [1, 6, 8]
    assert tables_of(session, 2) == [[1, 2, 3, 7], [8]]


def test_other_sessions_find_a_state_that_is_overwritten_only_in_its_copy() -> None:
    world, writer = world_of(FULL, STATES)
    reader = world.open()
    admit(world, writer, 1)
    world.run(writer, executed=1)
    assert hit_tokens(world, reader, 1) == 0
    assert hit_tokens(world, writer, 2, executed=1) == TAIL
    go_on(world, writer, 1)
    assert hit_tokens(world, reader, 2) == 0
    world.run(writer, executed=writer.sequence)
    assert hit_tokens(world, reader, 3) == TAIL


def test_the_blocks_of_a_copy_are_held_until_its_step_is_launched() -> None:
    world, session = world_of(FULL, STATES)
    world.run(session)
    admit(world, session, 1, launched_sequence=1)
    go_on(world, session, 1, launched_sequence=2)
    world.free(session, 1)
    assert world.pool.blocks.num_free_blocks == 19 - 2
    assert world.pool.blocks.ref_cnt(BlockId(4)) == world.pool.blocks.ref_cnt(BlockId(6)) == 1
    world.run(session, launched_sequence=2)
    assert world.pool.blocks.num_free_blocks == 19 - 2
    world.run(session, launched_sequence=3)
    assert world.pool.blocks.num_free_blocks == 19


def test_a_session_that_reports_no_launched_steps_holds_them_for_a_step() -> None:
    world, session = prompted(FULL, STATES)
    assert world.pool.blocks.num_free_blocks == 19 - 6
    world.run(session)
    assert world.pool.blocks.num_free_blocks == 19 - 5


def test_a_refusal_for_lack_of_a_block_for_the_copy_changes_nothing() -> None:
    world, session = world_of(FULL, STATES, num_blocks=6)
    admit(world, session, 1)
    before = world.snapshot()
    result = go_on(world, session, 1)  # needs two, one is free
    assert (result.outcomes, result.copied_block_ids) == ([Outcome.NO_BLOCKS], [])
    assert world.pool.blocks.num_free_blocks == 1
    assert world.snapshot()[:4] == before[:4]  # type: ignore[index]  # a tuple


def test_the_end_of_a_session_frees_the_blocks_of_its_copies() -> None:
    world, session = prompted(FULL, STATES)
    world.free(session, 1)
    assert world.pool.blocks.num_free_blocks == 19
    admit(world, session, 2)
    world.allocator.close_session(session.session_id, 0.0)
    assert world.pool.blocks.num_free_blocks == 19


def test_a_request_without_a_prompt_has_no_tail() -> None:
    world, session = world_of(LARGE, STATES)
    world.run(session, Operation.APPEND, request_numbers=[1], request_ids=["r1"])
    hashes = block_hashes("abc", PROMPT // 4)
    grown = go_on(world, session, 1, PROMPT, num_appended_tokens=[PROMPT], block_hashes=hashes)
    assert grown.block_ids == [1, 2]
    world.run(session, Operation.CACHE, request_numbers=[1], num_new_tokens=[0])
    assert world.pool.blocks.num_free_blocks == 17


def test_a_named_hit_that_was_evicted_has_changed() -> None:
    world, session = prompted(LARGE, STATES)
    found = world.declare(session, Operation.LOOKUP, 2, "abc", PROMPT)
    assert (found.num_hit_tokens, found.block_ids) == ([TAIL], [1, 3])
    with pytest.raises(InvalidArgumentError, match="blocks of 16 tokens"):
        go_on(world, session, 2, num_block_ids=[1, 0], block_ids=[1])
    world.run(session, Operation.EVICT, num_block_ids=[1, 0], block_ids=[1])
    assert go_on(world, session, 2, num_block_ids=[1, 1], block_ids=found.block_ids).outcomes == [Outcome.HIT_CHANGED]


def test_a_restored_pool_has_the_hashes_of_tails_and_the_copies() -> None:
    world, session = world_of(LARGE, STATES)
    admit(world, session, 1)
    go_on(world, session, 1, num_appended_tokens=[4], block_hashes=block_hashes("abcd", 4)[-32:])  # whole blocks
    go_on(world, session, 1, 4)
    admit(world, session, 2)
    restored = restored_pool(pool_snapshot(world.pool), None)
    world.pool.blocks.end_snapshot()
    (copied,) = restored.sessions.values()
    assert list(copied.copies) == list(session.copies) != []
    assert sorted(restored.blocks.prefix_map.entries()) == sorted(world.pool.blocks.prefix_map.entries())
    assert len(list(restored.blocks.prefix_map.entries())) > len(restored.blocks.prefix_map)
    check_integrity(restored, [copied])
    assert all(request.copies is copied.copies for request in copied.requests.values())


@pytest.mark.parametrize(
    "specs", [(FULL, STATES), (LARGE, STATES), (LARGE, SlidingWindowSpec(4, sliding_window=5), STATES)]
)
def test_a_router_knows_each_parent_of_a_prefix_within_a_block(specs: Any) -> None:
    world, session = world_of(*specs, num_blocks=12, enable_events=True)
    router, scores = Router(4), set()
    for number, content in enumerate(("abc", "abd", "abc", "axy", "xyz", "abc"), 1):
        tokens = [ord(name) for name in content + "\n" for _ in range(4)][:PROMPT]
        admit(world, session, 2 * number, content=content, token_ids=tokens)
        go_on(world, session, 2 * number)
        world.run(session, Operation.FREE, executed=session.sequence, request_numbers=[2 * number])
        router.apply(world.pool.blocks.take_events())
        assert not router.num_lost
        probe = [ord(name) for name in "abc\n" for _ in range(4)][:PROMPT]
        score = router.score(probe)
        assert score >= hit_tokens(world, session, 2 * number + 1, token_ids=probe)
        scores.add(score)
    assert max(scores) == TAIL
