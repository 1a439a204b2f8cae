"""Rules of parents_first: what waits for its parent, and until when."""

import pickle
from array import array
from dataclasses import replace

from kvpool.client.vllm.parents_first import ParentsFirst
from kvpool.core.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, Medium
from kvpool.core.ids import BlockHash, GroupId


def stored(names: str, parent: str = "", group: int = 0) -> BlockStored:
    """An event of a run of blocks of two tokens, each named by a letter."""
    tokens = array("I", [ord(name) for name in names for _ in range(2)])
    hashes = tuple(BlockHash(name.encode()) for name in names)
    ahead = array("I", map(ord, names))
    return BlockStored(hashes, BlockHash(parent.encode()) or None, tokens, 2, None, GroupId(group), ahead)


def removed(name: str, group: int = 0, copies_left: int = 0) -> BlockRemoved:
    return BlockRemoved(BlockHash(name.encode()), GroupId(group), copies_left)


def ordered(*events: BlockEvent) -> list[BlockEvent]:
    return list(ParentsFirst().ordered(events))


def test_events_in_order_are_unchanged() -> None:
    events: list[BlockEvent] = [
        stored("abc"),
        stored("de", "c"),
        stored("c", "b", 1),
        removed("c"),
        stored("d", "c", 1),
        removed("d", 1),
    ]
    assert ordered(*events) == events


def test_a_block_is_announced_after_its_parent_of_any_group() -> None:
    assert ordered(stored("cd", "b", 1), stored("ab")) == [stored("ab"), stored("c", "b", 1), stored("d", "c", 1)]


def test_a_block_of_a_run_whose_parent_is_known_does_not_wait() -> None:
    first = stored("abc")
    assert ordered(first, removed("a"), stored("bc", "a", 1)) == [first, removed("a"), stored("c", "b", 1)]


def test_a_further_copy_is_left_out_if_its_parent_is_gone() -> None:
    before: list[BlockEvent] = [stored("abc"), removed("a")]
    assert ordered(*before, stored("b", "a"), stored("bd", "a")) == [*before, stored("d", "b")]


def test_a_parent_that_was_removed_is_unknown_until_it_is_stored_again() -> None:
    events: list[BlockEvent] = [stored("ab"), removed("b"), stored("c", "b"), stored("b", "a")]
    assert ordered(*events) == [*events[:2], events[3], events[2]]
    copy: list[BlockEvent] = [stored("ab"), removed("b", copies_left=1), stored("c", "b")]
    assert ordered(*copy) == copy


def test_a_block_that_is_removed_while_it_waits_is_never_announced() -> None:
    waiting = [stored("c", "b"), stored("c", "b", 1)]
    events: list[BlockEvent] = [*waiting, removed("c", copies_left=1), removed("c"), stored("ab")]
    assert ordered(*events) == [stored("ab"), stored("c", "b", 1)]


def test_nothing_is_known_and_nothing_waits_after_all_blocks_are_cleared() -> None:
    events: list[BlockEvent] = [stored("a"), stored("d", "c"), AllBlocksCleared(), stored("b", "a"), stored("abc")]
    assert ordered(*events) == [stored("a"), AllBlocksCleared(), stored("abc"), stored("b", "a")]


def test_a_hash_is_announced_in_each_tier_apart() -> None:
    host = replace(stored("b", "a"), medium=Medium.HOST_MEMORY)
    events: list[BlockEvent] = [stored("ab"), host, removed("b"), stored("c", "b")]
    assert ordered(*events) == events, "the parent is in host memory"
    waiting: list[BlockEvent] = [host, stored("b", "a"), removed("b"), stored("a")]
    assert ordered(*waiting) == [stored("a"), host]
    gone: list[BlockEvent] = [*events[:3], replace(removed("b"), medium=Medium.HOST_MEMORY), stored("c", "b")]
    assert ordered(*gone) == gone[:-1]


def test_what_waits_and_is_removed_takes_no_memory() -> None:
    parents_first = ParentsFirst()
    for _ in range(3):
        assert list(parents_first.ordered([stored("cd", "b"), removed("c"), removed("d")])) == []
    assert pickle.dumps(parents_first) == pickle.dumps(ParentsFirst())
