"""Paged inspection of sessions, requests and blocks."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from kvpool.core.errors import AbortedError, InvalidArgumentError, NotFoundError, WrongStateError
from kvpool.core.ids import BlockId
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation
from kvpool.core.views import inspection
from kvpool.core.views.inspection import BlockState, Page
from support.core import World
from support.refusals import refused

_T = TypeVar("_T")


def all_pages(look: Callable[[Page], tuple[list[_T], str]], size: int = 0) -> list[list[_T]]:
    """Returns all pages of a list."""
    infos, token = look(Page.of(size, ""))
    pages = [infos]
    while token:
        infos, token = look(Page.of(size, token))
        pages.append(infos)
    return pages


def declare(world: World, session: Session, count: int) -> None:
    """Declares requests without tokens."""
    world.declare_all(session, [Operation.APPEND] * count, "", 0)


def test_pages_list_each_session_once_while_others_open_and_end(world: World) -> None:
    opened = [world.open() for _ in range(7)]

    def look(page: Page) -> tuple[list[Any], str]:
        return inspection.page_of_sessions(world.allocator.sessions, page)

    assert [[s.session_number for _, s in page] for page in all_pages(look, 3)] == [[1, 2, 3], [4, 5, 6], [7]]
    first, token = look(Page.of(3, ""))
    world.allocator.close_session(opened[2].session_id, 0.0)
    world.allocator.close_session(opened[3].session_id, 0.0)
    world.open()
    rest, token = look(Page.of(100, token))
    assert ([s.session_number for _, s in first + rest], token) == ([1, 2, 3, 5, 6, 7, 8], "")


def test_a_page_of_sessions_ends_once_enough_requests_are_counted(world: World) -> None:
    for _ in range(3):
        declare(world, world.open(), inspection.MAX_COUNTED_REQUESTS)
    pages = all_pages(lambda page: inspection.page_of_sessions(world.allocator.sessions, page), 500)
    assert [[(s.session_number, len(s.requests)) for _, s in page] for page in pages] == [
        [(number, inspection.MAX_COUNTED_REQUESTS)] for number in (1, 2, 3)
    ]


def test_ten_thousand_requests_are_listed_once_each(world: World) -> None:
    for _ in range(2):
        declare(world, world.open(), 5000)
    pages = all_pages(lambda page: inspection.page_of_requests(world.sessions(), page), 499)
    assert [len(page) for page in pages] == [499] * 20 + [20]
    infos = [(request.session_number, request.request_id) for page in pages for request in page]
    assert infos == sorted((number, f"r{i}") for number in (1, 2) for i in range(1, 5001))


def test_a_page_continues_after_a_request_and_a_session_that_ended(world: World) -> None:
    first, second = world.open(), world.open()
    declare(world, first, 4)
    declare(world, second, 2)
    _, token = inspection.page_of_requests(world.sessions(), Page.of(2, ""))
    world.free(first, 2)
    infos, end = inspection.page_of_requests(world.sessions(), Page.of(100, token))
    assert [(r.session_number, r.request_id) for r in infos] == [(1, "r3"), (1, "r4"), (2, "r1"), (2, "r2")]
    world.allocator.evict_session("m", first.session_number, 0.0)
    infos, end = inspection.page_of_requests(world.sessions(), Page.of(100, token))
    assert ([(r.session_number, r.request_id) for r in infos], end) == ([(2, "r1"), (2, "r2")], "")


def test_blocks_are_listed_by_state(world: World) -> None:
    session, other = world.open(), world.open()
    world.admit(session, 1, "abc", 12)
    world.admit(other, 1, "xy", 10, executed=0)
    world.run(session, Operation.FREE, request_numbers=[1], executed=1)
    (listed,) = all_pages(lambda page: inspection.page_of_blocks(world.pool, None, page))
    assert listed == list(range(1, 20))
    by_state = {state: [b for b in listed if inspection.state_of(world.pool, b) is state] for state in BlockState}
    assert {state: len(blocks) for state, blocks in by_state.items()} == {
        BlockState.USED: 3, BlockState.CACHED: 3, BlockState.FREE: 13
    }  # fmt: skip
    for state, blocks in by_state.items():
        pages = all_pages(lambda page, state=state: inspection.page_of_blocks(world.pool, state, page), 2)  # type: ignore[misc]
        assert [block for page in pages for block in page] == blocks


def test_blocks_of_host_memory_follow_the_others() -> None:
    world = World(18, num_host_blocks=32)
    session = world.open()
    world.admit(session, 1, "abcd", 16)
    world.run(session, Operation.FREE, request_numbers=[1], executed=1)
    world.admit(session, 2, "efgh", 16, executed=2)  # copies the blocks of the first
    for state, blocks in ((BlockState.USED, 4), (BlockState.CACHED, 0), (BlockState.FREE, 28)):
        pages = all_pages(lambda page, state=state: inspection.page_of_blocks(world.pool, state, page), 7)  # type: ignore[misc]
        listed = [block for page in pages for block in page]
        assert len([block for block in listed if block >= 18]) == blocks
    (all_blocks,) = all_pages(lambda page: inspection.page_of_blocks(world.pool, None, page))
    assert all_blocks == list(range(1, 50))
    world.executed(session)
    assert inspection.page_of_blocks(world.pool, BlockState.CACHED, Page.of(0, "17")) == ([18, 19, 20, 21], "")


def test_a_page_scans_a_limited_number_of_blocks() -> None:
    looked_at = inspection.MAX_SCANNED_BLOCKS
    world = World(3 * looked_at)
    pages = all_pages(lambda page: inspection.page_of_blocks(world.pool, BlockState.USED, page), 500)
    assert pages == [[], [], []]
    world.admit(world.open(), 1, "abc", 12)
    pages = all_pages(lambda page: inspection.page_of_blocks(world.pool, BlockState.USED, page), 500)
    assert pages == [[1, 2, 3], [], []]
    last = inspection.page_of_blocks(world.pool, None, Page.of(5, str(3 * looked_at - 3)))
    assert last == ([3 * looked_at - 2, 3 * looked_at - 1], "")


@pytest.mark.parametrize("token", ["x", "-1", "1.5", ":", "٣", "9" * 21, "1" * 2000])
def test_a_malformed_page_token_is_refused(token: str, world: World) -> None:
    with pytest.raises(InvalidArgumentError, match="page_token"):
        inspection.page_of_blocks(world.pool, None, Page.of(0, token))
    with pytest.raises(InvalidArgumentError, match="page_token"):
        inspection.page_of_requests([], Page.of(0, token))


def test_a_token_from_beyond_the_end_ends_the_list(world: World) -> None:
    assert inspection.page_of_blocks(world.pool, None, Page.of(0, "9" * 20)) == ([], "")


def test_a_page_too_large_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="page_size: 501 is not in"):
        Page.of(501, "")


def test_an_evicted_session_frees_its_blocks_and_gets_an_error(world: World) -> None:
    session, other = world.open(), world.open()
    world.admit(session, 1, "abc", 12)
    world.admit(other, 1, "xy", 8)
    assert world.allocator.evict_session("m", session.session_number, 0.0)[1] is session
    assert (world.sessions(), world.pool.blocks.num_free_blocks) == ([other], 17)
    assert world.pool.blocks.prefix_map.block_hash(BlockId(1)) is None  # its step was never reported as executed
    assert world.pool.activity.evicted_sessions == 1
    with refused(AbortedError, reason="SESSION_EVICTED", match="operator"):
        world.allocator.sessions.find(session.session_id, 0.0)


def test_an_unknown_session_is_not_evicted(world: World, session: Session) -> None:
    before = (world.snapshot(), repr(world.pool.activity))
    for pool, number in (("m", session.session_number + 1), ("m", 0), ("other", session.session_number)):
        with pytest.raises(NotFoundError):
            world.allocator.evict_session(pool, number, 0.0)
    assert (world.snapshot(), repr(world.pool.activity)) == before


def test_a_pool_is_removed_only_without_sessions_and_its_name_is_free(world: World, session: Session) -> None:
    world.allocator.pools.drained.add(world.pool.config.name)
    before = (world.snapshot(), repr(world.allocator))
    with refused(WrongStateError, reason="POOL_IN_USE", match="sessions are open: 1"):
        world.allocator.remove_pool("m")
    assert (world.snapshot(), repr(world.allocator)) == before
    assert not world.allocator.pools.accepts_sessions(world.pool.config.name)
    world.allocator.close_session(session.session_id, 0.0)
    world.allocator.remove_pool("m")
    with pytest.raises(NotFoundError):
        world.allocator.remove_pool("m")
    pool, created = world.allocator.create_pool(world.pool.config, b"n" * 32)
    assert (created, pool is world.pool, world.allocator.pools.accepts_sessions(pool.config.name)) == (
        True,
        False,
        True,
    )


def test_a_message_lists_only_the_first_numbers() -> None:
    assert inspection.list_numbers([3, 4]) == "3, 4"
    assert inspection.list_numbers(list(range(40))).endswith("14, 15, ... (40 in all)")
