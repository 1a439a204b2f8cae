"""The manager of a group whose layers keep every token: full attention and MLA.

1. Block i of a table holds tokens [i * block_size, (i + 1) * block_size); nothing is ever skipped.
2. A hit is the longest run of cached blocks from the first. The caller bounds it so that one token is left to compute.
3. With EAGLE the last block of a hit is given up: its last hidden states are needed and not kept.
4. A table is freed from its last block to its first, so that what a prefix is reached through is evicted last.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from kvpool.server.core import types
from kvpool.server.core.block_pool import BlockPool
from kvpool.server.core.config import PoolConfig
from kvpool.server.core.events import BlockStored
from kvpool.server.core.request import BlockTable, Request
from kvpool.server.core.types import BlockHash, BlockId, GroupId, WriterId


class FullAttentionManager:
    """Looks up, allocates, caches and frees the blocks of one group."""

    def __init__(self, config: PoolConfig, group_id: GroupId, block_pool: BlockPool) -> None:
        self.group_id = group_id
        self.block_size = config.groups[group_id].spec.block_size * config.dcp_world_size
        self._pool = block_pool
        self._use_eagle = config.use_eagle
        self._makes_events = config.makes_events

    def find_longest_hit(self, hashes: Sequence[BlockHash], max_tokens: int, reader: WriterId) -> list[BlockId]:
        """Finds the cached blocks of the longest prefix of at most `max_tokens` tokens. Changes nothing."""
        found = self._pool.prefix_map.find(self.group_id, islice(hashes, max_tokens // self.block_size), reader)
        if self._use_eagle and found:
            found.pop()
        return found

    def still_holds(self, promised: Sequence[BlockId], hashes: Sequence[BlockHash], reader: WriterId) -> bool:
        """Whether every promised block still has the hash it was promised for, visible to `reader`."""
        prefix_map = self._pool.prefix_map
        return len(promised) <= len(hashes) and all(
            prefix_map.hash_of(block_id) == block_hash
            and prefix_map.group_of(block_id) == self.group_id
            and prefix_map.is_visible(block_id, reader)
            for block_id, block_hash in zip(promised, hashes, strict=False)
        )

    def num_blocks_to_allocate(self, table: BlockTable, num_tokens: int, computed: Sequence[BlockId]) -> int:
        """Free blocks that it takes for the table, with the hit `computed`, to have room for `num_tokens` tokens."""
        required = -(-num_tokens // self.block_size)
        missing = max(required - len(table.block_ids) - len(computed), 0)
        return missing + self._pool.num_free_among(computed)

    def adopt(self, table: BlockTable, computed: Sequence[BlockId]) -> None:
        """Puts a hit's blocks into an empty table."""
        self._pool.touch(computed)
        table.block_ids.extend(computed)
        table.num_cached = len(computed)

    def allocate(self, table: BlockTable, num_tokens: int) -> list[BlockId]:
        """Gives the table room for `num_tokens` tokens; returns the new blocks. The caller has checked for room."""
        missing = -(-num_tokens // self.block_size) - len(table.block_ids)
        if missing <= 0:
            return []
        new = self._pool.take(missing)
        table.block_ids.extend(new)
        return new

    def cache(self, request: Request, num_tokens: int, sequence: types.Sequence) -> None:
        """Caches the full blocks among the first `num_tokens` tokens, which the change `sequence` fills."""
        table = request.tables[self.group_id]
        start, end = table.num_cached, num_tokens // self.block_size
        if start >= end:
            return
        hashes = request.hashes[start:end]
        self._pool.cache(self.group_id, table.block_ids[start:end], hashes, request.writer, sequence)
        table.num_cached = end
        if self._makes_events:
            self._pool.record(
                BlockStored(
                    block_hashes=tuple(hashes),
                    parent_block_hash=request.hashes[start - 1] if start else None,
                    token_ids=tuple(request.token_ids[start * self.block_size : end * self.block_size]),
                    block_size=self.block_size,
                    lora_name=request.lora_name,
                    group_id=self.group_id,
                )
            )

    def free(self, table: BlockTable) -> None:
        """Empties the table."""
        self._pool.release(reversed(table.block_ids))
        table.block_ids = []
        table.num_cached = 0

    @staticmethod
    def num_common_prefix_blocks(table: BlockTable, others: Iterable[BlockTable]) -> int:
        """Leading blocks that the table has in common with all others. O(others x blocks in common)."""
        common = table.block_ids
        for other in others:
            if not common:
                break
            differing = (i for i, pair in enumerate(zip(common, other.block_ids, strict=False)) if pair[0] != pair[1])
            common = common[: next(differing, min(len(common), len(other.block_ids)))]
        return len(common)
