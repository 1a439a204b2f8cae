"""Descriptions of pools, ranks and sessions, as AdminService returns them."""

from collections.abc import Sequence
from typing import Any

from kvpool.cli.top_sample import Sample, busiest
from kvpool.client import PoolInfo, PoolState
from kvpool.v1.admin_pb2 import ListPoolsResponse, ServerInfo, SessionInfo
from kvpool.v1.pool_pb2 import PoolConfig


def pool_info(name: str = "m", num_blocks: int = 101, free_blocks: int = 60, **fields: Any) -> PoolInfo:
    """A pool; by default two fifths of its blocks are used."""
    usable = max(num_blocks - 1, 0)
    defaults: dict[str, Any] = {
        "config": PoolConfig(name=name, num_blocks=num_blocks, max_model_len=1024),
        "epoch": 1,
        "free_blocks": free_blocks,
        "cached_blocks": 70 if usable else 0,
        "usage": 1 - free_blocks / usable if usable else 0.0,
        "recent_hit_rate": 0.373,
        "sessions": 1,
        "requests": 5,
        "running_requests": 3,
        "state": PoolState.POOL_STATE_READY,
    }
    return PoolInfo(**{**defaults, **fields})


def session_info(**fields: Any) -> SessionInfo:
    """An active session."""
    defaults: dict[str, Any] = {
        "session_number": 1,
        "client_name": "scheduler",
        "pool_name": "m",
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
    *pools: PoolInfo, sessions: Sequence[SessionInfo] = (), taken_seconds: float = 100.0, **server: Any
) -> Sample:
    """A server with these pools and sessions."""
    info = ServerInfo(**{"version": "1.2.3", "uptime_seconds": taken_seconds, "draining": False, **server})
    return Sample(taken_seconds, ListPoolsResponse(server=info, pools=pools), busiest(sessions))
