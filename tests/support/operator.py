"""Descriptions of pools, ranks and sessions, as AdminService returns them."""

from typing import Any

from kvpool.cli.top_sample import Sample
from kvpool.client import FullAttentionSpec, KVCacheGroup, PoolConfig, PoolInfo, PoolState
from kvpool.client.admin import Overview, ServerInfo, SessionInfo
from kvpool.core.ids import PoolName, SessionNumber
from kvpool.core.statistics import ActivityCounters, PrefixCacheStats


def pool_info(name: str = "m", num_blocks: int = 101, free_blocks: int = 60, **fields: Any) -> PoolInfo:
    """A pool; by default two fifths of its blocks are used."""
    group = KVCacheGroup(FullAttentionSpec(16), ("layer.0",))
    usable = max(num_blocks - 1, 0)
    defaults: dict[str, Any] = {
        "config": PoolConfig(PoolName(name), num_blocks, 1024, (group,)),
        "epoch": 1,
        "free_blocks": free_blocks,
        "cached_blocks": 70 if usable else 0,
        "usage": 1 - free_blocks / usable if usable else 0.0,
        "prefix_cache": PrefixCacheStats(),
        "recent_hit_rate": 0.373,
        "evicted_blocks": 0,
        "preemptions": 0,
        "sessions": 1,
        "requests": 5,
        "running_requests": 3,
        "state": PoolState.READY,
        "activity": ActivityCounters(),
    }
    return PoolInfo(**{**defaults, **fields})


def session_info(**fields: Any) -> SessionInfo:
    """An active session."""
    defaults: dict[str, Any] = {
        "session_number": SessionNumber(1),
        "client_name": "scheduler",
        "pool_name": PoolName("m"),
        "lease_seconds": 10.0,
        "age_seconds": 100.0,
        "idle_seconds": 0.2,
        "streaming": True,
        "sequence": 1000,
        "executed_sequence": 999,
        "requests": 5,
        "running_requests": 3,
        "held_blocks": (40,),
    }
    return SessionInfo(**{**defaults, **fields})


def sample(
    *pools: PoolInfo, sessions: tuple[SessionInfo, ...] = (), taken_seconds: float = 100.0, **server: Any
) -> Sample:
    """A server with these pools and sessions."""
    info = ServerInfo(**{"version": "1.2.3", "uptime_seconds": taken_seconds, "draining": False, **server})
    return Sample(taken_seconds, Overview(info, pools), sessions)
