"""A brute-force model of a cache of mixed groups, based on whole token prefixes.

1. The block at index i of a group's table holds the request's tokens [i * span, (i + 1) * span), which depend on all
   tokens before them. Its content is the group and the prefix [0, (i + 1) * span).
2. A block can be found from when it is cached until it is allocated again or evicted. A request caches each block once.
   A held block keeps its content, whether or not it can be found.
3. Attention is defined token by token (`attends`); skipped, needed and hit blocks are derived by enumeration.

The model uses nothing of the allocator except the specs and numbers of the pool's configuration.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from kvpool.core.ids import BlockHash
from kvpool.core.sessions.request import Request
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    SPARSE_KINDS,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from kvpool.core.specs.pool_config import PoolConfig

Tokens = tuple[int, ...]
Content = tuple[int, Tokens]
"""A group, and the prefix that ends in a block of the group."""


@cache
def hash_of(prefix: Tokens) -> BlockHash:
    """Returns a hash of the whole prefix."""
    return BlockHash(hashlib.sha256(bytes(prefix)).digest())


def attends(spec: KVCacheSpec, earlier: int, position: int) -> bool:
    """Whether the token at `position` attends to an earlier token."""
    match spec:
        case SlidingWindowSpec():
            return position - earlier < spec.sliding_window
        case ChunkedLocalAttentionSpec():
            return earlier // spec.attention_chunk_size == position // spec.attention_chunk_size
        case MambaSpec():
            return earlier == position - 1
        case FullAttentionSpec() | CircularBufferSpec():
            return True
        case _:
            raise AssertionError(spec)


@cache
def first_needed(spec: KVCacheSpec, position: int) -> int:
    """Returns the first token that the token at `position` attends to; `position` if there is none."""
    return next((earlier for earlier in range(position) if attends(spec, earlier, position)), position)


@dataclass(slots=True, eq=False)
class Known:
    """A request as the model knows it.

    Attributes:
        request: The pool's request.
        tokens: Prompt and output tokens.
        computed: Number of tokens with slots.
        floor: Number of tokens that cannot be rejected: those computed when blocks were last freed behind windows.
        nulls: Number of leading null blocks of each table.
        cached: Number of leading blocks of each table that were hit, cached, or skipped before they could be cached.
        num_encoder_tokens: Encoder tokens, for cross attention.
        prompt: Tokens that the request was declared with.
        shared_boundary: Boundary that the most recent look-up found, see `PrefixModel.shared_prefix_boundary`.
    """

    request: Request
    tokens: Tokens
    num_encoder_tokens: int
    nulls: list[int]
    cached: list[int]
    prompt: Tokens
    shared_boundary: int = 0
    computed: int = 0
    floor: int = 0

    @property
    def tables(self) -> list[list[int]]:
        return [list(table.block_ids) for table in self.request.tables]

    @property
    def holds(self) -> bool:
        return any(table.block_ids for table in self.request.tables)

    def clear(self) -> None:
        self.nulls, self.cached = [0] * len(self.nulls), [0] * len(self.cached)
        self.computed = self.floor = 0


@dataclass(slots=True)
class PrefixModel:
    """The contents of every block of a pool, and the blocks that can be found.

    Attributes:
        config: Configuration of the pool.
        specs: Specs of the groups.
        spans: Tokens per block, by group.
        caching: The groups that take part in hits: all but circular buffers.
        findable: Content of each block that can be found.
        written: Content of each block that was cached and not allocated again since.
        given: The request, group and table index for which a block was last allocated.
    """

    config: PoolConfig
    specs: list[KVCacheSpec] = field(init=False)
    spans: list[int] = field(init=False)
    caching: list[int] = field(init=False)
    findable: dict[int, Content] = field(default_factory=dict)
    written: dict[int, Content] = field(default_factory=dict)
    given: dict[int, tuple[Known, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.specs = [group.spec for group in self.config.groups]
        self.spans = [self._span(spec) for spec in self.specs]
        self.caching = [i for i, spec in enumerate(self.specs) if not isinstance(spec, CircularBufferSpec)]

    def _span(self, spec: KVCacheSpec) -> int:
        if isinstance(spec, CircularBufferSpec):
            return 10**6  # one block for any request
        return spec.block_size * (1 if isinstance(spec, MambaSpec | CrossAttentionSpec) else self.config.dcp_world_size)

    @property
    def hit_spans(self) -> list[int]:
        """Tokens per block of the groups that take part in hits."""
        return [self.spans[group] for group in self.caching]

    @property
    def num_sink_blocks(self) -> int:
        return sum(
            spec.sink_len // span
            for spec, span in zip(self.specs, self.spans, strict=True)
            if isinstance(spec, SinkFullAttentionSpec)
        )

    def hashes(self, tokens: Tokens) -> list[BlockHash]:
        """Returns the hashes that a request with these tokens is declared with."""
        if not self.config.enable_caching:
            return []
        size = math.gcd(*self.hit_spans)
        return [hash_of(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def hash_blocks(self, content: Content) -> list[BlockHash]:
        """Returns the hashes of a block in events: those of its hash blocks."""
        group, prefix = content
        hashes = self.hashes(prefix)
        return hashes[-(self.spans[group] * len(hashes) // len(prefix)) :]

    def num_skipped(self, group: int, position: int) -> int:
        """Number of leading blocks that the token at `position` and later tokens do not need."""
        if isinstance(self.specs[group], CrossAttentionSpec):
            return 0
        return first_needed(self.specs[group], position) // self.spans[group]

    def num_freed(self, group: int, position: int) -> int:
        """Number of these blocks that a running request does not keep."""
        spec = self.specs[group]
        if not isinstance(spec, SlidingWindowSpec):
            return self.num_skipped(group, position)
        return max(first_needed(spec, position) - spec.extra_retained_tokens, 0) // self.spans[group]

    def longest_hit(self, tokens: Tokens) -> int:
        """Returns the longest hit, by trying every length."""
        return self._longest(tokens, self.caching) if self.config.enable_caching else 0

    def shared_prefix_boundary(self, tokens: Tokens) -> int:
        """With sparse caching: the longest hit of the leading groups, if it is longer than the hit of all groups; else
        0.

        The leading groups are the first group that keeps all tokens, or else the first group, and all groups with its
        spec.
        """
        if not self.config.enable_caching or self.config.retention_tokens is None:
            return 0
        specs = [self.specs[group] for group in self.caching]
        first = next((spec for spec in specs if isinstance(spec, FullAttentionSpec)), specs[0])
        leading = self._longest(tokens, [group for group in self.caching if self.specs[group] == first])
        return leading if leading > self.longest_hit(tokens) else 0

    def _longest(self, tokens: Tokens, groups: Sequence[int]) -> int:
        found = set(self.findable.values())
        return max(length for length in range(len(tokens)) if self._can_hit(length, tokens, found, groups))

    def _can_hit(self, length: int, tokens: Tokens, found: set[Content], groups: Sequence[int]) -> bool:
        if not length:
            return True
        if any(length % span for span in self.hit_spans):
            return False
        last = len(tokens) - 1 if len(self.spans) == 1 else len(tokens)
        for group in groups:
            span, needed = self.spans[group], self._needed(group, length)
            if needed[-1:] == [length // span] and length + span > last:
                return False
            if any((group, tokens[: (i + 1) * span]) not in found for i in needed):
                return False
        return True

    def _needed(self, group: int, length: int) -> list[int]:
        """Returns the blocks that a hit needs, including the block for EAGLE."""
        return list(range(self.num_skipped(group, length), length // self.spans[group] + self._has_drafts(group)))

    def _has_drafts(self, group: int) -> bool:
        """Whether a hit needs a block behind it in the group, for EAGLE."""
        is_drafted = self.config.use_eagle and not self.config.groups[group].has_no_draft
        return is_drafted and not isinstance(self.specs[group], MambaSpec)

    def is_kept(self, known: Known, group: int, index: int) -> bool:
        """Whether a full block is cached: in a window and of states, only if a hit that must be found needs it."""
        retention, alignment = self.config.retention_tokens, math.lcm(*self.hit_spans)
        if retention is None or not isinstance(self.specs[group], SPARSE_KINDS):
            return True
        if 0 < retention // self.spans[group] <= len(self._needed(group, 100 * alignment)):
            return True
        ends = [len(known.prompt) - 1]
        if self.config.use_eagle:
            ends = [max(end - alignment, 0) for end in (len(known.prompt) - 1, len(known.prompt))]
        ends += [known.shared_boundary] if known.shared_boundary else []
        kept = {end // alignment * alignment for end in ends}
        kept |= {*range(retention, 3 * (len(known.tokens) + retention), retention)} if retention else set()
        return any(index in self._needed(group, length) for length in kept)

    def num_cacheable(self, group: int, num_tokens: int) -> int:
        """Number of leading blocks that may be cached: with sparse caching, those that some hit can need by now."""
        span, alignment = self.spans[group], math.lcm(*self.hit_spans)
        if self.config.retention_tokens is None:
            return num_tokens // span
        aligned = num_tokens // alignment * alignment
        return min(aligned // span + self._has_drafts(group), num_tokens // span) if aligned else 0

    def num_new_blocks(self, known: Known, num_slots: int, hit: Sequence[Sequence[int]]) -> list[int]:
        """Number of blocks that each table lacks for `num_slots` tokens."""
        lacking = []
        for group, (spec, span) in enumerate(zip(self.specs, self.spans, strict=True)):
            if isinstance(spec, CrossAttentionSpec):
                wanted = -(-known.num_encoder_tokens // span)
            else:
                wanted = -(-min(num_slots, self.config.max_model_len) // span)
            if isinstance(spec, MambaSpec):
                wanted += spec.num_speculative_blocks
            lacking.append(max(wanted - len(known.tables[group]) - len(hit[group]), 0))
        return lacking

    def give(self, known: Known, group: int, index: int, block_id: int) -> None:
        """Records that a block is allocated for an index of a request's table."""
        self.findable.pop(block_id, None)
        self.written.pop(block_id, None)
        self.given[block_id] = (known, group, index)

    def cache(self, known: Known, num_tokens: int) -> None:
        """Records that the full blocks of a request's first tokens, which it still holds, can be found."""
        for group, (span, table) in enumerate(zip(self.spans, known.tables, strict=True)):
            end = self.num_cacheable(group, min(num_tokens, len(known.tokens)))
            for i in range(known.cached[group], end):
                if table[i] and self.is_kept(known, group, i):
                    content = (group, known.tokens[: (i + 1) * span])
                    self.findable[table[i]] = self.written[table[i]] = content
            known.cached[group] = max(known.cached[group], end)

    def evict(self, block_id: int) -> None:
        self.findable.pop(block_id, None)

    def owns_or_shares(self, known: Known, group: int, index: int, block_id: int) -> bool:
        """Whether a block was allocated for this place, or has the content of this place."""
        end = (index + 1) * self.spans[group]
        shared = end <= len(known.tokens) and self.written.get(block_id) == (group, known.tokens[:end])
        return shared or self.given.get(block_id) == (known, group, index)
