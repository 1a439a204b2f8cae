"""The scheduler completes all requests with any pool size, and frees all blocks."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvpool.client import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    PoolConfig,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    connect,
)
from kvpool.core.ids import PoolName
from kvpool.replay.result import Counts
from kvpool.replay.scheduler import Scheduler
from kvpool.replay.workload import ChatShare, Work, Workload


class Fixed:
    """Requests that are all ready at the start."""

    def __init__(self, *works: Work) -> None:
        self._works = works

    def start(self) -> list[Work]:
        return list(self._works)

    def follow_up(self, done: Work, output: list[int]) -> Work | None:
        assert len(output) == done.output_length
        return None


FULL = FullAttentionSpec(4)
MIXES: dict[str, list[KVCacheSpec]] = {
    "full": [FULL],
    "windows": [FULL, *[SlidingWindowSpec(4, sliding_window=10)] * 3],
    "chunks": [ChunkedLocalAttentionSpec(4, attention_chunk_size=16), FULL],
    "states": [MambaSpec(8, num_speculative_blocks=1), FULL],
    "sinks": [SinkFullAttentionSpec(4, sink_len=8), SlidingWindowSpec(8, sliding_window=5)],
}


def played(num_blocks: int, specs: Sequence[KVCacheSpec], workload: Workload, **options: Any) -> Counts:
    """Plays requests in a pool; checks that nothing is left in it."""
    groups = tuple(map(KVCacheGroup, specs))
    with connect("embedded:") as client:
        client.create_pool(PoolConfig(PoolName("p"), num_blocks, 4096, groups, allow_too_few_blocks=True))
        with client.open_session("p") as session:
            counts = Scheduler(session, workload, **options).run()
        info = client.get_pool("p")
    assert (info.free_blocks, info.requests) == (num_blocks - 1 - info.sink_blocks, 0)
    assert info.preemptions == counts.preemptions
    return counts


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("preempts", [False, True])
def test_plays_all_requests_with_and_without_preemption(mix: str, preempts: bool) -> None:  # noqa: FBT001
    num_blocks = {"full": 20, "windows": 54, "chunks": 34, "states": 34, "sinks": 30}[mix] if preempts else 1000
    works = [Work(f"r{i}", [i] * 20, 30) for i in range(6)]
    counts = played(num_blocks, MIXES[mix], Fixed(*works), max_num_batched_tokens=16)
    assert (counts.requests, counts.output_tokens, counts.input_tokens) == (6, 180, 120)
    assert (counts.preemptions > 0) is preempts


@pytest.mark.parametrize(
    ("specs", "num_blocks", "num_tokens"),
    [
        ([FULL], 10, 32),
        (MIXES["windows"], 12, 4),  # 11 usable; 12 tokens need 3 blocks in each of four groups
        ([SlidingWindowSpec(4, sliding_window=100)], 5, 12),
        ([FULL, *[SlidingWindowSpec(4, sliding_window=100)] * 4], 21, 12),
        ([ChunkedLocalAttentionSpec(4, attention_chunk_size=10)], 5, 12),
        ([MambaSpec(4, num_speculative_blocks=1)], 6, 12),
    ],
)
def test_a_request_that_fits_is_played_and_a_larger_one_rejected(
    specs: list[KVCacheSpec], num_blocks: int, num_tokens: int
) -> None:
    works = (Work("larger", [1] * (num_tokens + 1), 4), Work("fits", [1] * num_tokens, 4))
    counts = played(num_blocks, specs, Fixed(*works))
    assert (counts.rejected_requests, counts.requests) == (1, 1)


def test_requests_without_output_are_prefilled_only() -> None:
    counts = played(100, [FULL], Fixed(Work("r", [1] * 40, 0)), max_num_batched_tokens=7)
    assert (counts.requests, counts.output_tokens, counts.steps) == (1, 0, 7)  # six rounds of prefill, one to free


def test_later_turns_hit_earlier_turns() -> None:
    counts = played(5000, [FULL], ChatShare(1, 0, 3, 4))
    assert counts.requests == 12
    assert counts.hit_tokens > counts.input_tokens / 2
    assert counts.shared_hit_tokens == 0
