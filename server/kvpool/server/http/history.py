"""Samples of each pool over the last hour, for charts."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName

SAMPLE_SECONDS: Final = 10.0
KEPT_SAMPLES: Final = 361
"""An hour, and the sample at its beginning."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """Counters of a pool at one moment, all since its creation but the blocks in use.

    Attributes:
        changed_tokens: See `HitCurve`; empty without an estimate.
    """

    taken_seconds: float
    queried_tokens: int
    hit_tokens: int
    evicted_blocks: int
    used_blocks: int
    changed_tokens: dict[float, int]


class History:
    """The samples of pools. A sample costs a few reads of counters per pool."""

    def __init__(self) -> None:
        self._by_pool: dict[PoolName, deque[_Sample]] = {}

    def record(self, pools: Iterable[KVCacheManager], now_seconds: float | None = None) -> None:
        """Takes a sample of each pool. Drops those of other pools.

        Args:
            pools: The pools.
            now_seconds: The time since 1970; None for now.
        """
        now_seconds = time.time() if now_seconds is None else now_seconds
        before, self._by_pool = self._by_pool, {}
        for pool in pools:
            blocks, name = pool.blocks, pool.config.name
            samples = self._by_pool[name] = before.get(name) or deque(maxlen=KEPT_SAMPLES)
            sample = _Sample(
                taken_seconds=now_seconds,
                queried_tokens=pool.stats.queries_tokens,
                hit_tokens=pool.stats.hits_tokens,
                evicted_blocks=blocks.num_evicted,
                used_blocks=blocks.num_blocks - 1 - blocks.num_free_blocks,
                changed_tokens=pool.hit_curve.changed_tokens if pool.hit_curve else {},
            )
            if samples and sample.queried_tokens < samples[-1].queried_tokens:
                samples.clear()  # another pool of the same name
            samples.append(sample)

    def of(self, name: PoolName) -> dict[str, Any]:
        """The samples of a pool as JSON; values are those of the time between two samples."""
        return _pool_json(name, self._by_pool.get(name, ()))


def _pool_json(name: PoolName, samples: Sequence[_Sample]) -> dict[str, Any]:
    pairs = list(pairwise(samples))
    return {
        "pool": name,
        "times_seconds": [round(now.taken_seconds) for _, now in pairs],
        "hit_ratios": [_hit_ratio(before, now) for before, now in pairs],
        "evicted_blocks": [max(now.evicted_blocks - before.evicted_blocks, 0) for before, now in pairs],
        "used_blocks": [now.used_blocks for _, now in pairs],
        "hit_ratios_by_size": _hit_ratios_by_size(samples[0], samples[-1]) if samples else [],
    }


def _hit_ratios_by_size(first: _Sample, last: _Sample) -> list[dict[str, float]]:
    """Hit rates in pools of several times the blocks; none without look-ups or an estimate."""
    queried = last.queried_tokens - first.queried_tokens
    if queried <= 0 or not last.changed_tokens:
        return []
    found = last.hit_tokens - first.hit_tokens
    changes = {size: n - first.changed_tokens.get(size, 0) for size, n in last.changed_tokens.items()} | {1.0: 0}
    ratios = {size: min(max((found + changes[size]) / queried, 0.0), 1.0) for size in sorted(changes)}
    return [{"size": size, "hit_ratio": round(ratio, 4)} for size, ratio in ratios.items()]


def _hit_ratio(before: _Sample, now: _Sample) -> float | None:
    queried = now.queried_tokens - before.queried_tokens
    return round(max(now.hit_tokens - before.hit_tokens, 0) / queried, 4) if queried > 0 else None
