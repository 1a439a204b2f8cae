"""Rules 1 to 4 of free_list."""

import pytest

from kvpool.core.blocks import free_list
from kvpool.core.blocks.free_list import FreeList
from kvpool.core.ids import BlockId, SessionNumber, StepNumber


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def num_kept(free: FreeList) -> int:
    """Number of entries in all chunks, including skipped and taken ones."""
    return sum(len(chunk.block_ids) for chunk in free._chunks.values())


def test_starts_with_all_but_the_null_block() -> None:
    free = FreeList(4)
    assert (list(free), len(free)) == ([1, 2, 3], 3)
    assert [free.ref_cnt(BlockId(i)) for i in range(4)] == [0] * 4


def test_free_blocks_can_be_held_at_any_position() -> None:
    free = FreeList(6)
    assert free.hold(ids(3, 1, 5)) == 3
    assert (list(free), len(free)) == ([2, 4], 2)
    assert free.take(2) == [2, 4]


def test_counts_tables_and_shared_blocks() -> None:
    free = FreeList(6)
    free.take(3)
    assert free.hold(ids(1, 2, 4, 2)) == 1
    assert [free.ref_cnt(BlockId(i)) for i in range(6)] == [0, 2, 3, 1, 1, 0]
    assert (free.num_shared, free.num_free_among(ids(1, 4, 5, 5))) == (2, 2)
    assert free.drop(ids(4, 2, 1)) == [4]
    free.append(ids(4))
    assert free.drop(ids(2, 2, 1)) == [2, 1]
    free.append(ids(2, 1))
    assert (free.num_shared, list(free)) == (0, [5, 4, 2, 1])


def test_rule_2_a_block_that_is_hit_and_freed_again_is_last_and_occurs_once() -> None:
    free = FreeList(4)
    free.append(free.drop(free.take(3)))
    free.hold(ids(2))
    assert list(free) == [1, 3]
    free.append(ids(2))
    assert (list(free), len(free)) == ([1, 3, 2], 3)
    assert free.take(3) == [1, 3, 2]


def test_the_next_used_blocks_do_not_depend_on_skipped_entries() -> None:
    """A snapshot leaves those out, and a restored list must answer as the original does."""
    free = FreeList(8)
    free.append(free.drop(free.take(7)))
    free.hold(ids(1, 3))
    assert [free.next_used(count) for count in (0, 2, 4, 8)] == [[], [2, 4], [2, 4, 5, 6], [2, 4, 5, 6, 7]]


def test_rule_3_skipped_entries_do_not_accumulate() -> None:
    """A prefix is hit and freed repeatedly, while no block is taken."""
    free = FreeList(1001)
    free.append(free.drop(free.take(1000)))
    for i in range(2000):
        hit = ids(*range(1 + i % 900, 100 + i % 900))
        free.hold(hit)
        free.append(free.drop(hit))
        assert num_kept(free) <= 2 * len(free) + 8 * len(free._chunks)
    assert sorted(free) == list(range(1, 1001))


def test_a_large_chunk_is_not_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_list, "MAX_EXTENDED_BLOCKS", 3)
    free = FreeList(9)
    for block_id in free.take(8):
        free.append(free.drop([block_id]))
    assert (list(free), len(free._chunks)) == (list(range(1, 9)), 3)


def test_rule_3_ids_of_taken_blocks_are_not_kept() -> None:
    """Tables that are each one block shorter leave chunks of one block, from which blocks are taken last."""
    free = FreeList(401)
    for count in range(400, 0, -1):
        free.prepend(free.drop(free.take(count)))
        assert num_kept(free) <= 2 * len(free) + 8 * len(free._chunks)


def test_many_skipped_entries_are_skipped_at_once() -> None:
    free = FreeList(201)
    first, second = free.take(100), free.take(100)
    free.append(free.drop(first))
    free.append(free.drop(second))
    free.hold(first)
    assert free.take(1) == second[:1]


def test_what_the_user_holds_moves_to_the_front_in_order_until_there_is_enough() -> None:
    free = FreeList(10)
    free.take(6)
    for user, blocks in ((1, (1, 2)), (2, (3,)), (1, (4, 5))):
        free.user, free.until = SessionNumber(user), StepNumber(7)
        free.append(free.drop(ids(*blocks)))
    assert list(free) == [7, 8, 9, 1, 2, 3, 4, 5]
    assert [free.num_held_by(SessionNumber(i)) for i in (1, 2, 3)] == [4, 1, 0]
    assert free.num_held_among(ids(1, 3, 6, 7)) == 1
    free.put_own_first(2)
    assert list(free) == [1, 2, 7, 8, 9, 3, 4, 5]
    free.put_own_first(3)
    assert list(free) == [1, 2, 4, 5, 7, 8, 9, 3]
    free.append(free.drop(ids(6)))
    assert list(free)[-1] == 6, "not into a chunk that has moved"
    assert free.take(5) == [1, 2, 4, 5, 7]
    free.user = SessionNumber(3)
    free.put_own_first(1)
    assert list(free) == [8, 9, 3, 6]
