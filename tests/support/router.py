"""A router that follows llm-d's rules for block events.

1. A block's key is the prefix of tokens that ends with it, by its parent's key. An event of unknown parent is lost.
2. The hashes and the keys of an event belong together in order. If they differ in number, a hash has several keys, or a
   key several hashes.
3. A removal takes the group from the keys of the hash. A hash is known while a group has one of its keys.
"""

from collections.abc import Iterable, Sequence

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from kvpool.core.ids import BlockHash, GroupId

Tokens = tuple[int, ...]


def announced(pool: KVCacheManager) -> set[tuple[GroupId, BlockHash]]:
    """Each hash by which the events name a cached block of either tier, with its group."""
    prefix_map, contents = pool.blocks.prefix_map, pool.blocks.contents
    assert contents
    return {
        (group_id, each)
        for group_id, block_hash, block_id in prefix_map.entries()
        if block_hash == prefix_map.block_hash(block_id) and contents.get(block_id)
        for each in contents.hashes(block_id, block_hash)
    }


class Router:
    """The map of one engine.

    Attributes:
        groups: The groups that have cached the last block of each prefix.
        num_lost: Number of events with an unknown parent.
    """

    def __init__(self, block_tokens: int) -> None:
        self.groups: dict[Tokens, set[int]] = {}
        self.num_lost = 0
        self._block_tokens = block_tokens
        self._keys: dict[int | bytes, list[Tokens]] = {}

    def apply(self, events: Iterable[BlockEvent]) -> None:
        """Applies events as kvpool has them."""
        for event in events:
            match event:
                case BlockStored():
                    tokens = tuple(event.token_ids)
                    self.store(event.group_id, event.block_hashes, event.parent_block_hash, tokens)
                case BlockRemoved(copies_left=0):
                    self.remove(event.group_id, [event.block_hash])
                case AllBlocksCleared():
                    self.clear()

    def store(
        self, group: int, hashes: Sequence[int | bytes], parent: int | bytes | None, tokens: tuple[int, ...]
    ) -> None:
        """Applies a BlockStored event."""
        if parent is not None and parent not in self._keys:
            self.num_lost += 1
            return
        before, size = self._keys[parent][-1] if parent is not None else (), self._block_tokens
        keys = [(*before, *tokens[:end]) for end in range(size, len(tokens) + 1, size)]
        known: dict[int | bytes, list[Tokens]] = {}
        count = max(len(hashes), len(keys))
        for i in range(count):
            known.setdefault(hashes[i * len(hashes) // count], []).append(keys[i * len(keys) // count])
        self._keys.update(known)
        for key in keys:
            self.groups.setdefault(key, set()).add(group)

    def remove(self, group: int, hashes: Iterable[int | bytes]) -> None:
        """Applies a BlockRemoved event."""
        for block_hash in hashes:
            keys = self._keys.get(block_hash, [])
            for key in keys:
                self.groups.get(key, set()).discard(group)
            if not any(self.groups.get(key) for key in keys):
                self._keys.pop(block_hash, None)

    def clear(self) -> None:
        """Applies an AllBlocksCleared event."""
        self.groups.clear()
        self._keys.clear()

    def score(self, tokens: Sequence[int]) -> int:
        """Number of tokens of the first blocks that any group has."""
        whole, end = tuple(tokens), self._block_tokens
        while end <= len(whole) and self.groups.get(whole[:end]):
            end += self._block_tokens
        return end - self._block_tokens
