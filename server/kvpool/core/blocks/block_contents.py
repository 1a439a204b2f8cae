"""What the events of a pool say of its cached blocks.

1. A block of the first tier is announced when it is cached, a block of host memory when it is published (see
   `HostTier`). If it loses its hash before, no event names it.
2. A copy in the other tier has the contents that its source had when it was ordered, as the source can be evicted
   before the copy is announced.
3. Copies with one hash are counted by tier and group, over all scopes.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.events import TOKEN_ID_BYTES, BlockRemoved, BlockStored, Medium, packed_token_ids
from kvpool.core.ids import BlockHash, BlockId, GroupId
from kvpool.core.snapshots import Column, ColumnCopy, extend
from kvpool.core.specs.pool_config import PoolConfig

# Parent's hash, token ids as bytes, LoRA name. The garbage collector does not track plain tuples of atoms.
Contents = tuple[BlockHash | None, bytes, str | None]
_SLICE_LENGTH: Final = 1024
_FIRST, _HOST = Medium.FIRST_TIER, Medium.HOST_MEMORY  # looking a member up in its enum takes longer


class BlockContents:
    """Parent hash, token ids and LoRA name that each cached block was stored with, in a column by block id.

    The token ids are those of the block's last hash block, then those after it that its hash covers.

    Attributes:
        further: Of blocks that events name by further hashes, the same for each of these, with the hash first: of hash
            blocks within them, and of prefixes that end there. Those within come in reverse order. Read-only.
    """

    __slots__ = ("_contents", "_copy", "_first_host_id", "_lookahead_bytes", "_num_copies", "_prefix_map", "further")

    def __init__(self, config: PoolConfig, prefix_map: PrefixMap) -> None:
        self._prefix_map = prefix_map
        self._first_host_id = config.num_blocks
        self._lookahead_bytes = config.hash_scheme.num_lookahead_tokens * TOKEN_ID_BYTES
        self._contents: list[Contents | None] = [None] * prefix_map.num_columns
        # By tier and group, the number of blocks that each hash names. A count at each removal would be O(scopes).
        self._num_copies: list[list[dict[BlockHash, int]]] = [[{} for _ in config.groups] for _ in Medium]
        self._copy: ColumnCopy[Contents | None] | None = None  # while a snapshot is read
        self.further: dict[BlockId, list[tuple[BlockHash, Contents]]] = {}

    def extend_columns(self, num_columns: int) -> None:
        """Makes entries for the first `num_columns` blocks."""
        extend(self._contents, num_columns, None)

    def put(self, block_ids: Sequence[BlockId], stored: BlockStored) -> None:
        """Stores the contents of a run of blocks that was cached, of which each may have several hashes. O(tokens)."""
        if self._copy:
            self._copy.before_change(block_ids)
        by_hash = _by_hash(stored)
        per_block = len(by_hash) // len(block_ids)
        for i, block_id in enumerate(block_ids, 1):
            self._contents[block_id] = by_hash[i * per_block - 1][1]
            if per_block > 1:
                within = by_hash[(i - 1) * per_block : i * per_block - 1]
                self.further.setdefault(block_id, []).extend(reversed(within))
        self._count(stored.medium, stored.group_id, stored.block_hashes)

    def put_further(self, block_id: BlockId, stored: BlockStored) -> None:
        """Stores the contents of further hashes of a block."""
        self.further.setdefault(block_id, []).extend(reversed(_by_hash(stored)))
        self._count(stored.medium, stored.group_id, stored.block_hashes)

    def copy(self, source: BlockId, target: BlockId) -> None:
        """Stores the contents of a block for one of the other tier, too. Call `announce` when events are to name it."""
        if self._copy:
            self._copy.before_change((target,))
        self._contents[target] = self._contents[source]
        if source in self.further:
            self.further[target] = self.further[source].copy()

    def announce(self, block_ids: Iterable[BlockId]) -> list[BlockStored]:
        """Returns the events for blocks that `copy` has stored."""
        events = self.stored(block_ids)
        for event in events:
            self._count(event.medium, event.group_id, event.block_hashes)
        return events

    def _count(self, medium: Medium, group_id: GroupId, block_hashes: Iterable[BlockHash]) -> None:
        num_copies = self._num_copies[medium][group_id]
        for block_hash in block_hashes:
            num_copies[block_hash] = num_copies.get(block_hash, 0) + 1

    def hashes(self, block_id: BlockId, block_hash: BlockHash) -> list[BlockHash]:
        """All hashes by which events name a block with this hash."""
        return [block_hash, *(each for each, _ in self.further.get(block_id, ()))]

    def get(self, block_id: BlockId) -> Contents | None:
        """Contents that a block was stored with; None if it has no hash, or is not announced."""
        is_hidden = block_id >= self._first_host_id and block_id in self._prefix_map.pending.steps
        return None if is_hidden else self._contents[block_id]

    def _medium(self, block_id: BlockId) -> Medium:
        return _HOST if block_id >= self._first_host_id else _FIRST

    def stored(self, block_ids: Iterable[BlockId]) -> list[BlockStored]:
        """Returns events that store those of the blocks that are announced, each for a run of blocks of a prefix."""
        prefix_map, runs = self._prefix_map, list[_Run]()
        for block_id in block_ids:
            block_hash, held = prefix_map.block_hash(block_id), self.get(block_id)
            if block_hash is None or held is None:
                continue
            group_id, medium = prefix_map.group_id(block_id), self._medium(block_id)
            for each, (parent, packed, lora_name) in (*reversed(self.further.get(block_id, ())), (block_hash, held)):
                kind = (group_id, medium, lora_name, len(packed))
                last = runs[-1] if runs else None
                if last is None or (last.kind, last.hashes[-1]) != (kind, parent):
                    last = _Run(kind, parent)
                    runs.append(last)
                last.hashes.append(each)
                end = len(packed) - self._lookahead_bytes
                last.token_ids.frombytes(packed[:end])
                last.lookahead_token_ids.frombytes(packed[end:])
        return [run.stored() for run in runs]

    def drop(self, block_id: BlockId) -> list[BlockRemoved]:
        """Removes the contents of a block that is about to lose its hash.

        Returns:
            An event for each hash by which events have named it.
        """
        events: list[BlockRemoved] = []
        is_first = block_id < self._first_host_id
        if is_first or self.get(block_id):
            group_id, medium = self._prefix_map.group_id(block_id), _FIRST if is_first else _HOST
            num_copies = self._num_copies[medium][group_id]
            for each in self.hashes(block_id, self._prefix_map.block_hash(block_id)):  # type: ignore[arg-type]  # has one
                num_copies[each] -= 1
                events.append(BlockRemoved(each, group_id, num_copies[each] or num_copies.pop(each), medium))
        if self._copy:
            self._copy.before_change((block_id,))
        self._contents[block_id] = None
        self.further.pop(block_id, None)
        return events

    def move(self, source: BlockId, target: BlockId) -> None:
        """Makes the contents of one block those of another."""
        if self._copy:
            self._copy.before_change((source, target))
        self._contents[target], self._contents[source] = self._contents[source], None

    def clear(self) -> None:
        """Removes all contents. O(blocks that were ever used)."""
        self._contents = [None] * len(self._contents)
        self._num_copies = [[{} for _ in of_medium] for of_medium in self._num_copies]
        self.further.clear()
        self._copy = None  # reads the earlier list, which no longer changes

    def snapshot(self) -> Column[Contents | None]:
        """The contents at this moment; read them before `end_snapshot`."""
        self._copy = ColumnCopy(self._contents)
        return Column(self._copy, _SLICE_LENGTH)

    def end_snapshot(self) -> None:
        """Ends a snapshot. The rest of it can no longer be read."""
        self._copy = None

    def restore(
        self, contents: Column[Contents | None], further: Iterable[tuple[BlockId, list[tuple[BlockHash, Contents]]]]
    ) -> None:
        """Makes new contents as they were, after the prefix map.

        Raises:
            ValueError: The snapshot is of another number of blocks.
        """
        self._contents, self.further = list(contents.values), dict(further)
        if len(self._contents) != self._prefix_map.num_columns:
            raise ValueError("contents of blocks are missing")
        for i, block_hash in enumerate(self._prefix_map.hashes(slice(None))):
            block_id = BlockId(i)
            if block_hash is not None and self.get(block_id):
                hashes = self.hashes(block_id, block_hash)
                self._count(self._medium(block_id), self._prefix_map.group_id(block_id), hashes)


def _by_hash(stored: BlockStored) -> list[tuple[BlockHash, Contents]]:
    """Each hash of an event, with its contents."""
    packed, size_bytes = stored.token_ids.tobytes(), stored.block_size * TOKEN_ID_BYTES
    ahead, ahead_bytes = stored.lookahead_token_ids.tobytes(), stored.num_lookahead_tokens * TOKEN_ID_BYTES
    parents = (stored.parent_block_hash, *stored.block_hashes)
    own = (
        packed[i * size_bytes : (i + 1) * size_bytes] + ahead[i * ahead_bytes : (i + 1) * ahead_bytes]
        for i in range(len(stored.block_hashes))
    )
    contents = ((*each, stored.lora_name) for each in zip(parents, own, strict=False))
    return list(zip(stored.block_hashes, contents, strict=True))


@dataclass(slots=True)
class _Run:
    """Consecutive blocks of one prefix, which have group, tier, LoRA name and bytes of token ids in common."""

    kind: tuple[GroupId, Medium, str | None, int]
    parent: BlockHash | None
    hashes: list[BlockHash] = field(default_factory=list)
    token_ids: "array[int]" = field(default_factory=lambda: packed_token_ids(()))
    lookahead_token_ids: "array[int]" = field(default_factory=lambda: packed_token_ids(()))

    def stored(self) -> BlockStored:
        """The run as an event."""
        group_id, medium, lora_name, _ = self.kind
        block_size = len(self.token_ids) // len(self.hashes)
        run = tuple(self.hashes), self.parent, self.token_ids, block_size
        return BlockStored(*run, lora_name, group_id, self.lookahead_token_ids, medium)
