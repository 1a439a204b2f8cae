"""The blocks of a pool: which are free, who counts on which, and what each holds.

1. free + held = num_blocks - 1; the null block is neither.
2. ref_cnt of a block is the number of block tables that it stands in, 1 for a sink; it is free exactly when it is 0.
   See `FreeList`.
3. A free block keeps its hash, and so can be hit, until it is taken for something else.
"""

from collections.abc import Iterable, Sequence

from kvpool.core import ids
from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.block_contents import BlockContents
from kvpool.core.blocks.free_list import FreeList
from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from kvpool.core.ids import BlockHash, BlockId, GroupId, SessionNumber
from kvpool.core.specs.pool_config import PoolConfig, ReuseOrder
from kvpool.core.statistics import GroupCounters


class BlockPool:
    """Columns over all blocks, and what is done with them.

    Attributes:
        num_evicted: Cached blocks that were given up to make room, since the start.
        group_counters: What is counted of each group; kept by its manager, but for evictions.
        block_lifetimes: How long blocks keep what they hold; None if that is not sampled.
        free_list: The free blocks. Read it; change it through this class.
        prefix_map: The cached blocks. Read it; change it through this class.
        contents: What the cached blocks were stored with; None if the pool makes no events. Read it likewise.
    """

    __slots__ = (
        "_bare",
        "_events",
        "_uncached_first",
        "block_lifetimes",
        "contents",
        "free_list",
        "group_counters",
        "num_evicted",
        "prefix_map",
    )

    def __init__(self, config: PoolConfig, block_lifetimes: BlockLifetimes | None = None) -> None:
        self.free_list = FreeList(config.num_blocks)
        self.prefix_map = PrefixMap(config.num_blocks, len(config.groups))
        self.num_evicted = 0
        self.group_counters = [GroupCounters() for _ in config.groups]
        self.block_lifetimes = block_lifetimes
        self._bare: set[BlockId] = set()  # blocks that lost their hash while they were held
        self._uncached_first = config.reuse_order is ReuseOrder.UNCACHED_FIRST
        self.contents = BlockContents(config.num_blocks) if config.makes_events else None
        self._events: list[BlockEvent] = []

    def continue_from(self, before: "BlockPool") -> None:
        """Goes on counting where a pool ended whose blocks are all gone, and tells that they are."""
        self.num_evicted = before.num_evicted
        if len(self.group_counters) == len(before.group_counters):
            for mine, theirs in zip(self.group_counters, before.group_counters, strict=True):
                mine.allocated_blocks += theirs.allocated_blocks
                mine.evicted_blocks = theirs.evicted_blocks
        if self.block_lifetimes:
            self.block_lifetimes.clear()
        self._events = before.take_events()
        self._record(AllBlocksCleared())

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return self.free_list.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return self.free_list.num_free

    @property
    def usage(self) -> float:
        """Fraction of the blocks, the null block apart, that are not free."""
        return 1.0 - len(self.free_list) / (self.num_blocks - 1)

    def ref_cnt(self, block_id: BlockId) -> int:
        """Number of block tables that the block stands in."""
        return self.free_list.ref_cnt(block_id)

    def get_new_blocks(self, count: int) -> list[BlockId]:
        """Takes the next `count` free blocks, evicting what they held. The caller has checked that they are there."""
        taken = self.free_list.take(count)
        is_bare = count == 1 and self.prefix_map.block_hash(taken[0]) is None  # as decodes take them
        cached = () if is_bare else self.prefix_map.hashed_among(taken)
        if cached:
            self.num_evicted += len(cached)
            for counters, num_evicted in zip(self.group_counters, self.prefix_map.num_by_group(cached), strict=True):
                counters.evicted_blocks += num_evicted
            self._forget(cached)
        if self.block_lifetimes:
            self.block_lifetimes.record_taken(taken)
        return taken

    def touch(self, block_ids: Sequence[BlockId]) -> int:
        """Counts one more table for each block, free ones leaving the free list; returns how many did."""
        num_freed = self.free_list.hold(block_ids)
        if self.block_lifetimes:
            self.block_lifetimes.record_accessed(block_ids)
        return num_freed

    def free_blocks(self, block_ids: Sequence[BlockId], num_uncached: int | None = None) -> int:
        """Counts one table less for each block. Those that no table counts on become free, in this order.

        Args:
            block_ids: The blocks of a table, from its end.
            num_uncached: How many of the first were never cached, the others having been; None if that is not known.

        Returns:
            How many became free.
        """
        free_list = self.free_list
        freed = free_list.drop(block_ids)
        if not self._uncached_first:
            free_list.append(freed)
        elif num_uncached is not None and freed is block_ids and not self._bare:
            free_list.prepend(block_ids[:num_uncached])
            free_list.append(block_ids[num_uncached:])
        else:
            cached = self.prefix_map.hashed_among(freed)
            if len(cached) < len(freed):
                hashed = set(cached)
                free_list.prepend([block_id for block_id in freed if block_id not in hashed])
            free_list.append(cached)
        if self._bare:
            self._bare.difference_update(freed)
        return len(freed)

    def cache_full_blocks(
        self,
        group_id: GroupId,
        block_ids: Sequence[BlockId],
        hashes: Sequence[BlockHash],
        session_number: SessionNumber,
        sequence: ids.StepNumber,
    ) -> None:
        """Gives held blocks without a hash their hashes."""
        self.prefix_map.insert(group_id, block_ids, hashes, session_number, sequence)

    def evict_blocks(self, block_ids: Iterable[BlockId]) -> None:
        """Takes the hashes of these blocks away, of those that have one."""
        cached = self.prefix_map.hashed_among(dict.fromkeys(block_ids))
        self._bare.update(block_id for block_id in cached if self.free_list.ref_cnt(block_id))
        self._forget(cached)

    def _forget(self, cached: Sequence[BlockId]) -> None:
        if self.block_lifetimes:
            self.block_lifetimes.record_evicted(cached)
        if self.contents:
            for block_id in cached:
                self._drop_contents(block_id, self.contents)
        else:
            self.prefix_map.remove_all(cached)

    def reset_prefix_cache(self) -> bool:
        """Takes all hashes away if every block is free; returns whether it did. O(num_blocks).

        Sinks are never free, so a pool with sinks is never reset, as in the reference.
        """
        if self.num_free_blocks != self.num_blocks - 1:
            return False
        self.prefix_map.clear()
        if self.block_lifetimes:
            self.block_lifetimes.clear()
        if self.contents:
            self.contents.clear()
        self._record(AllBlocksCleared())
        return True

    def record_stored(self, block_ids: Sequence[BlockId], event: BlockStored) -> None:
        """Keeps what cached blocks hold, for those who ask for all of it, and the event for `take_events`."""
        if self.contents:
            self.contents.put(block_ids, event)
            self._events.append(event)

    def take_events(self) -> list[BlockEvent]:
        """Returns the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _drop_contents(self, block_id: BlockId, contents: BlockContents) -> None:
        group_id = self.prefix_map.group_id(block_id)
        block_hash = self.prefix_map.remove(block_id)
        contents.drop(block_id)
        self._events.append(BlockRemoved(block_hash, group_id, self.prefix_map.num_copies(group_id, block_hash)))

    def _record(self, event: BlockEvent) -> None:
        if self.contents:
            self._events.append(event)
