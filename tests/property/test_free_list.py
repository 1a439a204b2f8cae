"""A free list in chunks against one in a plain list, whatever is done to both."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.core.blocks import free_list
from kvpool.core.blocks.free_list import FreeList
from kvpool.core.ids import BlockId

NUM_BLOCKS = 40
SOME_BLOCKS = 2


class FreeLists(RuleBasedStateMachine):
    """Tables take, share and give back."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(free_list, "_SOME_BLOCKS", SOME_BLOCKS)
        self.patch.setattr(free_list, "MAX_EXTENDED_BLOCKS", 12)
        self.mine = FreeList(NUM_BLOCKS)
        self.free = list(range(1, NUM_BLOCKS))
        self.tables: list[list[BlockId]] = []

    def teardown(self) -> None:
        self.patch.undo()

    @property
    def counts(self) -> Counter[int]:
        return Counter(block_id for table in self.tables for block_id in table)

    @rule(data=st.data())
    def take(self, data: Any) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        self.tables.append(self.mine.take(count))
        assert self.tables[-1] == self.free[:count]
        del self.free[:count]

    @rule(block_ids=st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=12))
    def hold(self, block_ids: list[int]) -> None:
        found = [BlockId(i) for i in block_ids]
        assert self.mine.num_free_among(found) == sum(i in self.free for i in found)
        newly = set(found) & set(self.free)
        assert self.mine.hold(found) == len(newly)
        self.tables.append(found)
        self.free = [i for i in self.free if i not in newly]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), first=st.booleans())
    def give_back(self, data: Any, *, first: bool) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))[::-1]
        counts = self.counts
        last_seen = {block_id: i for i, block_id in enumerate(table)}
        freed = [b for i, b in enumerate(table) if not counts[b] and last_seen[b] == i]
        dropped = self.mine.drop(table)
        assert list(dropped) == freed
        if first:
            self.mine.prepend(dropped)
            self.free = freed + self.free
        else:
            self.mine.append(dropped)
            self.free += freed

    @invariant()
    def agree(self) -> None:
        counts = self.counts
        assert list(self.mine) == self.free
        assert len(self.mine) == len(self.free)
        assert [self.mine.ref_cnt(BlockId(i)) for i in range(NUM_BLOCKS)] == [counts[i] for i in range(NUM_BLOCKS)]
        assert self.mine.num_shared == sum(count > 1 for count in counts.values())
        for chunk in self.mine._chunks.values():
            assert 0 < chunk.num_free <= len(chunk.block_ids) - chunk.at
            assert len(chunk.block_ids) <= max(2 * chunk.num_free + SOME_BLOCKS, NUM_BLOCKS if chunk.at else 0)


TestFreeLists = FreeLists.TestCase
TestFreeLists.settings = settings(stateful_step_count=60)
