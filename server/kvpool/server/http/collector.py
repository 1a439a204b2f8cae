"""Copies what the status page shows from the server's state. Called on the server's event loop, which alone reads it.

1. A copy is made only while a client asks for it, at most once per `INTERVAL_SECONDS` for all clients, and less often
   if copies take more than `MAX_LOOP_SHARE` of the loop's processor time.
2. The work between two yields to the loop is bounded, as that of `inspection` and `BlockMapScan`.
3. Ids and salts of sessions, tokens, request ids and prompts are not copied. See docs/how-to/secure.md for who reads
   the rest.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName
from kvpool.core.views.block_map import MAX_CELLS, MAX_SAMPLED_BLOCKS, BlockMap, BlockMapScan
from kvpool.core.views.inspection import MAX_COUNTED_REQUESTS, Page, page_of_sessions
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.http.history import SAMPLE_SECONDS, History
from kvpool.server.http.recent_events import RecentEvents
from kvpool.server.services.components import Components
from kvpool.v1.admin_pb2 import ServerInfo
from kvpool.v1.pool_pb2 import PoolInfo
from kvpool.wire.fields import field_values
from kvpool.wire.metrics_pages import Readiness
from kvpool.wire.picture import session_info

INTERVAL_SECONDS: Final = 2.0
MAX_LOOP_SHARE: Final = 0.005
MAX_POOLS: Final = 64
MAX_SESSIONS: Final = 200
MAX_RANKS: Final = 512
MAX_PROCESSES: Final = 16
"""Maximum number of pools, of sessions, of ranks, and of processes per rank that are shown."""
_MIN_CELLS: Final = 16
_MIN_SAMPLED_BLOCKS: Final = 256


@dataclass(frozen=True, slots=True)
class Copied:
    """What the status page shows at one moment.

    Attributes:
        parts: The parts of the page by name: JSON values, with messages in place of objects.
        next_seconds: Time until the next copy should be made.
    """

    parts: dict[str, Any]
    next_seconds: float


class StatusCollector:
    """Makes the copies.

    Args:
        parts: The parts of the server.
        shard: Its shard; None without a cluster.
        readiness: Returns whether the server is ready.
        server_info: Describes the server.
    """

    def __init__(
        self,
        parts: Components,
        shard: ShardMember | None,
        readiness: Callable[[], Readiness],
        server_info: Callable[[], ServerInfo],
    ) -> None:
        self._parts = parts
        self._shard = shard
        self._readiness = readiness
        self._history, self._events = History(), RecentEvents()
        self._server_info = server_info
        self._cost_seconds = 0.0

    async def watch(self) -> None:
        """Keeps samples of the pools and the newest events. Runs indefinitely."""
        self._events.start()
        try:
            while True:
                self._history.record(self._open_pools(self._parts.pools.names()[:MAX_POOLS]))
                await asyncio.sleep(SAMPLE_SECONDS)
        finally:
            self._events.stop()

    async def copy(self) -> Copied:
        """Copies everything; other work of the loop runs in between."""
        cost_seconds, start_seconds = 0.0, time.thread_time()
        copied: dict[str, Any] = {}
        for name, content in self._steps():
            if content is not None:
                copied[name] = content
            cost_seconds += time.thread_time() - start_seconds
            await asyncio.sleep(0)
            start_seconds = time.thread_time()
        self._cost_seconds = cost_seconds
        return Copied(copied, max(INTERVAL_SECONDS, cost_seconds / MAX_LOOP_SHARE))

    def _steps(self) -> Iterator[tuple[str, Any]]:
        """Yields the parts by name, and None where other work may run."""
        names = self._names()[:MAX_POOLS]
        infos: list[PoolInfo] = []
        num_ranks = 0
        for name in names:
            if name in self._parts.pools.memberships or name in self._parts.state.pools:  # it may be removed meanwhile
                info = self._parts.pools.figures(name, max(MAX_RANKS - num_ranks, 0), MAX_PROCESSES)
                num_ranks += len(info.ranks)
                infos.append(info)
                yield "", None
        maps: list[dict[str, Any]] = []
        yield from self._map_blocks(names, maps)
        cached = {each["pool"]: sum(each["cached"]) for each in maps}
        yield "pools", {"pools": [self._pool_json(info, cached) for info in infos]}
        yield "blocks", {"pools": maps}
        yield "sessions", self._sessions_json(names)
        yield "members", {"members": self._members_json()}
        yield "events", {"events": self._events.as_json()}
        history: list[dict[str, Any]] = []
        for name in names:
            history.append(self._history.of(name))
            yield "", None
        yield "history", {"pools": history}
        yield "server", self._server_json()

    def _names(self) -> list[PoolName]:
        if self._shard and self._shard.refusal():  # the primary shows them
            return []
        return self._parts.pools.names()

    def _open_pools(self, names: list[PoolName]) -> Iterator[KVCacheManager]:
        pools = self._parts.state.pools
        return (pools.get(name) for name in names if name in pools)

    def _map_blocks(self, names: list[PoolName], maps: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
        share = max(len(names), 1)
        cells, sampled = max(MAX_CELLS // share, _MIN_CELLS), max(MAX_SAMPLED_BLOCKS // share, _MIN_SAMPLED_BLOCKS)
        for pool in self._open_pools(names):
            scan = BlockMapScan(pool, cells, sampled)
            while scan.advance():
                yield "", None
            figures = field_values(BlockMap, scan.result)
            maps.append({"pool": pool.config.name, "num_blocks": pool.config.num_blocks - 1, **figures})
            yield "", None

    def _pool_json(self, info: PoolInfo, cached: dict[str, int]) -> dict[str, Any]:
        name, pools = info.config.name, self._parts.state.pools
        membership = self._parts.pools.memberships.get(PoolName(name))
        return {
            "info": info,
            "is_lent": bool(membership and membership.is_lent),
            "free_cached_blocks": min(cached.get(name, 0), info.free_blocks),
            "pending_blocks": _num_pending(pools.get(name)) if name in pools else 0,
        }

    def _sessions_json(self, names: list[PoolName]) -> dict[str, Any]:
        state, now_seconds = self._parts.state, self._parts.clock.now_seconds()
        shown = set(names)
        found = ((pool, session) for pool, session in state.sessions if pool.config.name in shown)
        listed, _ = page_of_sessions(found, Page(MAX_SESSIONS, ""))
        sessions: list[dict[str, Any]] = [
            {"info": session_info(pool, session, now_seconds), "quarantine": None} for pool, session in listed
        ]
        num_sessions, num_counted = len(state.sessions), 0
        for pool in self._open_pools(names):
            num_sessions += len(pool.quarantine)
            for each in pool.quarantine:
                num_counted += len(each.session.requests)
                if len(sessions) >= 2 * MAX_SESSIONS or num_counted > MAX_COUNTED_REQUESTS:
                    break
                due = each.due_seconds - now_seconds
                quarantine = {"ends_in_seconds": None if due == float("inf") else round(max(due, 0), 1)}
                info = session_info(pool, each.session, now_seconds)
                sessions.append({"info": info, "quarantine": quarantine})
        return {"sessions": sessions, "num_sessions": num_sessions if names else 0}

    def _members_json(self) -> list[dict[str, Any]]:
        """The servers in sync, and the standbys that are connected to this primary."""
        if self._shard is None:
            return []
        replica, now_seconds = self._shard.replica, time.monotonic()
        record, connected = replica.entry.record, replica.standbys.connected
        members = {member.member_id: member for member in replica.in_sync}
        in_sync = set(members)
        members |= {standby.member.member_id: standby.member for standby in connected.values()}
        found = []
        for member_id, member in members.items():
            standby = connected.get(member_id)
            found.append(
                {
                    "member": member_id[:8],
                    "addresses": list(member.addresses),
                    "is_primary": record is not None and member_id == record.primary,
                    "is_in_sync": member_id in in_sync,
                    "lag_positions": replica.last_position - standby.acknowledged if standby else None,
                    "lag_seconds": round(standby.lag_seconds(now_seconds), 3) if standby else None,
                }
            )
        return found

    def _server_json(self) -> dict[str, Any]:
        found = self._readiness()
        replica = self._shard.replica if self._shard else None
        return {
            "info": self._server_info(),
            "taken_seconds": round(time.time(), 3),
            "is_ready": found.is_ready,
            "detail": found.detail,
            "role": replica.role.value if replica else "",
            "standbys_missing": replica.num_missing if replica else 0,
            "is_directory_up": not (self._shard and self._shard.directory_client.error),
            "num_pools": len(self._names()),
            "cost_seconds": round(self._cost_seconds, 6),
        }


def _num_pending(pool: KVCacheManager) -> int:
    """Number of blocks of the first tier that only the session that fills them can hit."""
    host = pool.blocks.host
    return len(pool.blocks.prefix_map.pending.steps) - (host.num_pending if host else 0)
