"""Maps hashes to cached blocks, and decides which session can read which block.

1. A block has a hash exactly when its group's map leads from that hash to the block. Several blocks can have the same
   hash; the block that was cached first is found first. With partial hits a block can have further hashes, of prefixes
   that end within it. Blocks of host memory have maps of their own, in which a look-up looks last, see `HostTier`.
2. A block is cached when its slots are allocated, shortly before the GPU fills it. The block is pending until the
   session that fills it reports that step as executed. Until then only this session finds the block, because its own
   steps run in order. A block that a later step overwrites is pending under the negative number of its step, and is
   never published: the steps of another session are not ordered before that one.
3. A block that loses its hash is no longer pending.
4. Each session has a namespace and a weights version. Each such pair, a scope, has maps of its own, so that no session
   finds a block of another scope, even by an equal hash. The scope without a namespace and version has the first maps.
   A hash that leaks through a log is thus no key. Longer keys would be cut again in five places; a check of the owner
   after the look-up would let one tenant evict or probe another's block of the same hash.
5. A scope exists while it is in use or caches a block. Of the scopes with a version that are not in use, only the
   newest are kept (`surplus_blocks`), as each new version of the weights makes a scope. The blocks of the others lose
   their hashes some at a time, whenever a session opens or gets another version.
6. A hash whose last block loses it is remembered for a while, to explain misses (`EvictedHashes`). The
   hash of a block whose step was never reported as executed is not: that block may never have been computed.
"""

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any, Final

from kvpool.core import ids
from kvpool.core.blocks.evicted_hashes import EvictedHashes, EvictedHashesSnapshot
from kvpool.core.blocks.pending_blocks import NEVER, PendingBlocks
from kvpool.core.ids import BlockHash, BlockId, GroupId, MapId, Scope, SessionNumber
from kvpool.core.snapshots import Column, ColumnCopy, extend, shared
from kvpool.core.statistics import MissReason

_BATCH_GROWTH: Final = 8
_MAX_LOOKED_UP: Final = 512
"""Hashes are looked up in batches: one hash first, because most misses occur there, then growing batches."""
_MAPS_PER_BYTE: Final = 256
"""Maximum number of maps while a block's map takes one byte. With more, it takes four."""
MAX_EXAMINED: Final = 64
"""Maximum number of copies of a hash, and of scopes, of which a look-up examines each."""
MAX_UNUSED_VERSIONS: Final = 16
"""Maximum number of scopes with a weights version that cache blocks and are not in use."""
MAX_SURPLUS: Final = 4096
"""Maximum number of blocks of the other such scopes that are evicted in one turn, in 4 to 16 ms."""
FIRST_SCOPE: Final[Scope] = (b"", "")
"""The scope of sessions without namespace and weights version. It is opened first, and never removed."""
FIRST_MAP: Final = MapId(0)
"""The first map of this scope."""
_UNSEEN: Final = MissReason.UNSEEN  # looking a member up in its enum takes longer than a hash in a map


@dataclass(frozen=True, slots=True)
class PrefixMapSnapshot:
    """A prefix map at one moment. Everything else follows from this.

    Attributes:
        block_hashes: Hash of each block; None for a block without one.
        map_ids: Map of each block.
        session_numbers: Session that filled each block.
        first_maps: The first map of each scope.
        further_hashes: The further hashes of each block that has some.
        duplicates: For each map, each hash of several blocks with these blocks, in order. Few: a copy in host memory
            is in another map.
        pending: The pending blocks of each step of a session.
        evicted: The evicted hashes that are remembered.
    """

    block_hashes: Column[BlockHash | None]
    map_ids: Column[int]
    session_numbers: Column[SessionNumber]
    first_maps: list[tuple[Scope, MapId]]
    further_hashes: list[tuple[BlockId, list[BlockHash]]]
    duplicates: list[list[tuple[BlockHash, list[BlockId]]]]
    pending: Column[tuple[SessionNumber, ids.StepNumber, list[BlockId]]]
    evicted: EvictedHashesSnapshot


