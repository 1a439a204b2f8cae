"""Which block holds the contents with a given hash, and who may read it.

1. A block has a hash exactly when the map of its group leads from that hash to it. Several blocks may carry one hash;
   the one cached first is found first.
2. A block is cached when its slots are allocated, a moment before the GPU fills it. Until its writer has said that the
   filling change was executed, the block is pending: its writer finds it (its own steps run in order), nobody else.
3. A block that loses its hash is pending no more; what takes its place starts anew.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvpool.core import ids
from kvpool.core.ids import BlockHash, BlockId, GroupId, SessionNumber

_NEVER: Final = ids.StepNumber(2**62)
"""After every change that a session can make."""
_MORE_LOOKED_UP: Final = 8
_MOST_LOOKED_UP: Final = 512
"""Hashes are looked up together: one at first, as most of what misses does so there, then times as many."""


class PrefixMap:
    """Maps (group, hash) to blocks, with the block's hash, group and writer in columns by block id."""

    __slots__ = (
        "_block_hashes",
        "_by_hash",
        "_duplicates",
        "_group_ids",
        "_num_cached",
        "_pending",
        "_session_numbers",
        "_unpublished",
    )

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        # The first copy; where several blocks carry one hash, `_duplicates` has them all, in order. An OrderedDict
        # finds its first key at once, however many before were deleted.
        self._by_hash: list[dict[BlockHash, BlockId]] = [{} for _ in range(num_groups)]
        self._duplicates: list[dict[BlockHash, OrderedDict[BlockId, None]]] = [{} for _ in range(num_groups)]
        self._block_hashes: list[BlockHash | None] = [None] * num_blocks
        self._group_ids = bytearray(num_blocks)
        self._session_numbers: list[SessionNumber] = [SessionNumber(0)] * num_blocks
        self._pending: dict[BlockId, ids.StepNumber] = {}
        self._unpublished: dict[SessionNumber, dict[ids.StepNumber, set[BlockId]]] = {}
        self._num_cached = [0] * num_groups

    def __len__(self) -> int:
        """Blocks that have a hash."""
        return sum(self._num_cached)

    def num_cached(self, group_id: GroupId) -> int:
        """Blocks of a group that have a hash."""
        return self._num_cached[group_id]

    def block_hash(self, block_id: BlockId) -> BlockHash | None:
        """The block's hash, if it has one."""
        return self._block_hashes[block_id]

    def hashed_among(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """Those of the blocks that have a hash, in their order."""
        block_hashes = self._block_hashes
        return [block_id for block_id in block_ids if block_hashes[block_id] is not None]

    def num_by_group(self, block_ids: Sequence[BlockId]) -> list[int]:
        """Of these blocks, which have hashes, how many are cached under each group."""
        num_groups, group_ids = len(self._by_hash), self._group_ids
        if num_groups == 1:
            return [len(block_ids)]
        found = bytes([group_ids[block_id] for block_id in block_ids])
        return [found.count(group_id) for group_id in range(num_groups)]

    def group_id(self, block_id: BlockId) -> GroupId:
        """Group under which a block that has a hash is cached."""
        return GroupId(self._group_ids[block_id])

    def session_number(self, block_id: BlockId) -> SessionNumber:
        """Session that filled a block that has a hash, by the number that it had when that was published."""
        return self._session_numbers[block_id]

    def pending(self) -> dict[BlockId, ids.StepNumber]:
        """The blocks that only their writer finds, and the change that fills each. Not to be changed."""
        return self._pending

    def is_visible(self, block_id: BlockId, reader: SessionNumber) -> bool:
        """Whether `reader` may use the contents of a block that has a hash."""
        return block_id not in self._pending or self._session_numbers[block_id] == reader

    def find(
        self, group_id: GroupId, hashes: Sequence[BlockHash], first: int, end: int, reader: SessionNumber
    ) -> list[BlockId]:
        """Finds the blocks of the longest prefix of `hashes[first:end]` that is cached and visible to `reader`.

        O(hit): little beyond it is looked at.
        """
        get = self._by_hash[group_id].get
        found: list[BlockId] = []
        size = 1
        while first < end:
            looked_up = hashes[first : min(first + size, end)]
            piece = [get(block_hash) for block_hash in looked_up]
            if not all(piece):
                found += piece[: piece.index(None)]  # type: ignore[arg-type]
                break
            found += piece  # type: ignore[arg-type]
            first += size
            size = min(_MORE_LOOKED_UP * size, _MOST_LOOKED_UP)
        return found if self._are_visible(found, reader) else self._visible(group_id, found, reader)

    def holds_all(
        self, group_id: GroupId, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId], reader: SessionNumber
    ) -> bool:
        """Whether each block has its hash, in this group, and `reader` may use it; it need not be the first copy."""
        block_hashes, group_ids = self._block_hashes, self._group_ids
        return (
            [block_hashes[block_id] for block_id in block_ids] == list(hashes)
            and [group_ids[block_id] for block_id in block_ids].count(group_id) == len(block_ids)
            and self._are_visible(block_ids, reader)
        )

    def _are_visible(self, block_ids: Sequence[BlockId], reader: SessionNumber) -> bool:
        pending, session_numbers = self._pending, self._session_numbers
        return not pending or not [True for b in block_ids if b in pending and session_numbers[b] != reader]

    def _visible(self, group_id: GroupId, found: Sequence[BlockId], reader: SessionNumber) -> list[BlockId]:
        """In place of each block its first copy that `reader` may read; ends where there is none."""
        visible: list[BlockId] = []
        for block_id in found:
            readable = next((copy for copy in self._copies(group_id, block_id) if self.is_visible(copy, reader)), None)
            if readable is None:
                break
            visible.append(readable)
        return visible

    def _copies(self, group_id: GroupId, first_copy: BlockId) -> Iterable[BlockId]:
        return self._duplicates[group_id].get(self._block_hashes[first_copy], (first_copy,))  # type: ignore[arg-type]

    def entries(self) -> Iterator[tuple[GroupId, BlockHash, BlockId]]:
        """All that the maps lead to. O(cached blocks)."""
        for group_id, by_hash in enumerate(self._by_hash):
            for block_hash, first_copy in by_hash.items():
                for block_id in self._copies(GroupId(group_id), first_copy):
                    yield GroupId(group_id), block_hash, block_id

    def first_copy(self, group_id: GroupId, block_hash: BlockHash) -> BlockId | None:
        """The block that was first cached with this hash, of those that have it; visible or not."""
        return self._by_hash[group_id].get(block_hash)

    def num_copies(self, group_id: GroupId, block_hash: BlockHash) -> int:
        """How many blocks carry this hash."""
        copies = self._duplicates[group_id].get(block_hash)
        return len(copies) if copies else int(block_hash in self._by_hash[group_id])

    def num_written_by(self, block_ids: Iterable[BlockId], session_number: SessionNumber) -> int:
        """How many of these blocks, which have hashes, `session_number` filled."""
        session_numbers = self._session_numbers
        return [session_numbers[block_id] for block_id in block_ids].count(session_number)

    def insert(
        self,
        group_id: GroupId,
        block_ids: Sequence[BlockId],
        hashes: Sequence[BlockHash],
        session_number: SessionNumber,
        sequence: ids.StepNumber,
    ) -> None:
        """Gives each block, which has no hash, its hash. `session_number` fills them with its change `sequence`."""
        by_hash, block_hashes, session_numbers, group_ids = (
            self._by_hash[group_id],
            self._block_hashes,
            self._session_numbers,
            self._group_ids,
        )
        by_sequence = self._unpublished.get(session_number)
        if by_sequence is None:
            by_sequence = self._unpublished[session_number] = {}
        unpublished = by_sequence.get(sequence)
        if unpublished is None:
            unpublished = by_sequence[sequence] = set()
        num_before, count = len(by_hash), len(block_ids)
        self._num_cached[group_id] += count
        if count == 1:  # a decode filled it
            block_id, block_hash = block_ids[0], hashes[0]
            if by_hash.setdefault(block_hash, block_id) != block_id:
                self._map_copies(group_id, block_ids, hashes)
            block_hashes[block_id], session_numbers[block_id], group_ids[block_id] = (
                block_hash,
                session_number,
                group_id,
            )
            self._pending[block_id] = sequence
            unpublished.add(block_id)
            return
        if not by_hash.keys().isdisjoint(hashes):
            self._map_copies(group_id, block_ids, hashes)
        else:
            by_hash.update(zip(hashes, block_ids, strict=True))
            if len(by_hash) - num_before != count:  # some stand twice in `hashes`
                for block_hash in hashes:
                    by_hash.pop(block_hash, None)
                self._map_copies(group_id, block_ids, hashes)
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            block_hashes[block_id] = block_hash
            session_numbers[block_id] = session_number
            group_ids[block_id] = group_id
        self._pending.update(dict.fromkeys(block_ids, sequence))
        unpublished.update(block_ids)

    def _map_copies(self, group_id: GroupId, block_ids: Sequence[BlockId], hashes: Sequence[BlockHash]) -> None:
        by_hash, duplicates = self._by_hash[group_id], self._duplicates[group_id]
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            first_copy = by_hash.setdefault(block_hash, block_id)
            if first_copy != block_id:
                if block_hash not in duplicates:
                    duplicates[block_hash] = OrderedDict({first_copy: None})
                duplicates[block_hash][block_id] = None

    def remove(self, block_id: BlockId) -> BlockHash:
        """Takes the hash of a block that has one away, and returns it."""
        block_hash = self._block_hashes[block_id]
        if block_hash is None:
            raise KeyError(block_id)
        group_id = self._group_ids[block_id]
        copies = self._duplicates[group_id].get(block_hash)
        if copies:
            del copies[block_id]
            self._by_hash[group_id][block_hash] = next(iter(copies))
            if len(copies) == 1:
                del self._duplicates[group_id][block_hash]
        else:
            del self._by_hash[group_id][block_hash]
        self._block_hashes[block_id] = None
        self._num_cached[group_id] -= 1
        sequence = self._pending.pop(block_id, None)
        if sequence is not None:
            self._forget_unpublished(block_id, sequence)
        return block_hash

    def remove_all(self, block_ids: Sequence[BlockId]) -> None:
        """Takes the hashes of these blocks away, which all have one."""
        block_hashes, group_ids, pending, num_cached = (
            self._block_hashes,
            self._group_ids,
            self._pending,
            self._num_cached,
        )
        if len(self._by_hash) == 1 and not self._duplicates[0] and pending.keys().isdisjoint(block_ids):
            by_hash = self._by_hash[0]
            for block_id in block_ids:
                del by_hash[block_hashes[block_id]]  # type: ignore[arg-type]  # has one
                block_hashes[block_id] = None
            num_cached[0] -= len(block_ids)
            return
        for block_id in block_ids:
            group_id = group_ids[block_id]
            if block_id in pending or self._duplicates[group_id]:
                self.remove(block_id)
                continue
            del self._by_hash[group_id][block_hashes[block_id]]  # type: ignore[arg-type]  # has one
            block_hashes[block_id] = None
            num_cached[group_id] -= 1

    def publish(self, session_number: SessionNumber, executed: ids.StepNumber) -> None:
        """Makes visible to all what `session_number` filled with its changes up to `executed`."""
        by_sequence = self._unpublished.get(session_number)
        if not by_sequence:
            return
        for sequence in [sequence for sequence in by_sequence if sequence <= executed]:
            for block_id in by_sequence.pop(sequence):
                del self._pending[block_id]
        if not by_sequence:
            del self._unpublished[session_number]

    def renumber_session(self, session_number: SessionNumber, new: SessionNumber) -> None:
        """Gives what only `session_number` finds to `new`, who has filled nothing yet. O(those blocks)."""
        by_sequence = self._unpublished.pop(session_number, None)
        if by_sequence:
            self._unpublished[new] = by_sequence
            for blocks in by_sequence.values():
                for block_id in blocks:
                    self._session_numbers[block_id] = new

    def hide(self, session_number: SessionNumber, block_ids: Iterable[BlockId]) -> None:
        """Lets blocks that only `session_number` finds never be published."""
        for block_id in block_ids:
            self._forget_unpublished(block_id, self._pending[block_id])
            self._pending[block_id] = _NEVER
            self._unpublished.setdefault(session_number, {}).setdefault(_NEVER, set()).add(block_id)

    def has_unpublished(self, session_number: SessionNumber) -> bool:
        """Whether there are blocks that only `session_number` finds."""
        return session_number in self._unpublished

    def unpublished_blocks(self, session_number: SessionNumber) -> list[BlockId]:
        """The blocks that only `session_number` finds, in the order they were cached."""
        return [b for blocks in self._unpublished.get(session_number, {}).values() for b in sorted(blocks)]

    def clear(self) -> None:
        """Takes every block's hash away. O(num_blocks)."""
        for by_hash, duplicates in zip(self._by_hash, self._duplicates, strict=True):
            by_hash.clear()
            duplicates.clear()
        self._block_hashes = [None] * len(self._block_hashes)
        self._pending.clear()
        self._unpublished.clear()
        self._num_cached = [0] * len(self._by_hash)

    def _forget_unpublished(self, block_id: BlockId, sequence: ids.StepNumber) -> None:
        session_number = self._session_numbers[block_id]
        by_sequence = self._unpublished[session_number]
        by_sequence[sequence].discard(block_id)
        if not by_sequence[sequence]:
            del by_sequence[sequence]
            if not by_sequence:
                del self._unpublished[session_number]
