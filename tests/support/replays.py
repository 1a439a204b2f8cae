"""Replays in this process."""

from collections.abc import Sequence

from kvpool.client import ReuseOrder, connect
from kvpool.replay.play import play_prompts, replay_pool
from kvpool.replay.result import Counts
from kvpool.replay.trace_formats import TraceRequest


def replayed(trace: Sequence[TraceRequest], num_blocks: int, block_size: int, order: ReuseOrder) -> Counts:
    """Plays prompts one after another on a pool of its own, which admits all of them."""
    longest = max(entry.input_length for entry in trace)
    with connect("embedded:") as client:
        client.create_pool(replay_pool("p", num_blocks, block_size, longest, order))
        with client.open_session("p") as session:
            counts = play_prompts(session, trace, lambda: None)
    assert counts.rejected_requests == 0
    return counts
