"""Replays in this process."""

from collections.abc import Sequence

from kvpool.client import ReuseOrder
from kvpool.replay.play import PoolOptions, replay_serially
from kvpool.replay.processes import Reporter
from kvpool.replay.result import Counts
from kvpool.replay.scheduler import SchedulerOptions
from kvpool.replay.trace_formats import TraceRequest


def replayed(trace: Sequence[TraceRequest], num_blocks: int, block_size: int, order: ReuseOrder) -> Counts:
    """Plays prompts one after another on a pool of its own, which admits all of them."""
    longest = max(entry.input_length for entry in trace)
    pool, reporter = PoolOptions("p", num_blocks, block_size, longest, order), Reporter(lambda _: None, print)
    counts = replay_serially(pool, list(trace), SchedulerOptions("embedded:", "p"), reporter).counts
    assert counts.rejected_requests == 0
    return counts
