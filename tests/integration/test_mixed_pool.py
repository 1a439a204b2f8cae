"""Schedulers share a pool of several kinds over a real socket: all is played, prefixes are shared, no block is lost."""

from concurrent.futures import ThreadPoolExecutor

from kvpool.client import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    PoolConfig,
    SlidingWindowSpec,
    connect,
)
from kvpool.core.ids import PoolName
from kvpool.replay.result import Counts
from kvpool.replay.scheduler import Scheduler
from kvpool.replay.workload import ChatShare
from support.server import running_server

GROUPS = tuple(
    KVCacheGroup(spec, (f"layer.{i}",))
    for i, spec in enumerate(
        [
            SlidingWindowSpec(16, sliding_window=100),
            FullAttentionSpec(16),
            ChunkedLocalAttentionSpec(32, attention_chunk_size=128),
            MambaSpec(64),
        ]
    )
)
SESSIONS = 3


def play(address: str, index: int) -> Counts:
    with connect(address) as client, client.open_session("mixed") as session:
        return Scheduler(session, ChatShare(7, index, 6, 3), max_num_seqs=8, max_num_batched_tokens=512).run()


def test_sessions_share_a_mixed_pool() -> None:
    num_blocks = 600
    with running_server() as address, connect(address) as client, ThreadPoolExecutor(SESSIONS) as threads:
        client.create_pool(PoolConfig(PoolName("mixed"), num_blocks, 8192, GROUPS, enable_events=True))
        all_counts = list(threads.map(lambda index: play(address, index), range(SESSIONS)))
        info = client.get_pool("mixed")
    assert [counts.requests for counts in all_counts] == [18] * SESSIONS
    assert sum(counts.shared_hit_tokens for counts in all_counts) > 0
    assert sum(counts.preemptions for counts in all_counts) > 0
    assert (info.free_blocks, info.requests, info.sessions) == (num_blocks - 1, 0, 0)
    assert info.evicted_blocks > 0
