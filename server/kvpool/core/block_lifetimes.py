"""Lifetimes of block contents, measured on a sample of the blocks.

1. One block in `sample_every` is sampled, from when it is taken from the free list until its contents are evicted, or
   until it is taken again without having been cached.
2. An access is an allocation of the block or a hit on it, while the block is free or held. vLLM's metrics of the same
   names count in the same way.
   Gaps are counted at the access, not at the eviction, because the blocks that are reused most are never evicted.
3. A call costs one set operation if none of its blocks is sampled. Blocks that are not sampled cost nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core.ids import BlockId
from kvpool.core.statistics import Histogram

BOUNDS_SECONDS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)


@dataclass(slots=True)
class _SampledBlock:
    taken_seconds: float
    accessed_seconds: float


class BlockLifetimes:
    """The sampled blocks of a pool, and histograms of their lifetimes.

    Args:
        sample_every: One of this many blocks is sampled, at least 1.
        randrange: Returns a random int in [0, n), like `random.randrange`.

    Attributes:
        now_seconds: Time of the change in progress; set by the caller.
        lifetime: Seconds from allocation to eviction.
        idle: Seconds from the last access to eviction.
        reuse_gap: Seconds between two accesses.
        sampled: The sampled blocks. Read-only; change it through this class.
    """

    __slots__ = (
        "_num_to_next_sample",
        "_randrange",
        "_sample_every",
        "idle",
        "lifetime",
        "now_seconds",
        "reuse_gap",
        "sampled",
    )

    def __init__(self, sample_every: int, randrange: Callable[[int], int]) -> None:
        self.now_seconds = 0.0
        self.lifetime = Histogram(BOUNDS_SECONDS)
        self.idle = Histogram(BOUNDS_SECONDS)
        self.reuse_gap = Histogram(BOUNDS_SECONDS)
        self.sampled: dict[BlockId, _SampledBlock] = {}
        self._sample_every = sample_every
        self._randrange = randrange
        self._num_to_next_sample = self._draw_gap()

    def record_taken(self, block_ids: Sequence[BlockId]) -> None:
        """Samples among blocks that were just taken. Drops sampled blocks that are taken again without an eviction."""
        sampled = self.sampled
        if sampled and not sampled.keys().isdisjoint(block_ids):
            for block_id in block_ids:
                sampled.pop(block_id, None)
        count = len(block_ids)
        while self._num_to_next_sample < count:
            sampled[block_ids[self._num_to_next_sample]] = _SampledBlock(self.now_seconds, self.now_seconds)
            self._num_to_next_sample += 1 + self._draw_gap()
        self._num_to_next_sample -= count

    def record_accessed(self, block_ids: Sequence[BlockId]) -> None:
        """Records hits on blocks."""
        sampled = self.sampled
        if not sampled or sampled.keys().isdisjoint(block_ids):
            return
        for block_id in block_ids:
            block = sampled.get(block_id)
            if block:
                self.reuse_gap.observe(self.now_seconds - block.accessed_seconds)
                block.accessed_seconds = self.now_seconds

    def record_evicted(self, block_ids: Sequence[BlockId]) -> None:
        """Records that blocks lost their contents."""
        if not self.sampled or self.sampled.keys().isdisjoint(block_ids):
            return
        for block_id in block_ids:
            block = self.sampled.pop(block_id, None)
            if block:
                self.lifetime.observe(self.now_seconds - block.taken_seconds)
                self.idle.observe(self.now_seconds - block.accessed_seconds)

    def clear(self) -> None:
        """Drops all sampled blocks, because all blocks lost their contents at once."""
        self.sampled.clear()

    def _draw_gap(self) -> int:
        """Returns the number of blocks to skip before the next sample: sample_every - 1 on average."""
        return self._randrange(2 * self._sample_every - 1)
