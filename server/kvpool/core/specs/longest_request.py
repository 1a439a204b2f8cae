"""The blocks of one request of maximum length: how many it holds at once, and whether a pool has them.

1. A request whose first i tokens have run, and whose first j tokens have slots, holds in each group the blocks of j
   tokens without those that `num_skipped_tokens` of i leaves behind. The tokens in flight are j - i.
2. The number of blocks is never too high. A pool is refused only if a request of maximum length reaches a point where
   it needs more blocks than the pool has, though it is alone.

`KVCacheSpec.max_blocks`, by which memory is planned, is an upper bound: as in vLLM, it counts one block more for
windows, and every state of Mamba layers. If it were used here, pools that serve every request would be refused.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import allocation_spec, num_draft_blocks
from kvpool.core.specs.pool_config import PoolConfig

_MAX_PEAKS: Final = 64
"""Maximum number of points, besides the end, at which blocks are counted."""


def check_longest_request(config: PoolConfig) -> None:
    """Checks that one request of maximum length fits, unless the configuration allows that it does not.

    Raises:
        InvalidArgumentError: It does not fit. The message has the numbers of `shortfall`.
    """
    missing = "" if config.allow_too_few_blocks else shortfall(config)
    if missing:
        message = f"{missing}: add blocks, lower max_model_len, or set allow_too_few_blocks"
        raise InvalidArgumentError("config.num_blocks", message, reason="ONE_REQUEST_DOES_NOT_FIT")


def shortfall(config: PoolConfig, num_unavailable: int = 0, max_blocks: int = 0) -> str:
    """Describes by how much one request of maximum length exceeds the pool; empty if it fits.

    Args:
        config: The pool.
        num_unavailable: Number of blocks that are reserved for other sessions.
        max_blocks: Maximum number of blocks that a session can hold; 0 for no limit.
    """
    num_available = config.num_blocks - 1 - sum(config.num_sink_blocks) - num_unavailable
    num_available = min(num_available, max_blocks) if max_blocks else num_available
    needed = most_held_blocks(config, config.max_model_len)
    if needed <= num_available:
        return ""
    longest = longest_fitting(
        config.max_model_len, lambda num_tokens: most_held_blocks(config, num_tokens) <= num_available
    )
    return (
        f"one request of {config.max_model_len} tokens needs {needed} blocks, {num_available} are available without the"
        f" null block, sinks, and what quotas withhold; the longest that fits has {longest} tokens"
    )


def longest_fitting(max_model_len: int, fits: Callable[[int], bool]) -> int:
    """Finds the maximum length up to max_model_len that fits; 0 if none fits. Bisects, so `fits` must be monotonic."""
    return bisect_left(range(1, max_model_len + 1), x=True, key=lambda length: not fits(length))


def most_held_blocks(config: PoolConfig, num_tokens: int) -> int:
    """Number of blocks that a request of this length holds, in all groups together, where it holds the most.

    The request has max_in_flight_tokens in flight, or one token if that is 0. All its tokens are computed in the pool.
    Look-ahead and encoder tokens are not counted. The result is exact if all windows are equal. With several different
    windows it can be too low by a few blocks, because only the last peaks are counted.
    """
    groups = [
        (allocation_spec(group.spec), span)
        for group, span in zip(config.groups, config.spans_tokens, strict=True)
        if allocation_spec(group.spec).keeps_tokens
    ]
    num_in_flight = min(config.max_in_flight_tokens or 1, num_tokens)
    num_draft = sum(num_draft_blocks(spec) for spec, _ in groups)
    windowed = [(spec, span) for spec, span in groups if not spec.keeps_all][:_MAX_PEAKS]

    # Groups that keep all tokens only grow, and the blocks of a window rise and fall periodically. So a request holds
    # the most at its end, or just before one of the last points at which a group leaves a block behind.
    end = num_tokens - num_in_flight
    peaks = {end}
    for spec, span in windowed:
        peaks.update(islice(_peaks(spec, span, end), _MAX_PEAKS // len(windowed)))
    return num_draft + max(
        sum(-(-(peak + num_in_flight) // span) - spec.num_skipped_tokens(peak) // span for spec, span in groups)
        for peak in peaks
    )


def _peaks(spec: KVCacheSpec, span_tokens: int, num_run_tokens: int) -> Iterator[int]:
    """Yields, last first, the numbers of run tokens after which the next one leaves a block of the group behind."""
    while num_skipped := spec.num_skipped_tokens(num_run_tokens) // span_tokens:
        num_run_tokens = spec.num_computed_to_skip(num_skipped * span_tokens) - 1
        yield num_run_tokens
