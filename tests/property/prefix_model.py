"""What a cache of mixed groups must hold and answer, worked out by brute force from whole token prefixes.

1. A block that a request is given at index i of a group's table holds that request's tokens [i * span, (i + 1) * span),
   read after all before them: its content is the group and the prefix [0, (i + 1) * span).
2. It can be found from when it is cached, which a request does once with each block, until it is given again or
   evicted; and as long as it is held it keeps its content, found or not.
3. What is looked at is said token by token (`attends`); what is skipped, needed and hit is counted out from there.

Nothing here is the allocator's, but the specs and numbers that a pool is declared with.
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
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from kvpool.core.specs.pool_config import PoolConfig

Tokens = tuple[int, ...]
Content = tuple[int, Tokens]
"""A group, and the prefix whose last tokens a block of it holds."""


@cache
def hash_of(prefix: Tokens) -> BlockHash:
    """Any function of the whole prefix."""
    return BlockHash(hashlib.sha256(bytes(prefix)).digest())


def attends(spec: KVCacheSpec, earlier: int, position: int) -> bool:
    """Whether the token at `position` looks at what an earlier token left behind."""
    match spec:
        case SlidingWindowSpec():
            return position - earlier < spec.sliding_window
        case ChunkedLocalAttentionSpec():
            return earlier // spec.attention_chunk_size == position // spec.attention_chunk_size
        case MambaSpec():
            return earlier == position - 1
        case FullAttentionSpec():
            return True
        case _:
            raise AssertionError(spec)


@cache
def first_needed(spec: KVCacheSpec, position: int) -> int:
    """The first token that the one at `position` looks at; itself if there is none."""
    return next((earlier for earlier in range(position) if attends(spec, earlier, position)), position)


@dataclass(slots=True, eq=False)
class Known:
    """A request as the model knows it.

    Attributes:
        request: The pool's.
        tokens: Prompt and output.
        computed: Tokens that have room.
        floor: Tokens that can not be rejected: what was computed when blocks were last freed behind windows.
        nulls: Leading nulls of each table.
        cached: Leading blocks of each table that were hit, cached, or skipped before they could be.
        num_encoder_tokens: For cross attention.
        prompt: What it was declared with.
        junction: What its newest look-up found that only some groups had, see `PrefixModel.junction`.
    """

    request: Request
    tokens: Tokens
    num_encoder_tokens: int
    nulls: list[int]
    cached: list[int]
    prompt: Tokens
    junction: int = 0
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
    """What every block of a pool holds, and which can be found.

    Attributes:
        config: The pool's.
        specs: Its groups' specs.
        spans: Tokens that a block covers, by group.
        findable: Content of each block that can be found.
        written: Content of each block that was ever cached and not given again.
        given: For which request's table and at which index a block was last given.
    """

    config: PoolConfig
    specs: list[KVCacheSpec] = field(init=False)
    spans: list[int] = field(init=False)
    findable: dict[int, Content] = field(default_factory=dict)
    written: dict[int, Content] = field(default_factory=dict)
    given: dict[int, tuple[Known, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.specs = [group.spec for group in self.config.groups]
        self.spans = [
            spec.block_size * (1 if isinstance(spec, MambaSpec | CrossAttentionSpec) else self.config.dcp_world_size)
            for spec in self.specs
        ]

    @property
    def num_sink_blocks(self) -> int:
        return sum(
            spec.sink_len // span
            for spec, span in zip(self.specs, self.spans, strict=True)
            if isinstance(spec, SinkFullAttentionSpec)
        )

    def hashes(self, tokens: Tokens) -> list[BlockHash]:
        """The hashes that a request of these tokens is declared with."""
        if not self.config.enable_caching:
            return []
        size = math.gcd(*self.spans)
        return [hash_of(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def block_hash(self, content: Content) -> BlockHash:
        """What events call a block: the hashes of its tokens, joined."""
        group, prefix = content
        count = self.spans[group] // math.gcd(*self.spans)
        return BlockHash(b"".join(self.hashes(prefix)[-count:]))

    def num_skipped(self, group: int, position: int) -> int:
        """Leading blocks of which the token at `position` and those after it need nothing."""
        if isinstance(self.specs[group], CrossAttentionSpec):
            return 0
        return first_needed(self.specs[group], position) // self.spans[group]

    def longest_hit(self, tokens: Tokens) -> int:
        """Tries every length."""
        return self._longest(tokens, range(len(self.specs))) if self.config.enable_caching else 0

    def junction(self, tokens: Tokens) -> int:
        """Where windows are cached sparsely: what the leading groups have more than all, else 0.

        They are the first that keeps all, or else the first, and those that are the same.
        """
        if not self.config.enable_caching or self.config.retention_tokens is None:
            return 0
        first = next((spec for spec in self.specs if isinstance(spec, FullAttentionSpec)), self.specs[0])
        leading = self._longest(tokens, [group for group, spec in enumerate(self.specs) if spec == first])
        return leading if leading > self.longest_hit(tokens) else 0

    def _longest(self, tokens: Tokens, groups: Sequence[int]) -> int:
        found = set(self.findable.values())
        return max(length for length in range(len(tokens)) if self._can_hit(length, tokens, found, groups))

    def _can_hit(self, length: int, tokens: Tokens, found: set[Content], groups: Sequence[int]) -> bool:
        if not length:
            return True
        if any(length % span for span in self.spans):
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
        """The blocks that a hit needs, EAGLE's among them."""
        eagle = self.config.use_eagle and not isinstance(self.specs[group], MambaSpec)
        return list(range(self.num_skipped(group, length), length // self.spans[group] + eagle))

    def is_kept(self, known: Known, group: int, index: int) -> bool:
        """Whether a full block is cached: in a window, if some hit needs it that is to be found again."""
        retention, alignment = self.config.retention_tokens, math.lcm(*self.spans)
        if retention is None or not isinstance(self.specs[group], SlidingWindowSpec):
            return True
        if 0 < retention // self.spans[group] <= len(self._needed(group, 100 * alignment)):
            return True
        ends = [len(known.prompt) - 1]
        if self.config.use_eagle:
            ends = [max(end - alignment, 0) for end in (len(known.prompt) - 1, len(known.prompt))]
        ends += [known.junction] if known.junction else []
        kept = {end // alignment * alignment for end in ends}
        kept |= {*range(retention, 3 * (len(known.tokens) + retention), retention)} if retention else set()
        return any(index in self._needed(group, length) for length in kept)

    def num_new_blocks(self, known: Known, num_slots: int, hit: Sequence[Sequence[int]]) -> list[int]:
        """Blocks that each table lacks for room for so many tokens."""
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
        """Notes that a block is given for an index of a request's table."""
        self.findable.pop(block_id, None)
        self.written.pop(block_id, None)
        self.given[block_id] = (known, group, index)

    def cache(self, known: Known, num_tokens: int) -> None:
        """Notes that what is full of a request's first tokens can be found, of the blocks it holds by now."""
        for group, (span, table) in enumerate(zip(self.spans, known.tables, strict=True)):
            end = min(num_tokens, len(known.tokens)) // span
            for i in range(known.cached[group], end):
                if table[i] and self.is_kept(known, group, i):
                    content = (group, known.tokens[: (i + 1) * span])
                    self.findable[table[i]] = self.written[table[i]] = content
            known.cached[group] = max(known.cached[group], end)

    def evict(self, block_id: int) -> None:
        self.findable.pop(block_id, None)

    def owns_or_shares(self, known: Known, group: int, index: int, block_id: int) -> bool:
        """Whether a block is the very one given for this place, or holds what this place is to hold."""
        end = (index + 1) * self.spans[group]
        shared = end <= len(known.tokens) and self.written.get(block_id) == (group, known.tokens[:end])
        return shared or self.given.get(block_id) == (known, group, index)
