"""Orders a pool's block events so that each parent is announced before its children, as routers need it.

1. A hash is announced in a tier from the event that stores it until the event that removes its last copy there.
2. A block whose parent no group has announced, in either tier, waits. It is announced after its parent, or never if it
   is removed first. A further copy of an announced block does not wait: it is left out, as it tells a router nothing.
3. No hit is lost by that in a pool with full attention: a hit there needs all blocks of the prefix.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvpool.core.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, Medium
from kvpool.core.ids import BlockHash, GroupId

_Place = tuple[GroupId, Medium]
_Key = tuple[_Place, BlockHash]


class ParentsFirst:
    """The order of one stream of events, which begins with a snapshot or with an empty cache."""

    def __init__(self) -> None:
        self._announced: dict[_Place, set[BlockHash]] = {}
        self._parents: dict[_Key, BlockHash] = {}  # of the blocks that wait
        self._waiting: dict[BlockHash, dict[_Key, BlockStored]] = {}  # by parent

    def ordered(self, events: Iterable[BlockEvent]) -> Iterator[BlockEvent]:
        """Yields the next events of the stream, without those that wait, and those that waited for them."""
        for event in events:
            match event:
                case BlockStored():
                    yield from self._announce(event)
                case BlockRemoved():
                    if self._remove(event):
                        yield event
                case AllBlocksCleared():
                    self._announced, self._parents, self._waiting = {}, {}, {}
                    yield event

    def _announce(self, event: BlockStored) -> Iterator[BlockStored]:
        """Yields an event of which the parent is known, then the blocks that waited for its blocks."""
        coming = [event]
        while coming:
            event = coming.pop()
            place, parent = (event.group_id, event.medium), event.parent_block_hash
            known = self._announced.get(place, set())
            if parent is None or any(parent in announced for announced in self._announced.values()):
                self._announced.setdefault(place, known).update(event.block_hashes)
                yield event
                coming += [each for block_hash in event.block_hashes for each in self._take_waiting(block_hash)]
            elif len(event.block_hashes) > 1:
                coming += reversed(_by_block(event))
            elif event.block_hashes[0] not in known:
                key = place, event.block_hashes[0]
                self._parents[key] = parent
                self._waiting.setdefault(parent, {})[key] = event

    def _take_waiting(self, parent: BlockHash) -> Iterable[BlockStored]:
        children = self._waiting.pop(parent, {}) if self._waiting else {}
        for key in children:
            del self._parents[key]
        return children.values()

    def _remove(self, event: BlockRemoved) -> bool:
        """Removes a hash with its last copy of a tier. Returns whether the hash was announced."""
        place = event.group_id, event.medium
        key = place, event.block_hash
        parent = self._parents.get(key)
        if event.copies_left:
            return parent is None
        self._announced.get(place, set()).discard(event.block_hash)
        if parent is None:
            return True
        del self._parents[key], self._waiting[parent][key]
        if not self._waiting[parent]:
            del self._waiting[parent]
        return False


def _by_block(event: BlockStored) -> list[BlockStored]:
    """An event of each block of a run."""
    size, ahead, parents = event.block_size, event.num_lookahead_tokens, (event.parent_block_hash, *event.block_hashes)
    return [
        replace(
            event,
            block_hashes=(block_hash,),
            parent_block_hash=parents[i],
            token_ids=event.token_ids[i * size : (i + 1) * size],
            lookahead_token_ids=event.lookahead_token_ids[i * ahead : (i + 1) * ahead],
        )
        for i, block_hash in enumerate(event.block_hashes)
    ]
