"""The manager of one group: gives, caches and frees the blocks of layers that share a block table.

1. Block i of a table holds tokens [i * span, (i + 1) * span), or stands null: no token that is still to come looks at
   it. Nulls only lead: a table is `num_skipped` nulls, then blocks.
2. How many lead when n tokens are computed is the spec's to say (`num_skipped_tokens`), rounded down to whole blocks.
   It decides what a hit needs as well as what is freed behind a window, so a hit's nulls are those of its table.
3. A table is freed from its last block to its first, so that what a prefix is reached through is evicted last.
4. A group whose blocks cover several hash blocks finds a block by their hashes, joined.
5. A full block has a hash, unless it was evicted, or `Retention` has no use for it.
"""

from collections.abc import Iterable, Sequence

from kvpool.core import ids
from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.credit import Credit
from kvpool.core.blocks.retention import Retention
from kvpool.core.events import BlockStored, packed_token_ids
from kvpool.core.ids import NULL_BLOCK, BlockHash, BlockId, GroupId
from kvpool.core.sessions.request import BlockTable, Request
from kvpool.core.specs.kinds import CrossAttentionSpec, FullAttentionSpec, allocation_spec, num_draft_blocks
from kvpool.core.specs.pool_config import PoolConfig


class GroupManager:
    """Allocates, caches and frees the blocks of one group.

    Attributes:
        group_id: The group.
        spec: How its blocks are given.
        span_tokens: Tokens that a block covers, over all ranks of context parallelism.
        num_eagle_blocks: Blocks beyond a hit that must be cached too, to be computed again: what EAGLE's draft wrote
            into the last slot of a block depends on the token after it. Only kinds with a slot a token have any.
        sink_blocks: Blocks set aside for sinks, held from the start to the end.
        joins_hashes: Whether a block covers several hash blocks.
        counts_encoder_tokens: Whether its blocks hold what an encoder puts out, not the request's tokens.
        credit: What a table has room for without a change of the pool.
    """

    def __init__(self, config: PoolConfig, group_id: GroupId, block_pool: BlockPool) -> None:
        self.group_id = group_id
        self.spec = allocation_spec(config.groups[group_id].spec)
        self.span_tokens = config.span_tokens(group_id)
        self.num_eagle_blocks = int(config.use_eagle and self.spec.has_token_slots)
        self.sink_blocks = block_pool.get_new_blocks(config.num_sink_blocks[group_id])
        self._counters = block_pool.group_counters[group_id]
        self._counters.used_blocks += len(self.sink_blocks)
        self._counters.allocated_blocks += len(self.sink_blocks)
        self.credit = Credit.for_group(config, group_id)
        self._hashes_per_block = self.span_tokens // config.hash_block_size
        self.joins_hashes = self._hashes_per_block > 1
        self._retention = Retention.for_group(config, group_id)
        self._num_extra_blocks = num_draft_blocks(self.spec)
        self.counts_encoder_tokens = isinstance(self.spec, CrossAttentionSpec)
        self._pool = block_pool
        self._makes_events = config.makes_events

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that nothing looks at once `num_computed_tokens` tokens are computed."""
        return self.spec.num_skipped_tokens(num_computed_tokens) // self.span_tokens

    def hashes(self, request: Request) -> Sequence[BlockHash]:
        """The request's hashes, one for each of this group's full blocks. O(new hashes)."""
        per_block = self._hashes_per_block
        if per_block == 1:
            return request.hashes
        joined = request.joined_hashes.setdefault(per_block, [])
        hashes = request.hashes
        for end in range((len(joined) + 1) * per_block, len(hashes) + 1, per_block):
            joined.append(BlockHash(b"".join(hashes[end - per_block : end])))
        return joined

    def num_hashes_to_join(self, request: Request) -> int:
        """Hashes of the request that `hashes` has yet to join."""
        joined = request.joined_hashes.get(self._hashes_per_block, ())
        return len(request.hashes) - len(joined) * self._hashes_per_block

    def is_still_cached(self, promised: Sequence[BlockId], request: Request) -> bool:
        """Whether every promised block still has the hash it was promised for, visible to the request's session.

        Nulls lead in what was promised.
        """
        hashes, first, end = self.hashes(request), promised.count(NULL_BLOCK), len(promised)
        return end <= len(hashes) and self._pool.prefix_map.holds_all(
            self.group_id, hashes[first:end], promised[first:], request.session_number
        )

    def num_missing_blocks(self, table: BlockTable, num_tokens: int, num_encoder_tokens: int) -> int:
        """Blocks that the table lacks for `num_tokens` tokens; not positive if it lacks none."""
        if self.counts_encoder_tokens:
            num_tokens = num_encoder_tokens
        return -(-num_tokens // self.span_tokens) + self._num_extra_blocks - len(table.block_ids)

    def add_hit_blocks(self, table: BlockTable, computed: Sequence[BlockId]) -> None:
        """Puts a hit's blocks into an empty table."""
        table.block_ids.extend(computed)
        table.num_cached = len(computed)
        if not self.spec.keeps_all:
            table.num_skipped = computed.count(NULL_BLOCK)
            computed = computed[table.num_skipped :]
        self._counters.used_blocks += self._pool.touch(computed)

    def allocate_new_blocks(self, table: BlockTable, count: int) -> list[BlockId]:
        """Gives the table `count` new blocks, at least 1; returns them. The caller has checked for room."""
        new = self.get_new_blocks(count)
        table.block_ids.extend(new)
        return new

    def get_new_blocks(self, count: int) -> list[BlockId]:
        """Takes `count` blocks, at least 1, for the caller to put into tables. It has checked for room."""
        new = self._pool.get_new_blocks(count)
        self._counters.used_blocks += count
        self._counters.allocated_blocks += count
        return new

    def remove_skipped_blocks(self, table: BlockTable, num_computed_tokens: int) -> list[BlockId]:
        """Frees the blocks that nothing looks at any more, the last first; null stands in their place. Returns them."""
        start, end = table.num_skipped, min(self.num_skipped_blocks(num_computed_tokens), len(table.block_ids))
        if start >= end:
            return []
        if not table.num_skipped:
            table.block_ids = table.block_ids.copy()  # see BlockTable: once in the life of a table
        skipped = table.block_ids[start:end]
        table.block_ids[start:end] = [NULL_BLOCK] * len(skipped)
        table.num_skipped = end
        num_uncached = None if self._retention else min(max(end - table.num_cached, 0), len(skipped))
        self._counters.used_blocks -= self._pool.free_blocks(skipped[::-1], num_uncached)
        return skipped

    def cache_blocks(self, request: Request, num_tokens: int, sequence: ids.StepNumber) -> None:
        """Caches the full blocks among the first `num_tokens` tokens, which the change `sequence` fills.

        Those that are not kept (see `retention`) are passed over. The caller has found some that are not.
        """
        table = request.tables[self.group_id]
        end = num_tokens // self.span_tokens
        start = table.num_cached
        if start < table.num_skipped:  # noqa: PLR1730 - max() takes longer, and this is done for each block
            start = table.num_skipped
        table.num_cached = end
        if start >= end:
            return
        all_hashes = self.hashes(request)
        runs = ((start, end),) if self._retention is None else self._retention.runs(request, start, end)
        for start, end in runs:
            hashes, block_ids = all_hashes[start:end], table.block_ids[start:end]
            self._pool.cache_full_blocks(self.group_id, block_ids, hashes, request.session_number, sequence)
            if self._makes_events:
                self._record_stored(request, block_ids, hashes, start)

    def _record_stored(
        self, request: Request, block_ids: list[BlockId], hashes: Sequence[BlockHash], start: int
    ) -> None:
        """Tells of the request's blocks from number `start` on, which were cached: one run, named by its parent."""
        span, end = self.span_tokens, start + len(block_ids)
        self._pool.record_stored(
            block_ids,
            BlockStored(
                block_hashes=tuple(hashes),
                parent_block_hash=self.hashes(request)[start - 1] if start else None,
                token_ids=packed_token_ids(request.token_ids[start * span : end * span]),
                block_size=span,
                lora_name=request.lora_name,
                group_id=self.group_id,
            ),
        )

    def free(self, table: BlockTable) -> list[BlockId]:
        """Empties the table; returns what it held, the last first, to be read at once: the list is the free list's."""
        held = table.block_ids[: table.num_skipped - 1 : -1] if table.num_skipped else table.block_ids[::-1]
        num_uncached = None if self._retention else min(len(table.block_ids) - table.num_cached, len(held))
        self._counters.used_blocks -= self._pool.free_blocks(held, num_uncached)
        table.clear()
        return held

    def get_num_common_prefix_blocks(self, table: BlockTable, others: Iterable[BlockTable]) -> int:
        """Leading blocks that the table has in common with all others; 0 for kinds that skip or hold no tokens.

        O(others x blocks in common).
        """
        if not isinstance(self.spec, FullAttentionSpec):
            return 0
        common = table.block_ids
        for other in others:
            count = min(len(common), len(other.block_ids))
            common, same = common[:count], other.block_ids[:count]
            if common != same:
                common = common[: next(i for i in range(count) if common[i] != same[i])]
        return len(common)
