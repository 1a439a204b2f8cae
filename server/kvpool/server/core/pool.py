"""A pool: what vLLM's KV cache manager answers, block id for block id, for the requests of any number of sessions.

1. Every method is all or nothing; too few free blocks is an answer (None), not an error.
2. A request's blocks are changed only through its session; the blocks themselves may be shared, read only.
3. What a request holds never loses its contents: only free blocks are taken.
4. A hit never covers a request's last token, whose logits are to be computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpool.server.core import types
from kvpool.server.core.block_pool import BlockPool
from kvpool.server.core.config import PoolConfig
from kvpool.server.core.full_attention import FullAttentionManager
from kvpool.server.core.request import BlockTable, Request
from kvpool.server.core.statistics import PrefixCacheStats, RecentHitRate
from kvpool.server.core.types import BlockId, GroupId, WriterId


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """A prefix found in the cache.

    Attributes:
        block_ids: Its blocks, group by group. Not held: they may be evicted until they are allocated.
        num_tokens: Its length.
        num_shared_tokens: Of these, tokens of blocks that another session filled.
    """

    block_ids: tuple[Sequence[BlockId], ...]
    num_tokens: int
    num_shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """What an admitted request got.

    Attributes:
        computed: The hit, whose blocks the request now holds.
        num_new_tokens: Tokens beyond the hit that have room.
        new_blocks: The newly allocated blocks, group by group.
    """

    computed: ComputedBlocks
    num_new_tokens: int
    new_blocks: tuple[list[BlockId], ...]


class Pool:
    """The blocks of one model, and the managers of its groups.

    Attributes:
        config: What the pool was declared with; its none_hash is drawn.
        epoch: Goes up whenever the contents of blocks can no longer be trusted.
        blocks: The blocks.
        stats: Counters of look-ups.
        recent_hit_rate: Hit rate over the last look-ups.
        num_preemptions: Times that a request's blocks were taken back.
    """

    def __init__(self, config: PoolConfig) -> None:
        config.check()
        self.config = config
        self.epoch = 1
        self.blocks = BlockPool(config)
        self.stats = PrefixCacheStats()
        self.recent_hit_rate = RecentHitRate()
        self.num_preemptions = 0
        self._managers = [FullAttentionManager(config, GroupId(i), self.blocks) for i in range(len(config.groups))]

    def __repr__(self) -> str:
        used = self.blocks.num_blocks - 1 - self.blocks.num_free_blocks
        cached = len(self.blocks.prefix_map)
        return f"<Pool {self.config.name!r}: {self.blocks.num_blocks} blocks, {used} used, {cached} cached>"

    def new_tables(self) -> tuple[BlockTable, ...]:
        """Makes the empty tables of a request."""
        return tuple(BlockTable() for _ in self._managers)

    def peek(self, request: Request) -> ComputedBlocks:
        """Finds the longest cached prefix of a request that holds no blocks; not counted."""
        manager = self._managers[0]
        if not self.config.enable_caching:
            return ComputedBlocks(((),), 0)
        found = manager.find_longest_hit(request.hashes, max(request.num_tokens - 1, 0), request.writer)
        foreign = len(found) - self.blocks.prefix_map.num_written_by(found, request.writer)
        return ComputedBlocks((found,), len(found) * manager.block_size, foreign * manager.block_size)

    def look_up(self, request: Request) -> ComputedBlocks:
        """Finds the longest cached prefix of a request that holds no blocks, and counts the look-up."""
        computed = self.peek(request)
        self._count(request, computed)
        return computed

    def admit(
        self,
        request: Request,
        max_new_tokens: int,
        num_lookahead_tokens: int = 0,
        *,
        delay_cache_blocks: bool = False,
        sequence: types.Sequence,
    ) -> Admission | None:
        """Looks up and allocates at once for a request that holds no blocks.

        Makes room for as many of the tokens left as `max_new_tokens` (at least 1) allows. The look-up is counted only
        if the request is admitted.

        Returns:
            What it got; None if there are too few free blocks, and nothing was changed.
        """
        computed = self.peek(request)
        num_new_tokens = min(request.num_tokens - computed.num_tokens, max_new_tokens)
        new = self.allocate(
            request,
            num_new_tokens,
            num_lookahead_tokens,
            computed,
            delay_cache_blocks=delay_cache_blocks,
            sequence=sequence,
        )
        if new is None:
            return None
        self._count(request, computed)
        return Admission(computed, num_new_tokens, new)

    def still_holds(self, request: Request, computed: ComputedBlocks) -> bool:
        """Whether what a look-up promised the request is still all there."""
        return all(
            manager.still_holds(promised, request.hashes, request.writer)
            for manager, promised in zip(self._managers, computed.block_ids, strict=True)
        )

    def hit_length(self, block_ids: Sequence[Sequence[int]]) -> int:
        """Tokens that a hit of these blocks covers."""
        return len(block_ids[0]) * self._managers[0].block_size

    def allocate(  # noqa: PLR0913 - the reference's own parameters
        self,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        computed: ComputedBlocks | None = None,
        *,
        delay_cache_blocks: bool = False,
        sequence: types.Sequence,
    ) -> tuple[list[BlockId], ...] | None:
        """Gives a request room for more tokens, and caches the blocks that become full.

        Args:
            request: The request; its num_computed_tokens move past the hit and the new tokens.
            num_new_tokens: Tokens to make room for, at least 1.
            num_lookahead_tokens: Tokens beyond these to keep room for; never past max_model_len.
            computed: A hit that is still all there, for a request that holds no blocks.
            delay_cache_blocks: Leaves full blocks uncached until `cache`.
            sequence: The session's change, whose execution fills the slots.

        Returns:
            The new blocks, group by group; None if there are too few free blocks, and nothing was changed.
        """
        hit = computed.block_ids if computed else ((),) * len(self._managers)
        num_computed = request.num_computed_tokens + (computed.num_tokens if computed else 0)
        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.config.max_model_len)
        needed = sum(
            manager.num_blocks_to_allocate(table, num_slots, blocks)
            for manager, table, blocks in zip(self._managers, request.tables, hit, strict=True)
        )
        if needed > self.blocks.num_free_blocks:
            return None
        if computed:
            for manager, table, blocks in zip(self._managers, request.tables, hit, strict=True):
                manager.adopt(table, blocks)
        new = tuple(
            manager.allocate(table, num_slots) for manager, table in zip(self._managers, request.tables, strict=True)
        )
        request.num_computed_tokens = num_computed + num_new_tokens
        if self.config.enable_caching and not delay_cache_blocks:
            self.cache(request, request.num_computed_tokens, sequence=sequence)
        return new

    def cache(self, request: Request, num_computed_tokens: int, *, sequence: types.Sequence) -> None:
        """Caches the request's full blocks among its first `num_computed_tokens` tokens, never past those known."""
        for manager in self._managers:
            manager.cache(request, min(num_computed_tokens, request.num_tokens), sequence)

    def free(self, request: Request) -> None:
        """Frees the request's blocks, the last first; the caller forgets it or admits it again from the start."""
        for manager, table in zip(self._managers, request.tables, strict=True):
            manager.free(table)
        request.num_computed_tokens = 0

    def preempt(self, request: Request) -> None:
        """Frees the request's blocks, and counts that they were taken back, if it held any."""
        if request.holds_blocks:
            request.num_preemptions += 1
            self.num_preemptions += 1
        self.free(request)

    def reset_prefix_cache(self) -> bool:
        """Forgets all hashes if no request holds a block; returns whether it did."""
        if not self.blocks.reset():
            return False
        self.stats.resets += 1
        self.recent_hit_rate.reset()
        return True

    def num_common_prefix_blocks(self, request: Request, running: Iterable[Request]) -> tuple[int, ...]:
        """Leading blocks, group by group, that the request has in common with all `running` requests."""
        others = [other for other in running if other is not request]
        return tuple(
            manager.num_common_prefix_blocks(table, (other.tables[manager.group_id] for other in others))
            for manager, table in zip(self._managers, request.tables, strict=True)
        )

    def end_writer(self, writer: WriterId) -> None:
        """Forgets what a session that has ended had cached and never said to be computed; its requests are freed."""
        self.blocks.evict(self.blocks.prefix_map.unpublished_by(writer))

    def _count(self, request: Request, computed: ComputedBlocks) -> None:
        if not self.config.enable_caching:
            return
        stats = self.stats
        if request.num_preemptions:
            stats.preempted_requests += 1
            stats.preempted_queries_tokens += request.num_tokens
            stats.preempted_hits_tokens += computed.num_tokens
        else:
            stats.requests += 1
            stats.queries_tokens += request.num_tokens
            stats.hits_tokens += computed.num_tokens
            self.recent_hit_rate.observe(request.num_tokens, computed.num_tokens)
        stats.shared_hits_tokens += computed.num_shared_tokens
