"""Rules of sharing between two sessions of one pool."""

from kvpool.core.ids import BlockId
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Outcome, StepResult
from support.core import World

LOOKUP, ADMIT, ALLOCATE = Operation.LOOKUP, Operation.ADMIT, Operation.ALLOCATE


def lookup(world: World, session: Session, number: int, content: str) -> StepResult:
    """Declares a request that ends one token after its content, and looks it up."""
    return world.declare(session, LOOKUP, number, content, 4 * len(content) + 1)


def allocate(world: World, session: Session, number: int, hit_blocks: list[int], executed: int = 0) -> StepResult:
    return world.allocate(session, number, 1, hit=[hit_blocks], executed=executed)


# Rule 1: look it up, then lose it.


def test_a_hit_that_is_still_cached_is_allocated(world: World, one: Session, other: Session) -> None:
    world.admit(one, 1, "abc", 13)
    world.run(one, Operation.FREE, executed=1, request_numbers=[1])
    hit_blocks = lookup(world, other, 1, "abc").block_ids
    result = allocate(world, other, 1, hit_blocks)
    assert (hit_blocks, result.outcomes, result.num_new_blocks) == ([1, 2, 3], [], [1])
    assert [world.pool.blocks.ref_cnt(BlockId(b)) for b in hit_blocks] == [1, 1, 1]


def test_a_completely_evicted_hit_is_answered_with_an_empty_hit(world: World, one: Session, other: Session) -> None:
    world.admit(one, 1, "abc", 13)
    world.run(one, executed=1)
    hit_blocks = lookup(world, other, 1, "abc").block_ids
    world.run(one, Operation.EVICT, num_block_ids=[3], block_ids=hit_blocks)
    free = list(world.pool.blocks.free_list)
    result = allocate(world, other, 1, hit_blocks)
    assert (result.outcomes, result.num_hit_tokens, result.block_ids) == ([Outcome.HIT_CHANGED], [], [])
    assert list(world.pool.blocks.free_list) == free
    assert allocate(world, other, 1, []).outcomes == []


def test_blocks_that_were_never_a_hit_are_not_allocated_as_one(world: World, one: Session, other: Session) -> None:
    world.admit(one, 1, "xyz", 13)
    world.run(one, executed=1)
    lookup(world, other, 1, "abc")
    for hit_blocks in ([1], [2, 1, 3], [4], [9]):
        assert allocate(world, other, 1, hit_blocks).outcomes == [Outcome.HIT_CHANGED]
    assert [world.pool.blocks.ref_cnt(BlockId(b)) for b in (1, 2, 3, 4, 9)] == [1, 1, 1, 1, 0]


def test_a_pending_block_of_another_session_cannot_be_part_of_a_hit(world: World, one: Session, other: Session) -> None:
    world.admit(one, 1, "abc", 13)
    lookup(world, other, 1, "abc")
    assert allocate(world, other, 1, [1, 2, 3]).outcomes == [Outcome.HIT_CHANGED]
    world.run(one, executed=1)
    assert allocate(world, other, 1, [1, 2, 3]).outcomes == []


def test_a_changed_hit_does_not_stop_later_operations(world: World, one: Session, other: Session) -> None:
    world.admit(one, 1, "abc", 13)
    lookup(world, other, 1, "abc")
    result = world.run(
        other, ALLOCATE, ADMIT, request_numbers=[1, 2], num_appended_tokens=[0, 3],
        num_new_tokens=[1, 0], num_block_ids=[1, 0], block_ids=[1], request_ids=["r2"],
    )  # fmt: skip
    assert (result.outcomes, result.num_new_blocks) == ([Outcome.HIT_CHANGED, Outcome.OK], [0, 1])


# Rule 2: cached, but not computed.


def test_a_freed_pending_block_stays_hidden_from_other_sessions(world: World, one: Session, other: Session) -> None:
    world.admit(one, 1, "abc", 13)
    world.free(one, 1)
    assert lookup(world, other, 1, "abc").num_hit_tokens == []
    assert lookup(world, one, 2, "abc").num_hit_tokens == [12]


def test_another_session_can_allocate_a_free_pending_block(world: World, one: Session, other: Session) -> None:
    world.admit(one, 1, "a", 4)
    world.run(one, Operation.FREE, request_numbers=[1])
    world.admit(other, 1, "x" * 19, 76)  # all blocks of the pool
    world.run(one, executed=2)
    assert world.pool.blocks.prefix_map.pending.of(other.session_number) != []
    assert lookup(world, one, 2, "xx").num_hit_tokens == []
    assert lookup(world, one, 3, "a").num_hit_tokens == []


def test_any_session_can_evict_a_pending_block(world: World, one: Session, other: Session) -> None:
    world.admit(one, 1, "abc", 13)
    world.run(other, Operation.EVICT, num_block_ids=[1], block_ids=[2])
    world.run(one, executed=1)
    assert lookup(world, other, 1, "abc").num_hit_tokens == [4]