class PrefixMap:
    """Maps (scope, group, hash) to blocks.

    Columns by block id hold each block's hash, map and the session that filled it. They have entries for the first
    blocks, among them all that were ever used. A group's map is the first map of the scope plus the group's id. If the
    pool has host memory, as many maps for its blocks follow.

    Attributes:
        evicted: The evicted hashes that are remembered. Read-only; change it through this class.
        pending: The blocks that only the session that fills them can find. See rule 2.
    """

    __slots__ = (
        "_block_hashes",
        "_by_hash",
        "_column_copies",
        "_duplicates",
        "_first_maps",
        "_further_hashes",
        "_is_tiered",
        "_map_ids",
        "_num_cached",
        "_num_groups",
        "_num_maps",
        "_session_numbers",
        "evicted",
        "pending",
    )

    def __init__(self, num_columns: int, num_groups: int, num_blocks: int, num_tiers: int = 1) -> None:
        # The first copy. If several blocks have the same hash, `_duplicates` holds all of them, in order. An
        # OrderedDict finds its first key in O(1), even after many deletions.
        self._by_hash: list[dict[BlockHash, BlockId]] = []
        self._duplicates: list[dict[BlockHash, OrderedDict[BlockId, None]]] = []
        self._num_cached: list[int] = []
        self._num_groups = num_groups
        self._num_maps = num_groups * num_tiers  # of a scope
        self._is_tiered = num_tiers > 1
        self._first_maps: dict[Scope, MapId] = {}  # in the order in which they were opened
        self._block_hashes: list[BlockHash | None] = [None] * num_columns
        self._further_hashes: dict[BlockId, list[BlockHash]] = {}
        self._map_ids: MutableSequence[int] = bytearray(num_columns)
        self._session_numbers: list[SessionNumber] = [SessionNumber(0)] * num_columns
        self.pending = PendingBlocks()
        self._column_copies: tuple[ColumnCopy[Any], ...] = ()  # of the three columns, while a snapshot is read
        self.evicted = EvictedHashes(num_blocks)
        self.open_scope(FIRST_SCOPE, ())

    def __len__(self) -> int:
        """Number of blocks that have a hash."""
        return sum(self._num_cached)

    def open_scope(self, scope: Scope, in_use: Container[Scope]) -> MapId:
        """Returns the first map of a scope; makes its maps if it is new.

        Drops other scopes if the scope is new. O(scopes); O(num_blocks) when the maps exceed one byte.

        Args:
            scope: The scope.
            in_use: The scopes of sessions that can still make requests.
        """
        first_maps = self._first_maps
        if scope in first_maps:
            return first_maps[scope]
        for other, first in list(first_maps.items()):
            if other != FIRST_SCOPE and other not in in_use and not self._caches(first):
                del first_maps[other]
                self._make_maps(first)
        taken = set(first_maps.values())
        first_map = next(MapId(first) for first in count(0, self._num_maps) if first not in taken)
        first_maps[scope] = first_map
        self._make_maps(first_map)
        if len(self._by_hash) > _MAPS_PER_BYTE and isinstance(self._map_ids, bytearray):
            earlier, self._map_ids = self._map_ids, array("I", list(self._map_ids))
            self._end_copy(earlier)
        return first_map

    def surplus_blocks(self, in_use: Container[Scope]) -> list[BlockId]:
        """At most MAX_SURPLUS blocks of the oldest scopes beyond MAX_UNUSED_VERSIONS. O(scopes + these blocks)."""
        unused = [
            first
            for scope, first in self._first_maps.items()
            if scope[1] and scope not in in_use and self._caches(first)
        ]
        surplus = unused[: max(len(unused) - MAX_UNUSED_VERSIONS, 0)]
        maps = [MapId(first + i) for first in surplus for i in range(self._num_maps)]
        found = (copy for i in maps for block_hash in self._by_hash[i] for copy in self._copies(i, block_hash))
        return list(islice(found, MAX_SURPLUS))

    def _caches(self, first: int) -> bool:
        """Whether the scope with this first map caches a block."""
        return any(self._num_cached[first : first + self._num_maps])

    def _make_maps(self, first: int) -> None:
        """Makes the maps of a scope, or makes them again."""
        maps, end = range(self._num_maps), first + self._num_maps
        for i in range(first, end):
            self.evicted.forget(MapId(i))
        self._by_hash[first:end] = [{} for _ in maps]
        self._duplicates[first:end] = [{} for _ in maps]
        self._num_cached[first:end] = [0 for _ in maps]

    def extend_columns(self, num_columns: int) -> None:
        """Makes entries for the first `num_columns` blocks."""
        extend(self._block_hashes, num_columns, None)
        extend(self._map_ids, num_columns, 0)
        extend(self._session_numbers, num_columns, SessionNumber(0))

    @property
    def num_columns(self) -> int:
        """Number of first blocks that have entries in the columns."""
        return len(self._block_hashes)

    def num_cached(self, group_id: GroupId) -> int:
        """Number of blocks of a group in the first tier that have a hash. O(scopes)."""
        return sum(self._num_cached[group_id :: self._num_maps])

    def num_cached_in_host(self, group_id: GroupId) -> int:
        """Number of blocks of a group in host memory, of which the pool has some, that have a hash. O(scopes)."""
        return sum(self._num_cached[self._num_groups + group_id :: self._num_maps])

    def block_hash(self, block_id: BlockId) -> BlockHash | None:
        """Hash of a block; None if it has none."""
        return self._block_hashes[block_id]

    def hashes(self, blocks: slice) -> list[BlockHash | None]:
        """Hashes of these blocks, None for those without one. A copy."""
        return self._block_hashes[blocks]

    def writers(self, blocks: slice) -> list[SessionNumber]:
        """Sessions that filled these blocks, of those that have a hash. A copy."""
        return self._session_numbers[blocks]

    def hashed_among(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """Returns those of the blocks that have a hash, in order."""
        block_hashes = self._block_hashes
        return [block_id for block_id in block_ids if block_hashes[block_id] is not None]

    def num_by_group(self, block_ids: Sequence[BlockId]) -> list[int]:
        """Number of these blocks that are cached under each group. All of them have hashes."""
        num_groups, map_ids = self._num_groups, self._map_ids
        if num_groups == 1:
            return [len(block_ids)]
        found = bytes([map_ids[block_id] % num_groups for block_id in block_ids])
        return [found.count(group_id) for group_id in range(num_groups)]

    def group_id(self, block_id: BlockId) -> GroupId:
        """Group under which a block with a hash is cached; of others, see `set_group`."""
        return GroupId(self._map_ids[block_id] % self._num_groups)

    def set_group(self, group_id: GroupId, block_ids: Iterable[BlockId]) -> None:
        """Keeps the group of those of the blocks that have no hash, until they are cached."""
        if self._num_groups == 1:
            return
        unhashed = [block_id for block_id in block_ids if self._block_hashes[block_id] is None]
        for copied in self._column_copies:
            copied.before_change(unhashed)
        for block_id in unhashed:
            self._map_ids[block_id] = group_id

    def map_id(self, block_id: BlockId) -> MapId:
        """Map of the first tier for the scope and group of a block with a hash."""
        map_id = self._map_ids[block_id]
        return MapId(map_id - map_id % self._num_maps + map_id % self._num_groups)

    def tiers(self, map_id: MapId) -> Sequence[int]:
        """A map of the first tier, then the one of host memory for its scope and group, if the pool has some."""
        return range(map_id, map_id + self._num_maps, self._num_groups)

    def session_number(self, block_id: BlockId) -> SessionNumber:
        """Session that filled or copied a block with a hash, by the number that it had when the block was published."""
        return SessionNumber(abs(self._session_numbers[block_id]))  # negative of a pending copy, see `copier`

    def set_writer(self, block_id: BlockId, session_number: SessionNumber) -> None:
        """Records which session filled a block that is not pending."""
        for copied in self._column_copies:
            copied.before_change((block_id,))
        self._session_numbers[block_id] = session_number

    def is_visible(self, block_id: BlockId, reader: SessionNumber) -> bool:
        """Whether `reader` can use the contents of a block with a hash."""
        return block_id not in self.pending.steps or self._session_numbers[block_id] == reader

    def is_filled_after(
        self, map_id: MapId, block_id: BlockId, launched: ids.StepNumber, writer: SessionNumber
    ) -> bool:
        """Whether a step of `writer` after `launched` fills this block, or one of its newest copies.

        Only the block itself must not be read. vLLM also waits for copies, of which the newest are cached last. Blocks
        of host memory are read by a copy, which runs in order; while they are pending, `writer` is not theirs.
        """
        pending, writers = self.pending.steps, self._session_numbers
        copies = self._copies(map_id, self._block_hashes[block_id])  # type: ignore[arg-type]  # has one
        newest = chain((block_id,), islice(reversed(copies), MAX_EXAMINED))
        return any(launched < abs(pending.get(copy, launched)) < NEVER and writers[copy] == writer for copy in newest)

    def find(
        self, map_id: MapId, hashes: Sequence[BlockHash], first: int, end: int, reader: SessionNumber
    ) -> list[BlockId]:
        """Finds the blocks of the longest prefix of `hashes[first:end]` that is cached and visible to `reader`.

        O(hit): only a few hashes beyond the hit are looked up.
        """
        get = self._by_hash[map_id].get
        found: list[BlockId] = []
        start, size = first, 1
        while first < end:
            looked_up = hashes[first : min(first + size, end)]
            piece = [get(block_hash) for block_hash in looked_up]
            if self._is_tiered and not all(piece):
                get_host = self._by_hash[map_id + self._num_groups].get
                piece = [each or get_host(block_hash) for each, block_hash in zip(piece, looked_up, strict=True)]
            if not all(piece):
                found += piece[: piece.index(None)]  # type: ignore[arg-type]
                break
            found += piece  # type: ignore[arg-type]
            first += size
            size = min(_BATCH_GROWTH * size, _MAX_LOOKED_UP)
        return found if self._are_visible(found, reader) else self._visible(map_id, hashes, start, found, reader)

    def holds_all(
        self, map_id: MapId, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId], reader: SessionNumber
    ) -> bool:
        """Whether each block has its hash, in this map, and is visible to `reader`.

        Copies other than the first count too.
        """
        block_hashes, map_ids = self._block_hashes, self._map_ids
        return (
            max(block_ids, default=0) < len(block_hashes)
            and [block_hashes[block_id] for block_id in block_ids] == list(hashes)
            and {map_ids[block_id] for block_id in block_ids}.issubset(self.tiers(map_id))
            and self._are_visible(block_ids, reader)
        )

    def _are_visible(self, block_ids: Sequence[BlockId], reader: SessionNumber) -> bool:
        pending, session_numbers = self.pending.steps, self._session_numbers
        return not pending or not [True for b in block_ids if b in pending and session_numbers[b] != reader]

    def holds(self, map_id: MapId, hashes: Iterable[BlockHash], block_id: BlockId, reader: SessionNumber) -> bool:
        """Whether a block has one of these hashes, in this map, and is visible to `reader`."""
        if block_id >= len(self._block_hashes) or self._map_ids[block_id] not in self.tiers(map_id):
            return False
        return any(self.has_hash(block_id, each) for each in hashes) and self.is_visible(block_id, reader)

    def has_hash(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        """Whether a block has this hash, or has it as a further one."""
        return self._block_hashes[block_id] == block_hash or block_hash in self._further_hashes.get(block_id, ())

    def _visible(
        self,
        map_id: MapId,
        hashes: Sequence[BlockHash],
        start: int,
        found: Sequence[BlockId],
        reader: SessionNumber,
    ) -> list[BlockId]:
        """Replaces each block by its first copy that `reader` can read; stops at a block that has none.

        Examines only the first copies, then the newest ones, among which are those that the reader has cached since; of
        each tier.
        """
        visible: list[BlockId] = []
        for i in range(start, start + len(found)):
            of_tiers = (self._copies(each, hashes[i]) for each in self.tiers(map_id))
            examined = (b for each in of_tiers for some in (each, reversed(each)) for b in islice(some, MAX_EXAMINED))
            readable = next((copy for copy in examined if self.is_visible(copy, reader)), None)
            if readable is None:
                break
            visible.append(readable)
        return visible

    def _copies(self, map_id: int, block_hash: BlockHash) -> "OrderedDict[BlockId, None] | tuple[BlockId, ...]":
        if copies := self._duplicates[map_id].get(block_hash):
            return copies
        first_copy = self._by_hash[map_id].get(block_hash)
        return () if first_copy is None else (first_copy,)

    def entries(self) -> Iterator[tuple[GroupId, BlockHash, BlockId]]:
        """Yields all cached blocks with their groups, once with each of their hashes. O(cached blocks)."""
        for i, by_hash in enumerate(self._by_hash):
            for block_hash in by_hash:
                for block_id in self._copies(i, block_hash):
                    yield GroupId(i % self._num_groups), block_hash, block_id

    def leads_back(self, block_id: BlockId) -> bool:
        """Whether the hash of a block, if it has one, leads to this block in its map."""
        if block_id >= len(self._block_hashes) or (block_hash := self._block_hashes[block_id]) is None:
            return True
        return block_id in self._copies(self._map_ids[block_id], block_hash)

    def first_copy(self, map_id: MapId, block_hash: BlockHash) -> BlockId | None:
        """The block that is found first among those that have this hash, visible or not."""
        found = self._by_hash[map_id].get(block_hash)
        if found is None and self._is_tiered:
            found = self._by_hash[map_id + self._num_groups].get(block_hash)
        return found

    def host_copies(self, block_id: BlockId) -> Collection[BlockId]:
        """The blocks of host memory, of which the pool has some, with the same hash as a block that has one."""
        return self._copies(self.map_id(block_id) + self._num_groups, self._block_hashes[block_id])  # type: ignore[arg-type]  # has one

    def all_hashes(self, block_id: BlockId) -> list[BlockHash]:
        """The hash of a block that has one, and its further ones, in order."""
        block_hash: BlockHash = self._block_hashes[block_id]  # type: ignore[assignment]  # has one
        return [block_hash, *self._further_hashes.get(block_id, ())]

    def num_written_by(self, block_ids: Iterable[BlockId], session_number: SessionNumber) -> int:
        """Number of these blocks that `session_number` filled. All of them have hashes."""
        session_numbers = self._session_numbers
        return [session_numbers[block_id] for block_id in block_ids].count(session_number)

    def insert(
        self,
        map_id: MapId,
        block_ids: Sequence[BlockId],
        hashes: Sequence[BlockHash],
        session_number: SessionNumber,
        sequence: ids.StepNumber,
    ) -> None:
        """Assigns hashes to blocks that have none. Step `sequence` of session `session_number` fills the blocks."""
        for copied in self._column_copies:
            copied.before_change(block_ids)
        by_hash, block_hashes = self._by_hash[map_id], self._block_hashes
        session_numbers, map_ids = self._session_numbers, self._map_ids
        self.pending.add(session_number, sequence, block_ids)
        num_before, count = len(by_hash), len(block_ids)
        self._num_cached[map_id] += count
        if count == 1:  # filled by a decode; the calls per run below would cost more than they save
            block_id, block_hash = block_ids[0], hashes[0]
            if by_hash.setdefault(block_hash, block_id) != block_id:
                self._map_copies(map_id, block_ids, hashes)
            block_hashes[block_id] = block_hash
            session_numbers[block_id] = session_number
            map_ids[block_id] = map_id
            return
        # Equal hashes are rare: two sessions computed the same prefix in the same round, or one prompt repeats a block.
        if not by_hash.keys().isdisjoint(hashes):
            self._map_copies(map_id, block_ids, hashes)
        else:
            by_hash.update(zip(hashes, block_ids, strict=True))
            if len(by_hash) - num_before != count:  # `hashes` repeats one, of which update() kept the last: undo
                for block_hash in hashes:
                    by_hash.pop(block_hash, None)
                self._map_copies(map_id, block_ids, hashes)
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            block_hashes[block_id] = block_hash
            session_numbers[block_id] = session_number
            map_ids[block_id] = map_id

    def add_hash(self, block_id: BlockId, block_hash: BlockHash) -> None:
        """Assigns a further hash to a block that has one."""
        self._further_hashes.setdefault(block_id, []).append(block_hash)
        self._map_copies(MapId(self._map_ids[block_id]), (block_id,), (block_hash,))

    def _map_copies(self, map_id: MapId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash]) -> None:
        by_hash, duplicates = self._by_hash[map_id], self._duplicates[map_id]
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            first_copy = by_hash.setdefault(block_hash, block_id)
            if first_copy != block_id:
                if block_hash not in duplicates:
                    duplicates[block_hash] = OrderedDict({first_copy: None})
                duplicates[block_hash][block_id] = None

    def remove(self, block_id: BlockId) -> list[BlockHash]:
        """Removes the hash of a block that has one, and its further ones, and returns them in order. See rule 6."""
        block_hash = self._block_hashes[block_id]
        if block_hash is None:
            raise KeyError(block_id)
        for copied in self._column_copies:
            copied.before_change((block_id,))
        map_id = self._map_ids[block_id]
        of_first_tier = self.map_id(block_id) if self._is_tiered else map_id
        sequence = self.pending.remove(self._session_numbers[block_id], block_id)
        hashes = [block_hash, *self._further_hashes.pop(block_id, ())] if self._further_hashes else [block_hash]
        for block_hash in hashes:
            copies = self._duplicates[map_id].get(block_hash)
            if copies:
                del copies[block_id]
                self._by_hash[map_id][block_hash] = next(iter(copies))
                if len(copies) == 1:
                    del self._duplicates[map_id][block_hash]
            else:
                del self._by_hash[map_id][block_hash]
                # A copy to host memory that was not executed has the contents of a block that was computed.
                was_computed = sequence is None or sequence == NEVER or self._session_numbers[block_id] < 0
                if was_computed and not (self._is_tiered and self.first_copy(MapId(of_first_tier), block_hash)):
                    self.evicted.for_new(1)[of_first_tier][block_hash] = None
        self._block_hashes[block_id] = None
        self._num_cached[map_id] -= 1
        return hashes

    def remove_all(self, block_ids: Sequence[BlockId]) -> None:
        """Removes the hashes of blocks that all have one. See rule 6."""
        if self._is_tiered:  # the other tier may have a copy of each
            for block_id in block_ids:
                self.remove(block_id)
            return
        for copied in self._column_copies:
            copied.before_change(block_ids)
        size = self.evicted.generation_size
        for start in range(0, len(block_ids), size):
            self._remove_some(block_ids[start : start + size] if len(block_ids) > size else block_ids)

    def _remove_some(self, block_ids: Sequence[BlockId]) -> None:
        block_hashes, map_ids = self._block_hashes, self._map_ids
        pending, num_cached, further = self.pending.steps, self._num_cached, self._further_hashes
        evicted = self.evicted.for_new(len(block_ids))
        block_hash: BlockHash
        if len(self._by_hash) == 1 and not self._duplicates[0] and pending.keys().isdisjoint(block_ids):
            by_hash, remembered = self._by_hash[0], evicted[0]
            for block_id in block_ids:
                block_hash = block_hashes[block_id]  # type: ignore[assignment]  # has one
                del by_hash[block_hash]
                block_hashes[block_id] = None
                remembered[block_hash] = None
            num_cached[0] -= len(block_ids)
            return
        # By map: growing several dictionaries in turn takes longer.
        removed: defaultdict[int, list[BlockHash]] = defaultdict(list)
        for block_id in block_ids:
            map_id = map_ids[block_id]
            if block_id in pending or self._duplicates[map_id] or block_id in further:
                self.remove(block_id)
                continue
            block_hash = block_hashes[block_id]  # type: ignore[assignment]  # has one
            del self._by_hash[map_id][block_hash]
            removed[map_id].append(block_hash)
            block_hashes[block_id] = None
            num_cached[map_id] -= 1
        for map_id, hashes in removed.items():
            evicted[map_id].update(dict.fromkeys(hashes))

    def why_missing(self, map_id: MapId, block_hash: BlockHash) -> MissReason:
        """Why a look-up in a map does not find a hash. Examines only the oldest scopes."""
        if self.first_copy(map_id, block_hash) is not None:
            return MissReason.NOT_EXECUTED
        reason = self.evicted.reason(map_id, block_hash)
        if reason is not None:
            return reason
        by_hash, tiers = self._by_hash, self.tiers(MapId(map_id % self._num_groups))
        for first in islice(self._first_maps.values(), MAX_EXAMINED):
            for of_first_scope in tiers:
                if block_hash in by_hash[first + of_first_scope]:
                    return MissReason.OTHER_SCOPE
        return _UNSEEN

    def scopes_of(self, group_id: GroupId, block_hash: BlockHash) -> list[Scope]:
        """The scopes in which a group has cached a hash. O(scopes)."""
        found = [(scope, self.first_copy(MapId(i + group_id), block_hash)) for scope, i in self._first_maps.items()]
        return [scope for scope, block_id in found if block_id is not None]

    def scopes(self) -> list[tuple[Scope, int]]:
        """Each scope, and the number of blocks that it caches. O(scopes)."""
        return [
            (scope, sum(self._num_cached[first : first + self._num_maps])) for scope, first in self._first_maps.items()
        ]

    def continue_from(self, before: "PrefixMap") -> None:
        """Remembers the blocks of an earlier epoch as lost by a reset. O(blocks that were ever used)."""
        in_use = [scope for scope, _ in before.scopes()]
        self.evicted.reset(
            (block_hash, self.open_scope(scope, in_use) + group_id) for block_hash, scope, group_id in before.hashed()
        )

    def hashed(self) -> Iterator[tuple[BlockHash, Scope, GroupId]]:
        """Yields hash, scope and group of each block that has a hash, by id."""
        groups = [GroupId(i) for i in range(self._num_groups)]
        places = {
            each: (scope, group_id)
            for scope, first in self._first_maps.items()
            for group_id in groups
            for each in self.tiers(MapId(first + group_id))
        }
        for block_hash, map_id in zip(self._block_hashes, self._map_ids, strict=True):
            if block_hash is not None:
                yield block_hash, *places[map_id]

    def clear(self) -> None:
        """Removes the hashes of all blocks. O(blocks that were ever used)."""
        first_maps = self._first_maps
        self.evicted.reset((block_hash, first_maps[scope] + group_id) for block_hash, scope, group_id in self.hashed())
        for by_hash, duplicates in zip(self._by_hash, self._duplicates, strict=True):
            by_hash.clear()
            duplicates.clear()
        self._further_hashes.clear()
        earlier, self._block_hashes = self._block_hashes, [None] * len(self._block_hashes)
        self._end_copy(earlier)
        self.pending.clear()
        self._num_cached = [0] * len(self._by_hash)

    def _end_copy(self, column: MutableSequence[Any]) -> None:
        """Ends the copy of a column that was replaced, and so no longer changes."""
        self._column_copies = tuple(copied for copied in self._column_copies if not copied.reads(column))

    def snapshot(self) -> PrefixMapSnapshot:
        """The map at this moment; read it before `end_snapshot`. O(pending blocks, equal hashes in one tier)."""
        hashes, map_ids = ColumnCopy(self._block_hashes), ColumnCopy(self._map_ids)
        session_numbers = ColumnCopy(self._session_numbers)
        self._column_copies = (hashes, map_ids, session_numbers)
        return PrefixMapSnapshot(
            Column(hashes),
            Column(map_ids),
            Column(session_numbers),
            list(self._first_maps.items()),
            [(block_id, list(hashes)) for block_id, hashes in self._further_hashes.items()],
            [[(block_hash, list(copies)) for block_hash, copies in each.items()] for each in self._duplicates],
            self.pending.snapshot(),
            self.evicted.snapshot(),
        )

    def end_snapshot(self) -> None:
        """Ends a snapshot. The rest of it can no longer be read."""
        self._column_copies = ()

    def restore(self, snapshot: PrefixMapSnapshot, all_ids: Sequence[BlockId]) -> None:
        """Makes a new map as it was; `all_ids` are the ids of the blocks with entries, so that each is one object.

        Raises:
            ValueError: The snapshot is not of a map of this size.
            LookupError: A map or a block does not exist.
        """
        self._first_maps = dict(snapshot.first_maps)
        for first in range(0, len(snapshot.duplicates), self._num_maps):
            self._make_maps(first)
        self._block_hashes = list(snapshot.block_hashes.values)
        is_wide = len(self._by_hash) > _MAPS_PER_BYTE
        self._map_ids = array("I", snapshot.map_ids.values) if is_wide else bytearray(snapshot.map_ids.values)
        self._session_numbers = shared(snapshot.session_numbers.values)
        if len(self._session_numbers) != len(all_ids):
            raise ValueError("sessions of blocks are missing")
        for block_id, block_hash, map_id in zip(all_ids, self._block_hashes, self._map_ids, strict=True):
            if block_hash is not None:
                self._by_hash[map_id][block_hash] = block_id
                self._num_cached[map_id] += 1
        for i, hashes in snapshot.further_hashes:
            self._further_hashes[all_ids[i]] = hashes
            self._by_hash[self._map_ids[i]].update(dict.fromkeys(hashes, all_ids[i]))
        for by_hash, duplicates, all_copies in zip(self._by_hash, self._duplicates, snapshot.duplicates, strict=True):
            for block_hash, copies in all_copies:
                by_hash[block_hash] = all_ids[copies[0]]
                duplicates[block_hash] = OrderedDict.fromkeys(all_ids[i] for i in copies)
        self.pending.restore(snapshot.pending)
        self.evicted.restore(snapshot.evicted)
