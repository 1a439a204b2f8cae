"""The manager of one group: allocates, caches and frees the blocks of layers that share a block table.

1. Block i of a table holds tokens [i * span, (i + 1) * span), or is null: no future token attends to it. Null blocks
   only come first: a table is `num_skipped` null blocks, then blocks. `StateManager` makes an exception.
2. The spec determines which leading blocks are freed when n tokens are computed (`num_skipped_tokens`, rounded down to
   whole blocks), and which blocks of a hit of n tokens are null (`num_unread_tokens`). These are the same, unless the
   spec retains tokens that nothing reads. The null blocks of a hit are those of its table.
3. A table is freed from its last block to its first, so that the blocks that lead to a prefix are evicted last.
4. A group whose blocks cover several hash blocks finds a block by the hash of the last one, which depends on all tokens
   before it.
5. A full block has a hash, unless it was evicted, `Retention` does not keep it, or its table stopped caching. With
   sparse caching, a block is cached once a hit can end at or behind it: up to the last multiple of the hit alignment,
   and with EAGLE the block after that. As in vLLM since 0.32; it matters only between groups of different block sizes.
   Where hashes also cover tokens after their blocks, a block is cached once these are known.
6. With partial hits, a hit of full attention can also end within a block: within a cached block, or at a tail. This is
   the end of the last whole hash block before the last token of a prompt; the block that contains it has its hash, too.
   A request that continues within a block gets a copy of it, because the block is shared. Blocks only grow at their
   end, so the source may be written to before the copy is made.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from kvpool.core import ids
from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.retention import Retention, Run
from kvpool.core.events import BlockStored, packed_token_ids
from kvpool.core.ids import MAX_TOKENS, NULL_BLOCK, BlockHash, BlockId, GroupId, MapId
from kvpool.core.sessions.request import BlockCopy, BlockTable, Request
from kvpool.core.specs.kinds import CrossAttentionSpec, FullAttentionSpec, allocation_spec, num_draft_blocks
from kvpool.core.specs.pool_config import PoolConfig


class GroupManager:
    """Allocates, caches and frees the blocks of one group.

    Attributes:
        group_id: The group.
        spec: Spec that determines how blocks are allocated.
        span_tokens: Tokens per block, over all ranks of context parallelism.
        num_eagle_blocks: Blocks after a hit that must be cached too, and are computed again; hash blocks of a group in
            which hits can end within blocks. With EAGLE, the draft's state in the last slot of a block depends on the
            token after it. Only groups with layers of the draft model have such blocks, and only kinds with a slot per
            token.
        sink_blocks: Blocks reserved for sinks, held during the lifetime of the pool.
        selects_hashes: Whether a block covers several hash blocks.
        counts_encoder_tokens: Whether the blocks hold the encoder's output instead of the request's tokens.
        has_gaps: Whether tables have null blocks between others.
        resumes_within: Whether a hit can end within a block; see rule 6.
        hit_span_tokens: A hit that the group alone can serve is a multiple of this number of tokens.
        caches_tails: Whether `cache_tail` has to be called.
    """

    has_gaps: ClassVar[bool] = False

    def __init__(self, config: PoolConfig, group_id: GroupId, block_pool: BlockPool) -> None:
        self.group_id = group_id
        self.spec = allocation_spec(config.groups[group_id].spec)
        self.span_tokens = config.span_tokens(group_id)
        self._use_eagle = config.use_eagle
        self.num_eagle_blocks = config.num_eagle_blocks(group_id)
        self.sink_blocks = block_pool.get_new_blocks(group_id, config.num_sink_blocks[group_id])
        self._hashes_per_block = self.span_tokens // config.hash_block_size
        self.selects_hashes = self._hashes_per_block > 1
        self._hash_tokens = config.hash_block_size
        self.resumes_within = self.caches_tails = config.partial_hits and self.selects_hashes and self.spec.is_cached
        self.hit_span_tokens = self._hash_tokens if self.resumes_within else self.span_tokens
        self._retention = Retention.for_group(config, group_id)
        self._caches_all = self._retention is None and not self.has_gaps and not self.resumes_within
        is_sparse = config.enable_caching and config.retention_tokens is not None and not config.partial_hits
        self._blocks_per_hit = config.hit_alignment // self.span_tokens if is_sparse else 1  # see rule 5
        self._num_extra_blocks = num_draft_blocks(self.spec)
        self.counts_encoder_tokens = isinstance(self.spec, CrossAttentionSpec)
        self._pool = block_pool
        self._caches = config.enable_caching and self.spec.is_cached
        self._lookahead_tokens = config.hash_scheme.num_lookahead_tokens
        # As in vLLM: beside other groups, only in those that compute the last block of a hit again.
        is_reprefilled = len(config.groups) == 1 or self.num_eagle_blocks
        self._num_reprefillable = config.num_reprefillable_tokens if is_reprefilled else 0
        self._caches_later = self._blocks_per_hit > 1 or self._lookahead_tokens > 0 or self._num_reprefillable > 0
        self._makes_events = config.makes_events

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Number of leading blocks that no token attends to once `num_computed_tokens` tokens are computed."""
        return self.spec.num_skipped_tokens(num_computed_tokens) // self.span_tokens

    def num_unread_blocks(self, num_computed_tokens: int) -> int:
        """Number of leading blocks of a hit of `num_computed_tokens` tokens that nothing reads."""
        return self.spec.num_unread_tokens(num_computed_tokens) // self.span_tokens

    def can_go_back(self, table: BlockTable, num_computed_tokens: int) -> bool:
        """Whether a request can go back to this number of computed tokens: it holds all blocks that it needs then.

        Tokens that are replayed need no blocks before those of the hit.
        """
        return table.num_skipped <= self.num_unread_blocks(num_computed_tokens + self.spec.num_replayed_tokens)

    def map_id(self, request: Request) -> MapId:
        """The map in which the request's blocks of this group are cached and found."""
        return request.first_map + self.group_id  # type: ignore[return-value]  # NewType is slow to call

    def hashes(self, request: Request) -> Sequence[BlockHash]:
        """Returns the request's hashes, one per full block of this group. O(new hashes)."""
        per_block = self._hashes_per_block
        if per_block == 1:
            return request.hashes
        found = request.last_hashes.setdefault(per_block, [])
        found += request.hashes[(len(found) + 1) * per_block - 1 :: per_block]
        return found

    def num_hashes_to_select(self, request: Request) -> int:
        """Number of the request's hashes from which `hashes` has yet to select."""
        found = request.last_hashes.get(self._hashes_per_block, ())
        return len(request.hashes) - len(found) * self._hashes_per_block

    def is_still_cached(self, block_ids: Sequence[BlockId], request: Request, num_tokens: int) -> bool:
        """Whether every block of an earlier hit still has its hash and is visible to the request's session.

        The null blocks of the hit come first.
        """
        hashes, first, end = self.hashes(request), block_ids.count(NULL_BLOCK), len(block_ids)
        map_id, reader = self.map_id(request), request.session_number
        if end and self.ends_within(num_tokens):
            tails = self.tail_hashes(request, num_tokens)
            if not self._pool.prefix_map.holds(map_id, tails, block_ids[-1], reader):
                return False
            end -= 1
        return end <= len(hashes) and self._pool.prefix_map.holds_all(
            map_id, hashes[first:end], block_ids[first:end], reader
        )

    def ends_within(self, num_tokens: int) -> bool:
        """Whether a hit of `num_tokens` tokens ends within a block of the group."""
        return self.resumes_within and num_tokens % self.span_tokens != 0

    def tail_hashes(self, request: Request, num_tokens: int) -> Sequence[BlockHash]:
        """The hashes by which a block can serve a hit that ends within it after `num_tokens` tokens."""
        unit, span = self._hash_tokens, self.span_tokens
        return request.hashes[num_tokens // unit - 1 : (num_tokens // span + 1) * span // unit]

    def num_missing_blocks(self, table: BlockTable, num_tokens: int, num_encoder_tokens: int) -> int:
        """Number of blocks that the table lacks for `num_tokens` tokens; zero or negative if it lacks none."""
        if self.counts_encoder_tokens:
            num_tokens = num_encoder_tokens
        return -(-num_tokens // self.span_tokens) + self._num_extra_blocks - len(table.block_ids)

    def num_surplus_blocks(self, table: BlockTable, num_tokens: int) -> int:
        """Number of a table's blocks after those with slots for its first `num_tokens` tokens."""
        return 0 if self.counts_encoder_tokens else max(-self.num_missing_blocks(table, num_tokens, 0), 0)

    def credit_tokens(self, table: BlockTable) -> int:
        """Number of computed tokens that a request can reach without a change of this group.

        Up to there its tokens take slots in blocks that it holds, make no block cached, and leave none behind a window.
        """
        span = self.span_tokens
        bound = MAX_TOKENS  # not `slot_tokens`: this runs for each row
        if not self.counts_encoder_tokens:
            bound = (len(table.block_ids) - self._num_extra_blocks) * span
        num_full = table.num_cached + 1
        if self._caches_later:
            num_full = self._num_full_to_cache(table.num_cached)
        if self._caches and num_full * span <= bound:
            bound = num_full * span - 1
        if not self.spec.keeps_all:
            bound = min(bound, self.spec.num_computed_to_skip((table.num_skipped + 1) * span))
        return bound

    def slot_tokens(self, table: BlockTable) -> int:
        """Number of tokens for which a table has slots."""
        if self.counts_encoder_tokens:
            return MAX_TOKENS
        return (len(table.block_ids) - self._num_extra_blocks) * self.span_tokens

    def _num_cacheable(self, request: Request, num_tokens: int) -> int:
        """Number of leading blocks to cache once the first `num_tokens` tokens have slots; see rule 5."""
        num_full = (num_tokens - self._num_reprefillable) // self.span_tokens
        if self._blocks_per_hit > 1:
            aligned = num_full // self._blocks_per_hit * self._blocks_per_hit
            num_full = min(aligned + self.num_eagle_blocks, num_full) if aligned else 0
        if self._lookahead_tokens:
            num_full = min(num_full, (request.num_tokens - self._lookahead_tokens) // self.span_tokens)
        return num_full

    def _num_full_to_cache(self, num_cached: int) -> int:
        """Number of full blocks at which more than `num_cached` may be cached; see rule 5."""
        per_hit = self._blocks_per_hit
        if self.num_eagle_blocks and num_cached and num_cached % per_hit == 0:
            return num_cached + 1
        return (num_cached // per_hit + 1) * per_hit

    def add_hit_blocks(self, table: BlockTable, computed: Sequence[BlockId]) -> None:
        """Adds the blocks of a hit to an empty table."""
        table.block_ids.extend(computed)
        table.num_cached = len(computed)
        if not self.spec.keeps_all:
            table.num_skipped = computed.count(NULL_BLOCK)
            computed = computed[table.num_skipped :]
        if self._pool.host:  # blocks of the first tier will replace the others
            computed = self._pool.host.without(computed)
        self._pool.touch(self.group_id, computed)

    def copies_block(self, request: Request, hit: Sequence[BlockId], num_hit_tokens: int) -> bool:
        """Whether an allocation for a request, with the group's blocks of a hit, copies a block."""
        del request
        return bool(hit) and self.ends_within(num_hit_tokens)

    def make_copy(
        self,
        request: Request,
        new: Sequence[list[BlockId]],
        hit: Sequence[Sequence[BlockId]],
        sequence: ids.StepNumber,
    ) -> BlockCopy:
        """Makes the first new block, which the table contains, the copy of the last block of a hit.

        Args:
            request: The request.
            new: The new blocks with which the tables end, group by group. The first of this group is removed.
            hit: The blocks of the hit, with which the tables begin, group by group.
            sequence: The step that makes the copy.

        Returns:
            The copy, of which both blocks have a reference.
        """
        table, target = request.tables[self.group_id], new[self.group_id].pop(0)
        at = len(hit[self.group_id]) - 1
        source, table.block_ids[at : at + 2] = table.block_ids[at], [target]
        table.num_cached = at
        self._pool.touch(self.group_id, [target])  # the source keeps the reference of the hit
        is_host = self._pool.host is not None and self._pool.host.contains(source)
        copy = BlockCopy(self.group_id, source, target, sequence, holds_source=not is_host)
        request.copies.append(copy)
        if self._pool.host and is_host:
            self._pool.host.read([source], request.session_number, sequence)
        return copy

    def promote(self, request: Request, num_hit: int, sequence: ids.StepNumber) -> list[BlockId]:
        """Replaces the blocks of host memory in a hit, with which the table begins, by new ones; returns these.

        The caller has checked that enough are free. Step `sequence` makes the copies, which hold the new blocks, too.
        """
        table, host = request.tables[self.group_id], self._pool.host
        places = host.places(table.block_ids[:num_hit]) if host else []
        if not host or not places:
            return []
        sources, targets = [table.block_ids[i] for i in places], self._pool.get_new_blocks(self.group_id, len(places))
        for i, target in zip(places, targets, strict=True):
            table.block_ids[i] = target
        host.promote(sources, targets, request.session_number, sequence)
        self._pool.touch(self.group_id, targets)
        pairs = zip(sources, targets, strict=True)
        request.copies += [BlockCopy(self.group_id, *pair, sequence, holds_source=False) for pair in pairs]
        return targets

    def allocate_new_blocks(self, table: BlockTable, count: int) -> list[BlockId]:
        """Adds `count` new blocks, at least 1, to the table, and returns them.

        The caller has checked that enough are free.
        """
        new = self._pool.get_new_blocks(self.group_id, count)
        table.block_ids.extend(new)
        return new

    def remove_skipped_blocks(self, table: BlockTable, num_computed_tokens: int) -> list[BlockId]:
        """Frees the blocks that no token attends to any more, last block first, and returns them.

        Null blocks replace them. The answer does not list them: the client trims its copy by the same rule, so a decode
        of a mixed model needs no more bytes than one of full attention. Tokens cannot be rejected back behind them.
        """
        start, end = table.num_skipped, min(self.num_skipped_blocks(num_computed_tokens), len(table.block_ids))
        if start >= end:
            return []
        if not table.num_skipped:
            table.block_ids = table.block_ids.copy()  # see BlockTable: once per table
        skipped = table.block_ids[start:end]
        table.block_ids[start:end] = [NULL_BLOCK] * len(skipped)
        table.num_skipped = end
        if self.has_gaps:
            skipped = [block_id for block_id in skipped if block_id]
        self._pool.free_blocks(self.group_id, skipped[::-1], self._num_uncached(table, end, len(skipped)))
        return skipped

    def cache_blocks(self, request: Request, num_tokens: int, sequence: ids.StepNumber) -> None:
        """Caches the full blocks of the first `num_tokens` tokens, which step `sequence` fills.

        Blocks that are not kept (see `retention`) are not cached. The caller has checked that some blocks are not
        cached yet.
        """
        table = request.tables[self.group_id]
        end, start = num_tokens // self.span_tokens, table.num_cached
        if self._caches_later:
            end = max(self._num_cacheable(request, num_tokens), start)
        if start < table.num_skipped:  # noqa: PLR1730 - max() is slower, and this runs for each block
            start = table.num_skipped
        table.num_cached = end
        if start >= end:
            return
        all_hashes = self.hashes(request)
        runs = ((start, end),) if self._caches_all else self._runs_to_cache(request, start, end)
        for start, end in runs:
            hashes, block_ids = all_hashes[start:end], table.block_ids[start:end]
            if self.resumes_within:  # a tail, which is cached again behind it
                self._pool.drop_hashes(block_ids)
            self._pool.prefix_map.insert(self.map_id(request), block_ids, hashes, request.session_number, sequence)
            if self._makes_events:
                self._record_stored(request, block_ids, start)

    def cache_tail(self, request: Request, num_tokens: int, start_tokens: int | None, sequence: ids.StepNumber) -> None:
        """Caches the last whole hash block of a prompt, if it ends within a block; see rule 6.

        Args:
            request: The request.
            num_tokens: Its tokens that are to be cached.
            start_tokens: Number of computed tokens before the step that fills them; None if it was an earlier step.
            sequence: The step that fills them.
        """
        del start_tokens
        table, boundary = request.tables[self.group_id], self._tail_tokens(request)
        at = boundary // self.span_tokens
        if not self.ends_within(boundary) or boundary > num_tokens or at >= len(table.block_ids):
            return
        block_hash = request.hashes[boundary // self._hash_tokens - 1]
        if table.has_stopped_caching or self._pool.prefix_map.has_hash(table.block_ids[at], block_hash):
            return
        self._pool.cache_tail(self.map_id(request), table.block_ids[at], block_hash, request.session_number, sequence)
        self._record_tail(request, table.block_ids[at], boundary)

    def _tail_tokens(self, request: Request) -> int:
        """Length of the longest prefix of whole hash blocks that the same prompt needs to be hit when it is sent again.

        With EAGLE the hit is one hash block shorter, so that the last token need not be left out.
        """
        limit = request.num_prompt_tokens if self._use_eagle else request.num_prompt_tokens - 1
        return max(limit // self._hash_tokens * self._hash_tokens, 0)

    def _record_tail(self, request: Request, block_id: BlockId, num_tokens: int) -> None:
        """Records the event for a prefix that ends within a block: its hash blocks that the block does not name yet.

        A state is one of its last hash block only.
        """
        contents = self._pool.contents
        if not contents:
            return
        end = num_tokens // self._hash_tokens
        start, named = end - 1, contents.hashes(block_id, request.hashes[end - 1])
        while not self.has_gaps and start % self._hashes_per_block and request.hashes[start - 1] not in named:
            start -= 1
        self._pool.record_tail(block_id, self._stored(request, start, end))

    def _runs_to_cache(self, request: Request, first: int, end: int) -> Sequence[Run]:
        """Returns the blocks in [first, end), all of them full, that are to be cached."""
        return self._retention.runs(request, first, end) if self._retention else ((first, end),)

    def _record_stored(self, request: Request, block_ids: list[BlockId], start: int) -> None:
        """Records the event for a run of cached blocks of the request, which begins at index `start`."""
        per_block, end = self._hashes_per_block, start + len(block_ids)
        self._pool.record_stored(block_ids, self._stored(request, start * per_block, end * per_block))

    def _stored(self, request: Request, start: int, end: int) -> BlockStored:
        """The event for the hash blocks [start, end) of the request.

        Blocks are not reported whole: the blocks of another group may follow any of their hash blocks.
        """
        unit, num_ahead, token_ids = self._hash_tokens, self._lookahead_tokens, request.token_ids
        ends = range((start + 1) * unit, (end + 1) * unit, unit) if num_ahead else ()
        return BlockStored(
            block_hashes=tuple(request.hashes[start:end]),
            parent_block_hash=request.hashes[start - 1] if start else None,
            token_ids=packed_token_ids(token_ids[start * unit : end * unit]),
            block_size=unit,
            lora_name=request.lora_name,
            group_id=self.group_id,
            lookahead_token_ids=packed_token_ids(each for i in ends for each in token_ids[i : i + num_ahead]),
        )

    def free(self, table: BlockTable) -> list[BlockId]:
        """Empties the table; returns the blocks that it held, last first.

        Read the list at once: the free list owns it.
        """
        held = table.block_ids[: table.num_skipped - 1 : -1] if table.num_skipped else table.block_ids[::-1]
        if self.has_gaps:
            held = [block_id for block_id in held if block_id]
        num_uncached = self._num_uncached(table, len(table.block_ids), len(held))
        self._pool.free_blocks(self.group_id, held, num_uncached)
        table.clear()
        return held

    def _num_uncached(self, table: BlockTable, end: int, count: int) -> int | None:
        """Number of blocks, of the `count` blocks before index `end`, that were never cached; None if unknown."""
        if not self._caches_all or table.has_stopped_caching:
            return None
        return min(max(end - table.num_cached, 0), count)

    def free_surplus(self, table: BlockTable, num_tokens: int) -> list[BlockId]:
        """Frees the last blocks of a table, those without slots for its first `num_tokens` tokens, and returns them."""
        count = self.num_surplus_blocks(table, num_tokens)
        if not count:
            return []
        surplus = table.block_ids[: -count - 1 : -1]
        if self.has_gaps:
            surplus = [block_id for block_id in surplus if block_id]
        table.block_ids = table.block_ids[:-count]  # not in place: see BlockTable
        if not table.has_stopped_caching:
            table.num_cached = min(table.num_cached, len(table.block_ids))  # tokens of cached blocks may be rejected
        self._pool.free_blocks(self.group_id, surplus)
        return surplus

    def get_num_common_prefix_blocks(self, table: BlockTable, others: Iterable[BlockTable], max_blocks: int) -> int:
        """Number of leading blocks, at most `max_blocks`, that the table shares with all others.

        It is 0 for kinds that skip tokens or hold none.

        O(others x common blocks).
        """
        if not isinstance(self.spec, FullAttentionSpec):
            return 0
        common = table.block_ids[:max_blocks]
        for other in others:
            count = min(len(common), len(other.block_ids))
            common, same = common[:count], other.block_ids[:count]
            if common != same:
                common = common[: next(i for i in range(count) if common[i] != same[i])]
        return len(common)
