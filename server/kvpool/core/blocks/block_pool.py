"""The blocks of a pool: which are free, how many tables contain each, and what each holds.

1. free + held = num_blocks - 1; the null block is neither.
2. ref_cnt of a block is the number of block tables that contain it, 1 for a sink. A block is free exactly when its
   ref_cnt is 0. See `FreeList`.
3. A free block keeps its hash, and so can be hit, until the block is allocated again.
4. A block has contents exactly when it has a hash, in a pool that makes events. See `BlockContents`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core import ids
from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.block_contents import BlockContents, Contents
from kvpool.core.blocks.free_list import FreeList, FreeListSnapshot
from kvpool.core.blocks.host_tier import MAX_CLEANED, HostTier, HostTierSnapshot
from kvpool.core.blocks.prefix_map import PrefixMap, PrefixMapSnapshot
from kvpool.core.events import AllBlocksCleared, BlockEvent, BlockStored
from kvpool.core.ids import BlockHash, BlockId, GroupId, MapId, SessionNumber
from kvpool.core.memory_probe import process_memory
from kvpool.core.snapshots import Column
from kvpool.core.specs.pool_config import PoolConfig, ReuseOrder
from kvpool.core.statistics import GroupCounters

_RESERVED_BLOCKS: Final = 1024
"""Minimum number of blocks for which memory is reserved at a time."""
_UNLIMITED: Final = 2**62
_COLUMN_BYTES: Final = 65
_CACHED_BYTES: Final = 272
_CONTENTS_BYTES: Final = 1024
"""Memory per block: its entries, what a cached block takes besides, and contents of a cached block with their event."""


@dataclass(frozen=True, slots=True)
class BlockPoolSnapshot:
    """The blocks of a pool at one moment.

    Attributes:
        free_list: The free blocks.
        prefix_map: The cached blocks.
        contents: Contents of the cached blocks; empty if the pool makes no events.
        further_contents: Those of their further hashes, by block.
        evicted_held: Blocks that lost their hash while they were held.
        num_evicted: See `BlockPool`.
        group_counters: See `BlockPool`.
        host: The second tier; None if there is none.
    """

    free_list: FreeListSnapshot
    prefix_map: PrefixMapSnapshot
    contents: Column[Contents | None]
    further_contents: list[tuple[BlockId, list[tuple[BlockHash, Contents]]]]
    evicted_held: list[BlockId]
    num_evicted: int
    group_counters: list[GroupCounters]
    host: HostTierSnapshot | None


class BlockPool:
    """Columns over the blocks, and the operations on them. See rule 5 of `FreeList` for blocks without entries.

    Attributes:
        num_evicted: Cached blocks that were evicted by allocations, since the pool was created.
        group_counters: Counters of each group.
        block_lifetimes: Sampled lifetimes of blocks; None if lifetimes are not sampled.
        free_list: The free blocks. Read-only; change it through this class.
        prefix_map: The cached blocks. Read-only; change it through this class.
        contents: Contents of the cached blocks; None if the pool makes no events. Read-only.
        host: The second tier; None if there is none.
    """

    __slots__ = (
        "_events",
        "_evicted_held",
        "_num_ids",
        "_num_reserved",
        "_num_spare",
        "_uncached_first",
        "block_lifetimes",
        "contents",
        "free_list",
        "group_counters",
        "host",
        "num_evicted",
        "prefix_map",
    )

    def __init__(self, config: PoolConfig, block_lifetimes: BlockLifetimes | None = None) -> None:
        self.free_list = FreeList(config.num_blocks)
        # The ids of host memory come last, so a pool that has some has all columns from the beginning.
        num_columns = config.num_ids if config.num_host_blocks else self.free_list.num_columns
        if config.num_host_blocks:
            process_memory.reserve(config.num_ids * _COLUMN_BYTES)
        num_tiers = 2 if config.num_host_blocks else 1
        self.prefix_map = PrefixMap(num_columns, len(config.groups), config.num_blocks, num_tiers)
        self.num_evicted = 0
        self.group_counters = [GroupCounters() for _ in config.groups]
        self.block_lifetimes = block_lifetimes
        self._evicted_held: set[BlockId] = set()  # held blocks that lost their hash
        self._uncached_first = config.reuse_order is ReuseOrder.UNCACHED_FIRST
        self.contents = BlockContents(config, self.prefix_map) if config.makes_events else None
        self._events: list[BlockEvent] = []
        # Number of blocks whose caching at the same time needs no further memory.
        self._num_reserved = 0 if config.enable_caching else config.num_blocks
        self._num_ids = config.num_ids
        # Lower bound of the blocks that can be taken and cached without further memory.
        self._num_spare = 0
        self.host = HostTier(config, self) if config.num_host_blocks else None

    def reserve_memory(self, count: int, num_other_bytes: int) -> None:
        """Reserves the memory to take and cache the next `count` blocks, and that of their requests.

        Most steps pay a comparison: a reservation is for many steps. A pool uses the memory of evicted blocks again, so
        only blocks beyond the most that were cached need more.

        Raises:
            MemoryError: There is too little memory; nothing was changed.
        """
        if count <= self._num_spare:
            if num_other_bytes:
                process_memory.reserve(num_other_bytes, self.prefix_map)
            self._num_spare -= count
            return
        count = min(count, self.free_list.num_free)
        num_blocks = num_bytes = 0
        num_to_cache = len(self.prefix_map) + count + (MAX_CLEANED if self.host else 0)
        if num_to_cache > self._num_reserved:
            num_blocks = max(num_to_cache - self._num_reserved, _RESERVED_BLOCKS)
            num_blocks = min(num_blocks, self._num_ids - self._num_reserved)
            num_bytes = num_blocks * (_CACHED_BYTES + _CONTENTS_BYTES if self.contents else _CACHED_BYTES)
        if num_bytes or num_other_bytes:
            process_memory.reserve(num_bytes + num_other_bytes, self.prefix_map)
        self.make_columns(count)
        self._num_reserved += num_blocks
        self._num_spare = min(self.free_list.num_next_columns, self._num_reserved - len(self.prefix_map)) - count
        if self.host:
            self._num_spare = 0  # each step can cache blocks of host memory, too
        if self.free_list.num_columns == self.num_blocks and self._num_reserved == self._num_ids:
            self._num_spare = _UNLIMITED

    def make_columns(self, count: int) -> None:
        """Makes sure that the next `count` blocks have entries in the columns. Amortized O(count).

        Raises:
            MemoryError: There is too little memory; nothing was changed.
        """
        free_list = self.free_list
        if free_list.num_next_columns >= count:
            return
        num_columns = free_list.num_columns_for(count)
        process_memory.reserve((num_columns - free_list.num_columns) * _COLUMN_BYTES, self.prefix_map)
        self.prefix_map.extend_columns(num_columns)
        if self.contents:
            self.contents.extend_columns(num_columns)
        free_list.extend_columns(num_columns)  # last: decides which blocks have entries

    def continue_from(self, before: "BlockPool") -> None:
        """Continues the counters and events of a pool whose blocks are gone.

        Records an event that clears all blocks.
        """
        self.num_evicted = before.num_evicted
        if len(self.group_counters) == len(before.group_counters):
            for mine, theirs in zip(self.group_counters, before.group_counters, strict=True):
                mine.continue_from(theirs)
            self.prefix_map.continue_from(before.prefix_map)
        if self.host and before.host:
            self.host.counters = before.host.counters
        if self.block_lifetimes:
            self.block_lifetimes.clear()
        self._events = before.take_events()
        self._record(AllBlocksCleared())

    @property
    def num_blocks(self) -> int:
        """Number of blocks, the null block included."""
        return self.free_list.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request holds, cached ones included."""
        return self.free_list.num_free

    @property
    def num_available_blocks(self) -> int:
        """Number of free blocks that the user of the free list can take."""
        free_list = self.free_list
        return free_list.num_available if free_list.num_held else free_list.num_free

    @property
    def usage(self) -> float:
        """Fraction of the blocks that are not free, without the null block."""
        return 1.0 - len(self.free_list) / (self.num_blocks - 1)

    @property
    def num_allocated(self) -> int:
        """Number of blocks that were taken since the pool was created."""
        return sum([counters.allocated_blocks for counters in self.group_counters])

    def ref_cnt(self, block_id: BlockId) -> int:
        """Number of block tables that contain the block; of a block in host memory, of copies that use it."""
        is_host = self.host and self.host.contains(block_id)
        return self.host.ref_cnt(block_id) if self.host and is_host else self.free_list.ref_cnt(block_id)

    def block_hash(self, block_id: BlockId) -> BlockHash | None:
        """Hash of a block; None if it has none."""
        return self.prefix_map.block_hash(block_id) if block_id < self.prefix_map.num_columns else None

    def get_new_blocks(self, group_id: GroupId, count: int) -> list[BlockId]:
        """Takes the next `count` available blocks for a group, and evicts their contents.

        The caller has checked that there are enough.

        Raises:
            MemoryError: See `make_columns`. A caller that must not fail here calls it first.
        """
        self.make_columns(count)
        taken = self.free_list.take(count)
        counters = self.group_counters[group_id]
        counters.used_blocks += count
        counters.allocated_blocks += count
        is_uncached = count == 1 and self.prefix_map.block_hash(taken[0]) is None  # the usual case of a decode
        cached = () if is_uncached else self.prefix_map.hashed_among(taken)
        if cached:
            self.num_evicted += len(cached)
            if self.host:
                self.host.note_evicted(cached)
            for each, num_evicted in zip(self.group_counters, self.prefix_map.num_by_group(cached), strict=True):
                each.evicted_blocks += num_evicted
            self.remove_hashes(cached)
        if self.host:
            self.host.note_taken(taken)
        if self.block_lifetimes:
            self.block_lifetimes.record_taken(taken)
        return taken

    def touch(self, group_id: GroupId, block_ids: Sequence[BlockId]) -> None:
        """Adds one reference of a group to each block, and removes free ones from the free list."""
        self.group_counters[group_id].used_blocks += self.free_list.hold(block_ids)
        if self.block_lifetimes:
            self.block_lifetimes.record_accessed(block_ids)

    def free_blocks(self, group_id: GroupId, block_ids: Sequence[BlockId], num_uncached: int | None = None) -> None:
        """Removes one reference of a group from each block. Blocks without references become free, in this order.

        Args:
            group_id: The group.
            block_ids: The blocks of a table, last block first.
            num_uncached: Number of first blocks that were never cached, if all others were; None if unknown.
        """
        free_list = self.free_list
        freed = free_list.drop(block_ids)
        if free_list.until:  # `StepsInFlight.take_over` needs it if the session ends
            self.prefix_map.set_group(group_id, freed)
        if not self._uncached_first:
            free_list.append(freed)
        elif num_uncached is not None and freed is block_ids and not self._evicted_held:
            free_list.prepend(block_ids[:num_uncached])
            free_list.append(block_ids[num_uncached:])
        else:
            self._put_uncached_first(freed)
        if self._evicted_held:
            self._evicted_held.difference_update(freed)
        self.group_counters[group_id].used_blocks -= len(freed)

    def _put_uncached_first(self, freed: Sequence[BlockId]) -> None:
        """Adds blocks to the free list: those without a hash at its front, the others at its end."""
        cached = self.prefix_map.hashed_among(freed)
        if len(cached) < len(freed):
            hashed = set(cached)
            self.free_list.prepend([block_id for block_id in freed if block_id not in hashed])
        self.free_list.append(cached)

    def cache_tail(
        self,
        map_id: MapId,
        block_id: BlockId,
        block_hash: BlockHash,
        session_number: SessionNumber,
        sequence: ids.StepNumber,
    ) -> None:
        """Assigns the hash of a prefix that ends within a held block, beside the hash that the block may have."""
        if self.prefix_map.block_hash(block_id) is None:
            self.prefix_map.insert(map_id, (block_id,), (block_hash,), session_number, sequence)
        else:
            self.prefix_map.add_hash(block_id, block_hash)

    def move_hashes(
        self, source: BlockId, target: BlockId, session_number: SessionNumber, sequence: ids.StepNumber
    ) -> None:
        """Gives the hashes of one block to another, which step `sequence` fills with the same contents. No events."""
        map_id = self.prefix_map.map_id(source)
        for block_hash in self.prefix_map.remove(source):
            self.cache_tail(map_id, target, block_hash, session_number, sequence)
        if self.contents:
            self.contents.move(source, target)

    def copy_hashes(
        self, source: BlockId, target: BlockId, session_number: SessionNumber, sequence: ids.StepNumber
    ) -> None:
        """Gives the hashes of one block to another, too, which step `sequence` fills with the same contents.

        The caller records the event, see `record_copied`.
        """
        map_id = self.prefix_map.tiers(self.prefix_map.map_id(source))[target >= self.num_blocks]
        for block_hash in self.prefix_map.all_hashes(source):
            self.cache_tail(MapId(map_id), target, block_hash, session_number, sequence)
        if self.contents:
            self.contents.copy(source, target)

    def drop_hashes(self, block_ids: Iterable[BlockId]) -> None:
        """Removes the hashes of held blocks that their request caches again, or overwrites."""
        self.remove_hashes(self.prefix_map.hashed_among(block_ids))

    def free_copied(self, blocks: Sequence[tuple[GroupId, BlockId]]) -> None:
        """Removes one reference from each block of copies, in order; each may occur several times."""
        freed = self.free_list.drop([block_id for _, block_id in blocks])
        if self._uncached_first:
            self._put_uncached_first(freed)
        else:
            self.free_list.append(freed)
        groups = {block_id: group_id for group_id, block_id in blocks}
        for block_id in freed:
            self.group_counters[groups[block_id]].used_blocks -= 1
            if self.free_list.until:
                self.prefix_map.set_group(groups[block_id], (block_id,))
        self._evicted_held.difference_update(freed)

    def evict_blocks(self, block_ids: Iterable[BlockId]) -> None:
        """Removes the hashes of those blocks that have one."""
        num_columns = self.prefix_map.num_columns
        used = dict.fromkeys([block_id for block_id in block_ids if block_id < num_columns])
        cached = self.prefix_map.hashed_among(used)
        self._evicted_held.update(block_id for block_id in cached if self.free_list.ref_cnt(block_id))
        self.remove_hashes(cached)

    def remove_hashes(self, cached: Sequence[BlockId]) -> None:
        """Removes the hashes of blocks that have one."""
        if self.block_lifetimes:
            self.block_lifetimes.record_evicted(self.host.without(cached) if self.host else cached)
        if self.contents:
            for block_id in cached:
                self._events += self.contents.drop(block_id)
                self.prefix_map.remove(block_id)
        else:
            self.prefix_map.remove_all(cached)

    def reset_prefix_cache(self) -> bool:
        """Removes all hashes if every block is free; returns whether it did. O(blocks ever used).

        Sinks are never free, so a pool with sinks is never reset, as in vLLM.
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
        """Records the contents of cached blocks, and the event for `take_events`."""
        if self.contents:
            self.contents.put(block_ids, event)
            self._events.append(event)

    def record_tail(self, block_id: BlockId, event: BlockStored) -> None:
        """Records the event for a prefix that ends within a cached block, and the contents of that hash."""
        if self.prefix_map.block_hash(block_id) == event.block_hashes[-1]:
            self.record_stored([block_id], event)
        elif self.contents:
            self.contents.put_further(block_id, event)
            self._events.append(event)

    def record_copied(self, block_ids: Iterable[BlockId]) -> None:
        """Records the events for those of the blocks that are cached, whose contents are copies from the other tier."""
        if self.contents:
            self._events += self.contents.announce(self.prefix_map.hashed_among(block_ids))

    def take_events(self) -> list[BlockEvent]:
        """Returns the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> BlockPoolSnapshot:
        """The blocks at this moment, without events; read them before `end_snapshot`. Nothing is copied per block."""
        return BlockPoolSnapshot(
            self.free_list.snapshot(),
            self.prefix_map.snapshot(),
            self.contents.snapshot() if self.contents else Column(()),
            [(block_id, list(each)) for block_id, each in self.contents.further.items()] if self.contents else [],
            list(self._evicted_held),
            self.num_evicted,
            [counters.copy() for counters in self.group_counters],
            self.host.snapshot() if self.host else None,
        )

    def end_snapshot(self) -> None:
        """Ends a snapshot. The rest of it can no longer be read."""
        self.free_list.end_snapshot()
        self.prefix_map.end_snapshot()
        if self.contents:
            self.contents.end_snapshot()
        if self.host:
            self.host.end_snapshot()

    def restore(self, snapshot: BlockPoolSnapshot, num_columns: int) -> None:
        """Makes the blocks of a new pool as they were. O(num_columns).

        Args:
            snapshot: The snapshot.
            num_columns: Number of first blocks that have entries in its columns, at most the pool's blocks.

        Raises:
            ValueError: The snapshot is of a pool of another size.
            LookupError: A group or a block does not exist.
        """
        all_ids = [BlockId(i) for i in range(self._num_ids if self.host else num_columns)]
        self.free_list.restore(snapshot.free_list, all_ids[:num_columns])
        self.prefix_map.restore(snapshot.prefix_map, all_ids)
        if self.contents:
            self.contents.restore(snapshot.contents, ((all_ids[i], each) for i, each in snapshot.further_contents))
        self._evicted_held = set(snapshot.evicted_held)
        self._num_reserved = max(self._num_reserved, len(self.prefix_map))
        self.num_evicted = snapshot.num_evicted
        if len(snapshot.group_counters) != len(self.group_counters):
            raise ValueError("the counters of groups differ in number")
        self.group_counters = snapshot.group_counters
        if (self.host is None) != (snapshot.host is None):
            raise ValueError("one has host memory, and the other has none")
        if self.host and snapshot.host:
            self.host.restore(snapshot.host)

    def _record(self, event: BlockEvent) -> None:
        if self.contents:
            self._events.append(event)
