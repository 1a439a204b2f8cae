"""The prefixes that a pool caches, as a router tracks them.

    index = PrefixIndex()
    for batch in client.watch("llama", snapshot=True):
        index.apply(batch)

1. While `is_whole`, the index is the pool's map after batch `sequence`, exactly.
2. When a watch restarts, the map stays as it was until the new snapshot is complete. Entries that are known to be lost
   (another epoch, or another server process) are removed at once.
3. A hash is cached while a tier has it. Each look-up takes a medium, to ask for that tier only.
"""

from collections.abc import Sequence
from typing import Final

from kvpool.client.transports.transport import EventBatch, WatchKind
from kvpool.core.events import AllBlocksCleared, BlockEvent, BlockStored, Medium
from kvpool.core.ids import BlockHash, GroupId

_Map = dict[GroupId, dict[BlockHash, int]]
_ANY: Final = sum(1 << medium for medium in Medium)


class PrefixIndex:
    """The map of one pool. One thread updates it; other threads may look up at the same time.

    Attributes:
        is_whole: Whether a complete snapshot was applied.
        sequence: The newest batch that was applied.
        epoch: The pool's epoch; 0 before the first message.
        boot_id: Identifies the run of the server process.
        time_seconds: Time of the newest message, heartbeats included, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self.sequence = self.epoch = 0
        self.boot_id = ""
        self.time_seconds = 0.0
        self._cached: _Map = {}
        self._coming: _Map | None = None  # the next map, while a snapshot arrives

    def __len__(self) -> int:
        """Number of cached hashes, over all groups. A hash of several blocks, or of both tiers, counts once."""
        return sum(map(len, self._cached.values()))

    def __repr__(self) -> str:
        return f"<PrefixIndex: {len(self)} hashes after batch {self.sequence}, whole: {self.is_whole}>"

    def num_prefix_blocks(
        self, block_hashes: Sequence[BlockHash], group_id: int = 0, medium: Medium | None = None
    ) -> int:
        """Counts the first blocks of a request that are cached in a group. O(hit).

        Args:
            block_hashes: The hashes of the group's blocks, as `Request.hashes`. If a block covers several hash blocks,
                the last of their hashes. The index has all of them.
            group_id: The group. A group with a window caches only the last blocks: see `cached`.
            medium: The tier; None for any.
        """
        known, media = self._cached.get(GroupId(group_id), {}), _bits(medium)
        missed = (i for i, block_hash in enumerate(block_hashes) if not known.get(block_hash, 0) & media)
        return next(missed, len(block_hashes))

    def cached(self, block_hashes: Sequence[BlockHash], group_id: int = 0, medium: Medium | None = None) -> list[bool]:
        """Returns, for each block, whether it is cached in a group, in a tier; None for any."""
        known, media = self._cached.get(GroupId(group_id), {}), _bits(medium)
        return [known.get(block_hash, 0) & media > 0 for block_hash in block_hashes]

    def entries(self, medium: Medium | None = None) -> set[tuple[GroupId, BlockHash]]:
        """Returns all hashes that are cached in a tier, None for any, with their groups. O(hashes)."""
        bits, groups = _bits(medium), self._cached.items()
        return {(group_id, each) for group_id, known in groups for each, media in known.items() if media & bits}

    def apply(self, batch: EventBatch) -> None:
        """Applies the next message of a watch with a snapshot."""
        if (batch.boot_id, batch.epoch) != (self.boot_id, self.epoch):
            if batch.boot_id != self.boot_id or batch.kind is WatchKind.START:
                self._cached = {}  # within one boot, the batch that changes the epoch clears the map
            self.boot_id, self.epoch = batch.boot_id, batch.epoch
        if batch.kind is WatchKind.START:
            self._coming, self.is_whole = {}, False
        for event in batch.events:
            self._apply(event, self._cached if self._coming is None else self._coming)
        if batch.kind is WatchKind.SNAPSHOT_END and self._coming is not None:
            self._cached, self._coming, self.is_whole = self._coming, None, True
        self.sequence, self.time_seconds = batch.sequence, batch.time_seconds

    def _apply(self, event: BlockEvent, known: _Map) -> None:
        match event:
            case BlockStored():
                in_group, bit = known.setdefault(event.group_id, {}), 1 << event.medium
                for block_hash in event.block_hashes:
                    in_group[block_hash] = in_group.get(block_hash, 0) | bit
            case AllBlocksCleared():
                known.clear()
                self._cached.clear()
            case _:
                in_group = known.get(event.group_id, {})
                media = in_group.get(event.block_hash, 0) & ~(1 << event.medium)
                if not event.copies_left and media:
                    in_group[event.block_hash] = media
                elif not event.copies_left:
                    in_group.pop(event.block_hash, None)


def _bits(medium: Medium | None) -> int:
    return _ANY if medium is None else 1 << medium
