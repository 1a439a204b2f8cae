"""The scheduler completes all requests with any pool size, and frees all blocks."""

from collections.abc import Sequence

import pytest

from kvpool.client import (
    ChunkedLocalAttentionSpec,
    Client,
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
from kvpool.replay.scheduler import Scheduler
from kvpool.replay.workload import ChatShare, Work


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


def make_pool(client: Client, num_blocks: int, specs: Sequence[KVCacheSpec] = (FULL,)) -> None:
    groups = tuple(map(KVCacheGroup, specs))
    client.create_pool(PoolConfig(PoolName("p"), num_blocks, 4096, groups, allow_too_few_blocks=True))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("preempts", [False, True])
def test_plays_all_requests_with_and_without_preemption(mix: str, preempts: bool) -> None:  # noqa: FBT001
    num_blocks = {"full": 20, "windows": 54, "chunks": 34, "states": 34, "sinks": 30}[mix] if preempts else 1000
    works = [Work(f"r{i}", [i] * 20, 30) for i in range(6)]
    with connect("embedded:") as client:
        make_pool(client, num_blocks, MIXES[mix])
        with client.open_session("p") as session:
            counts = Scheduler(session, Fixed(*works), max_num_batched_tokens=16).run()
        info = client.get_pool("p")
    assert (counts.requests, counts.output_tokens, counts.input_tokens) == (6, 180, 120)
    assert (counts.preemptions > 0) is preempts
    assert info.preemptions == counts.preemptions
    assert (info.free_blocks, info.requests) == (num_blocks - 1 - info.sink_blocks, 0)


def test_rejects_requests_that_are_too_large_for_the_pool() -> None:
    with connect("embedded:") as client:
        make_pool(client, 10)
        with client.open_session("p") as session:
            works = (Work("huge", [1] * 33, 4), Work("small", [1] * 32, 4))
            counts = Scheduler(session, Fixed(*works)).run()
    assert (counts.rejected_requests, counts.requests) == (1, 1)


def test_the_blocks_of_all_groups_count_for_the_size_of_a_request() -> None:
    with connect("embedded:") as client:
        make_pool(client, 12, MIXES["windows"])  # 11 usable; 12 tokens need 3 blocks in each of four groups
        with client.open_session("p") as session:
            counts = Scheduler(session, Fixed(Work("large", [1] * 8, 4), Work("small", [1] * 4, 4))).run()
    assert (counts.rejected_requests, counts.requests) == (1, 1)


@pytest.mark.parametrize(
    ("specs", "num_blocks"),
    [
        ([SlidingWindowSpec(4, sliding_window=100)], 5),
        ([FULL, *[SlidingWindowSpec(4, sliding_window=100)] * 4], 21),
        ([ChunkedLocalAttentionSpec(4, attention_chunk_size=10)], 5),
        ([MambaSpec(4, num_speculative_blocks=1)], 6),
    ],
)
def test_a_request_that_just_fits_is_played(specs: list[KVCacheSpec], num_blocks: int) -> None:
    with connect("embedded:") as client:
        make_pool(client, num_blocks, specs)
        with client.open_session("p") as session:
            counts = Scheduler(session, Fixed(Work("r", [1] * 12, 4))).run()
    assert (counts.rejected_requests, counts.requests) == (0, 1)


def test_requests_without_output_are_prefilled_only() -> None:
    with connect("embedded:") as client:
        make_pool(client, 100)
        with client.open_session("p") as session:
            counts = Scheduler(session, Fixed(Work("r", [1] * 40, 0)), max_num_batched_tokens=7).run()
    assert (counts.requests, counts.output_tokens, counts.steps) == (1, 0, 7)  # six rounds of prefill, one to free


def test_later_turns_hit_earlier_turns() -> None:
    with connect("embedded:") as client:
        make_pool(client, 5000)
        with client.open_session("p") as session:
            counts = Scheduler(session, ChatShare(1, 0, 3, 4)).run()
    assert counts.requests == 12
    assert counts.hit_tokens > counts.input_tokens / 2
    assert counts.shared_hit_tokens == 0
