"""Hits that smaller and larger pools would have had, estimated on a sample of the hashes (SHARDS).

1. A hash is sampled if two of its bytes, mapped by tables, are below a threshold, so a prefix is sampled each time or
   never. Bytes and tables follow from a key that clients do not know, because hashes are theirs to choose: look-ups of
   requests with sampled hashes only took 9 s in a step of 1 KB. A sampled hash stands for 1 / rate hashes: sampled
   hashes in a list of rate x n places hit as often as all hashes in n blocks.
2. The list has the order in which blocks become free: a request's hashes move to its front when the request is admitted
   and when its blocks are freed, the first hash last. It is cut into parts at the sizes of `MULTIPLES`. A hash found in
   a part hits in the pools of this size and of all larger ones.
3. The rate is at most one hash in `TOKENS_PER_SAMPLE` tokens, and the list has at most `MAX_SAMPLED` hashes. Time per
   token and memory per pool are thus bounded. If a client guesses which hashes are sampled, a request still keeps at
   most `max_sampled` of them. A step counts this bound as work, and not the sampled ones: a standby has another key,
   and must skip the same operations.
4. It is a statistic: nothing depends on it. It is not in snapshots, so a server that restarts, and a primary that has
   loaded a snapshot, start again at 0. Equal steps on a new pool with an equal key give equal figures.

In a pool with host memory all sizes are of both tiers together: two tiers hit nearly what one of their sum would, as
the second takes what the first evicts.

The model has no copies of blocks, no partial ones, and no blocks that a quota or a step in flight keeps. It is made for
pools with one group that keeps its blocks. In others a hash stands for blocks that are freed at different times.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Final

from kvpool.core.ids import BlockHash, MapId
from kvpool.core.specs.kinds import allocation_spec
from kvpool.core.specs.pool_config import PoolConfig

MULTIPLES: Final = (0.5, 1.0, 2.0, 4.0)
"""Sizes of pools for which hits are estimated, relative to the pool."""
TOKENS_PER_SAMPLE: Final = 2048
"""With 4,096, hits at four times the blocks were off by up to 3.9 % of the tokens of 4,000 requests; now by 2.8 %."""
MAX_SAMPLED: Final = 2**14
_RANGE: Final = 2**16
_MIN_KEPT: Final = 8
_KEPT_PER_EXPECTED: Final = 4
"""One request in millions of uniform hashes has more sampled hashes than these allow."""

_Key = BlockHash | tuple[MapId, BlockHash]


class HitCurve:
    """The estimate of one pool.

    Args:
        config: The configuration of the pool.
        key: Decides which hashes are sampled. It must be unknown to clients.

    Attributes:
        at: Index of the byte of a hash that is looked at first.
        marks: By this byte: 1 if `sample` may find the hash, else 0.
        found_tokens: Estimated tokens found in each part of the list, then those found in none. Read-only.
    """

    __slots__ = (
        "_hash_size_bytes",
        "_next_at",
        "_part_sizes",
        "_parts",
        "_tables",
        "_threshold",
        "_tokens_per_hash",
        "at",
        "found_tokens",
        "marks",
    )

    def __init__(self, config: PoolConfig, key: bytes = b"") -> None:
        num_blocks, span_tokens = max(config.num_ids - 1, 1), config.hash_block_size
        rate = min(span_tokens / TOKENS_PER_SAMPLE, MAX_SAMPLED / (MULTIPLES[-1] * num_blocks), 1.0)
        self._threshold = max(int(rate * _RANGE), 1)
        rate = self._threshold / _RANGE
        self._hash_size_bytes = config.hash_scheme.hash_size_bytes
        self.at, self._next_at = _shuffled(key, 0, self._hash_size_bytes)[:2]
        self._tables = _shuffled(key, 1, 256), _shuffled(key, 2, 256)
        self.marks = bytes(256 * high < self._threshold for high in self._tables[0])
        self._tokens_per_hash = round(span_tokens / rate)
        ends = [round(multiple * rate * num_blocks) for multiple in MULTIPLES]
        self._part_sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        self._parts: list[OrderedDict[_Key, None]] = [OrderedDict() for _ in MULTIPLES]
        self.found_tokens = [0] * (len(MULTIPLES) + 1)

    @classmethod
    def for_pool(cls, config: PoolConfig, key: bytes = b"") -> "HitCurve | None":
        """Returns an estimate for a pool; None if the model does not apply to it."""
        has_one = len(config.groups) == 1 and config.enable_caching and not config.num_sink_blocks[0]
        return cls(config, key) if has_one and allocation_spec(config.groups[0].spec).keeps_all else None

    def sample(self, joined: bytes) -> list[BlockHash]:
        """Returns the sampled ones of joined hashes. A nanosecond per hash, and 0.2 us per sampled one."""
        size, found, (high, low) = self._hash_size_bytes, [], self._tables
        marked = joined[self.at :: size].translate(self.marks)
        at = marked.find(1)
        while at >= 0:
            block_hash = joined[at * size : (at + 1) * size]
            if 256 * high[block_hash[self.at]] + low[block_hash[self._next_at]] < self._threshold:
                found.append(BlockHash(block_hash))
            at = marked.find(1, at + 1)
        return found

    def max_sampled(self, num_hashes: int) -> int:
        """Maximum number of sampled hashes that a request of `num_hashes` hashes keeps; see rule 3."""
        return min(_MIN_KEPT + _KEPT_PER_EXPECTED * num_hashes * self._threshold // _RANGE, num_hashes)

    @property
    def changed_tokens(self) -> dict[float, int]:
        """Tokens that pools of other sizes, by multiple, would have found more since the pool was created.

        Negative for fewer. Changes are accurate, sums are not: a block with which all prompts begin is sampled or not,
        which changed the sums by 30 % of all tokens of a trace; but it is found in pools of all sizes.
        """
        found = dict(zip(MULTIPLES, accumulate(self.found_tokens), strict=False))
        own = found.pop(1.0)
        return {multiple: tokens - own for multiple, tokens in found.items()}

    def record_lookup(self, map_id: MapId, sampled: Sequence[BlockHash], last: BlockHash | None) -> None:
        """Counts the hits of a look-up, and moves its hashes to the front.

        Args:
            map_id: The map in which it finds blocks.
            sampled: The sampled hashes of the request, in order.
            last: The hash of the block that ends with the request's last token, which never hits; None if none does.
        """
        parts = self.record_freed(map_id, sampled)
        if sampled[-1] == last:
            parts.pop()
        for part in parts:
            self.found_tokens[part] += self._tokens_per_hash

    def record_freed(self, map_id: MapId, sampled: Sequence[BlockHash]) -> list[int]:
        """Moves the sampled hashes of a request to the front. Returns the part in which each of them was."""
        parts, found = self._parts, []
        keys: Sequence[_Key] = [(map_id, block_hash) for block_hash in sampled] if map_id else sampled
        for key in keys:
            at = 0
            for part in parts:
                if key in part:
                    del part[key]
                    break
                at += 1
            found.append(at)
        front = parts[0]
        for key in reversed(keys):
            front[key] = None
        for at, size in enumerate(self._part_sizes):
            part = parts[at]
            while len(part) > size:
                moved, _ = part.popitem(last=False)
                if at + 1 < len(parts):
                    parts[at + 1][moved] = None
        return found

    def continue_from(self, before: "HitCurve | None") -> None:
        """Continues the counters of a pool whose blocks are gone."""
        if before:
            self.found_tokens = before.found_tokens

    def clear(self) -> None:
        """Forgets all hashes, because no block has contents any more."""
        for part in self._parts:
            part.clear()


def _shuffled(key: bytes, purpose: int, count: int) -> list[int]:
    """The numbers below `count`, at most 256, in an order that follows from the key and the purpose."""
    return sorted(range(count), key=lambda i: blake2b(bytes((purpose, i)), key=key).digest())
