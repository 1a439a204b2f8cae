"""Rules 1 to 3 of free_list."""

from kvpool.server.core.free_list import FreeList
from kvpool.server.core.types import BlockId


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def test_starts_with_all_but_the_null_block() -> None:
    free = FreeList(4)
    assert (list(free), len(free)) == ([1, 2, 3], 3)


def test_takes_from_the_head_and_appends_at_the_tail_in_order() -> None:
    free = FreeList(6)
    assert free.take(2) == [1, 2]
    free.append(ids(2, 1))
    assert (list(free), len(free)) == ([3, 4, 5, 2, 1], 5)


def test_prepends_keeping_the_order() -> None:
    free = FreeList(6)
    free.take(3)
    free.prepend(ids(3, 1))
    assert list(free) == [3, 1, 4, 5]


def test_removes_from_anywhere() -> None:
    free = FreeList(6)
    for block_id in ids(3, 1, 5):
        free.remove(block_id)
    assert (list(free), len(free)) == ([2, 4], 2)


def test_survives_being_emptied() -> None:
    free = FreeList(3)
    assert free.take(2) == [1, 2]
    assert list(free) == []
    free.append(ids(2))
    free.prepend(ids(1))
    assert (list(free), free.take(2)) == ([1, 2], [1, 2])


def test_taking_or_adding_nothing_changes_nothing() -> None:
    free = FreeList(3)
    free.append([])
    free.prepend([])
    assert free.take(0) == []
    assert list(free) == [1, 2]
