"""Rule 5 of free_list: the columns of a pool grow with the use of its blocks."""

import tracemalloc
from unittest.mock import Mock

import pytest

from kvpool.core.blocks import free_list
from kvpool.core.blocks.free_list import FreeList
from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.errors import ExhaustedError
from kvpool.core.ids import BlockId
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Outcome
from kvpool.core.views.inspection import BlockState, Page, page_of_blocks, state_of
from support.core import World, opened
from support.journal import assert_alike
from support.state import restored

MANY_BLOCKS = 2**24


@pytest.fixture
def _slow_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_list, "GROWTH_BLOCKS", 2)


def test_blocks_that_were_never_used_take_no_memory() -> None:
    tracemalloc.start()
    try:
        world, session = opened(MANY_BLOCKS)
        world.admit(session, 1, "abcd", 16)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert world.pool.blocks.num_free_blocks == MANY_BLOCKS - 5


def test_a_block_that_was_never_used_is_free_and_has_no_hash() -> None:
    world = World(MANY_BLOCKS)
    last = BlockId(MANY_BLOCKS - 1)
    assert (world.pool.blocks.ref_cnt(last), world.pool.blocks.block_hash(last)) == (0, None)
    assert page_of_blocks(world.pool, None, Page(2, str(last - 2))) == ([last - 1, last], "")
    assert state_of(world.pool, last) is BlockState.FREE


def test_a_client_may_name_blocks_that_were_never_used() -> None:
    world, session = opened(MANY_BLOCKS)
    last = MANY_BLOCKS - 1
    world.run(session, Operation.EVICT, request_numbers=[0], num_block_ids=[2], block_ids=[1, last])
    result = world.declare(
        session, Operation.ALLOCATE, 1, "ab", 8, num_new_tokens=[4], num_block_ids=[1], block_ids=[last]
    )
    assert result.outcomes == [Outcome.HIT_CHANGED]


@pytest.mark.usefixtures("_slow_growth")
def test_a_pool_goes_on_while_its_columns_grow(world: World, session: Session) -> None:
    for number in range(1, 7):
        world.admit(session, number, "abcdef"[number - 1], 12)
        assert_alike(world.allocator, restored(world.allocator))
    assert world.pool.blocks.num_free_blocks == 1


@pytest.mark.usefixtures("_slow_growth")
@pytest.mark.parametrize("column", [FreeList, PrefixMap])
def test_a_step_without_memory_is_refused_before_it_changes_anything(
    monkeypatch: pytest.MonkeyPatch, column: type[FreeList | PrefixMap]
) -> None:
    world, session = opened(20)
    world.admit(session, 1, "ab", 8)
    with monkeypatch.context() as patched:
        patched.setattr(column, "extend_columns", Mock(side_effect=MemoryError))
        with world.refuses(ExhaustedError, reason="OUT_OF_MEMORY", match="too little memory"):
            world.admit(session, 2, "xyz", 12)
    assert not any(world.admit(session, 2, "xyz", 12).outcomes)
