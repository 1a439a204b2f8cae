"""How much of the limits of a server is in use, for its metrics."""

from collections.abc import Sequence

from kvpool.core.memory_probe import process_memory, reserve_bytes, resident_bytes
from kvpool.server.metrics.observations import JournalCounts
from kvpool.server.services.components import Components
from kvpool.v1.pool_pb2 import PoolInfo
from kvpool.wire.control_groups import memory_limits_bytes


def limit_usage(
    parts: Components, pools: Sequence[PoolInfo], journal: JournalCounts | None, *, serves: bool
) -> dict[str, float]:
    """Returns the share of each limit that is in use, by the name of its setting. O(sessions).

    The memory of a container has no setting, so it is `container_memory`. Limits that are not set are left out, and so
    are those on clients of a server that serves none. Of `max_memory_bytes` the reserve counts as used, because a step
    leaves it free: steps that need memory are refused at 1.

    Args:
        parts: The parts of the server.
        pools: Its pools.
        journal: Counts of its journal; None without one.
        serves: Whether the server serves clients. A standby does not.
    """
    config, limits, resident = parts.config, parts.config.limits, resident_bytes()
    reserve = reserve_bytes(max((pool.cached_blocks for pool in pools), default=0))
    used: list[tuple[str, int, int]] = [
        ("max_memory_bytes", resident + reserve, process_memory.max_bytes),
        ("container_memory", resident, min(memory_limits_bytes(), default=0)),
    ]
    if journal:
        used.append(("journal_max_bytes", journal.size_bytes, config.journal.max_bytes))
    if serves:
        num_tokens = sum(session.num_tokens for _, session in parts.state.sessions)
        used += [
            ("max_pools", len(pools), config.max_pools),
            ("max_total_blocks", parts.pools.num_blocks(), limits.max_total_blocks),
            ("max_sessions", len(parts.state.sessions), limits.max_sessions),
            ("max_total_requests", sum(pool.requests for pool in pools), limits.max_total_requests),
            ("max_total_tokens", num_tokens, limits.max_total_tokens),
        ]
    return {name: value / maximum for name, value, maximum in used if maximum}
