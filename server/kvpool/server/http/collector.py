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
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from typing import Any, Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import PoolName
from kvpool.core.ranks.messages import RankInfo
from kvpool.core.views.block_map import MAX_CELLS, MAX_SAMPLED_BLOCKS, BlockMap, BlockMapScan
from kvpool.core.views.inspection import MAX_COUNTED_REQUESTS, Page, SessionInfo, describe_session, page_of_sessions
from kvpool.core.views.pool_info import GroupInfo, PoolInfo
from kvpool.server.cluster.directory_cache import DirectoryCache
from kvpool.server.cluster.sample import sample_shard
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.http.history import SAMPLE_SECONDS, History
from kvpool.server.http.recent_events import RecentEvents
from kvpool.server.services.components import Components
from kvpool.wire.metrics_pages import Readiness

INTERVAL_SECONDS: Final = 2.0
MAX_LOOP_SHARE: Final = 0.005
MAX_POOLS: Final = 64
MAX_SESSIONS: Final = 200
MAX_RANKS: Final = 512
MAX_PROCESSES: Final = 16
MAX_SHARDS: Final = 256
"""Maximum number of pools, of sessions, of ranks, of processes per rank, and of shards that are shown."""
_MIN_CELLS: Final = 16
_MIN_SAMPLED_BLOCKS: Final = 256


@dataclass(frozen=True, slots=True)
class Copied:
    """What the status page shows at one moment.

    Attributes:
        parts: The parts of the page as JSON values, by name.
        next_seconds: Time until the next copy should be made.
    """

    parts: dict[str, Any]
    next_seconds: float


class StatusCollector:
    """Makes the copies.

    Args:
        parts: The parts of the server.
        shard: Its shard; None without a cluster.
        view: What the server knows of its cluster.
        readiness: Returns whether the server is ready.
    """

    def __init__(
        self,
        parts: Components,
        shard: ShardMember | None,
        view: DirectoryCache,
        readiness: Callable[[], Readiness],
    ) -> None:
        self._parts = parts
        self._shard = shard
        self._view = view
        self._readiness = readiness
        self._history, self._events = History(), RecentEvents()
        self._version = version("kvpool")
        self._started_seconds = time.monotonic()
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
        infos = []
        for name in names:
            if name in self._parts.pools.names():  # it may be removed meanwhile
                infos.append(self._parts.pools.describe(name))
                yield "", None
        maps: list[dict[str, Any]] = []
        yield from self._map_blocks(names, maps)
        cached = {each["pool"]: sum(each["cached"]) for each in maps}
        yield "pools", {"pools": [self._pool_json(info, cached) for info in infos]}
        yield "blocks", {"pools": maps}
        yield "sessions", self._sessions_json(names)
        ranks = [(info.config.name, rank) for info in infos for rank in info.ranks]
        yield "ranks", {"ranks": [self._rank_json(*each) for each in ranks[:MAX_RANKS]], "num_ranks": len(ranks)}
        yield "shards", {"shards": self._shards_json()}
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
            maps.append(_map_json(pool, scan.result))
            yield "", None

    def _pool_json(self, info: PoolInfo, cached: dict[PoolName, int]) -> dict[str, Any]:
        name, stats = info.config.name, info.prefix_cache
        usable = max(info.config.num_blocks - 1, 0)
        pools = self._parts.state.pools
        return {
            "pool": name,
            "state": info.state.value,
            "epoch": info.epoch,
            "blocks": usable,
            "used_blocks": usable - info.free_blocks if usable else 0,
            "free_blocks": info.free_blocks,
            "free_cached_blocks": min(cached.get(name, 0), info.free_blocks),
            "cached_blocks": info.cached_blocks,
            "pending_blocks": len(pools.get(name).blocks.prefix_map.pending.steps) if name in pools else 0,
            "quarantined_blocks": info.quarantined_blocks,
            "quarantined_sessions": info.quarantined_sessions,
            "sink_blocks": info.sink_blocks,
            "reserved_blocks": info.reserved_blocks,
            "recent_hit_ratio": round(info.recent_hit_rate, 4),
            "lookups_total": stats.requests,
            "queried_tokens_total": stats.queries_tokens,
            "hit_tokens_total": stats.hits_tokens,
            "shared_hit_tokens_total": stats.shared_hits_tokens,
            "resets_total": stats.resets,
            "evicted_blocks_total": info.evicted_blocks,
            "allocations_total": info.activity.allocations,
            "refusals_total": info.activity.refusals,
            "preemptions_total": info.preemptions,
            "steps_total": info.activity.steps,
            "sessions": info.sessions,
            "requests": info.requests,
            "running_requests": info.running_requests,
            "weights_versions": list(info.weights_versions),
            "groups": [_group_json(group) for group in info.groups],
        }

    def _sessions_json(self, names: list[PoolName]) -> dict[str, Any]:
        state, now_seconds = self._parts.state, self._parts.clock.now_seconds()
        shown = set(names)
        found = ((pool, session) for pool, session in state.sessions if pool.config.name in shown)
        infos, _ = page_of_sessions(found, Page(MAX_SESSIONS, ""), now_seconds)
        sessions = [self._session_json(info) for info in infos]
        num_sessions, num_counted = len(state.sessions), 0
        for pool in self._open_pools(names):
            num_sessions += len(pool.quarantine)
            for each in pool.quarantine:
                num_counted += len(each.session.requests)
                if len(sessions) >= 2 * MAX_SESSIONS or num_counted > MAX_COUNTED_REQUESTS:
                    break
                info = describe_session(pool, each.session, now_seconds)
                due = each.due_seconds - now_seconds
                quarantine = {"ends_in_seconds": None if due == float("inf") else round(max(due, 0), 1)}
                sessions.append({**self._session_json(info), "quarantine": quarantine})
        return {"sessions": sessions, "num_sessions": num_sessions if names else 0}

    def _session_json(self, info: SessionInfo) -> dict[str, Any]:
        return {
            "pool": info.pool_name,
            "session": info.session_number,
            "client": info.client_name,
            "is_streaming": info.streaming,
            "age_seconds": round(info.age_seconds),
            "idle_seconds": round(info.idle_seconds),
            "lease_seconds": info.lease_seconds,
            "held_blocks": list(info.held_blocks),
            "min_blocks": info.min_blocks,
            "max_blocks": info.max_blocks,
            "requests": info.requests,
            "running_requests": info.running_requests,
            "waiting_requests": info.requests - info.running_requests,
            "steps": info.sequence,
            "unexecuted_steps": info.sequence - info.executed_sequence if info.executed_sequence else None,
            "weights_version": info.weights_version,
            "quarantine": None,
        }

    def _rank_json(self, pool: PoolName, rank: RankInfo) -> dict[str, Any]:
        membership = self._parts.pools.memberships.get(pool)
        return {
            "pool": pool,
            "rank": rank.rank,
            "state": rank.state.value,
            "is_lender": bool(membership and membership.is_lent),
            "device": rank.device,
            "host": rank.host,
            "process_id": rank.pid,
            "available_bytes": rank.available_bytes,
            "allocated_bytes": rank.allocated_bytes,
            "blocks": rank.num_blocks,
            "num_processes": len(rank.mapping_processes),
            "processes": [
                {"process_id": process.pid, "client": process.client_name}
                for process in rank.mapping_processes[:MAX_PROCESSES]
            ],
        }

    def _shards_json(self) -> list[dict[str, Any]]:
        if self._shard is None:
            return []
        replica, now_seconds = self._shard.replica, time.monotonic()
        connected = replica.standbys.connected
        found = []
        for name, record in islice(sorted(self._view.shards.items()), MAX_SHARDS):
            is_own = name == self._shard.shard
            members = {member.member_id: member for member in record.in_sync}
            in_sync = set(members)
            if is_own:
                members |= {standby.member.member_id: standby.member for standby in connected.values()}
            shown = []
            for member_id, member in members.items():
                standby = connected.get(member_id) if is_own else None
                shown.append(
                    {
                        "member": member_id[:8],
                        "addresses": list(member.addresses),
                        "zone": member.zone,
                        "is_primary": member_id == record.primary,
                        "is_in_sync": member_id in in_sync,
                        "lag_positions": replica.last_position - standby.acknowledged if standby else None,
                        "lag_seconds": round(standby.lag_seconds(now_seconds), 3) if standby else None,
                    }
                )
            found.append(
                {
                    "shard": name,
                    "is_own": is_own,
                    "term": record.term,
                    "pools": self._view.num_pools[name],
                    "members": shown,
                }
            )
        return found

    def _server_json(self) -> dict[str, Any]:
        found = self._readiness()
        shard = sample_shard(self._shard) if self._shard else None
        return {
            "version": self._version,
            "taken_seconds": round(time.time(), 3),
            "uptime_seconds": round(time.monotonic() - self._started_seconds),
            "is_ready": found.is_ready,
            "detail": found.detail,
            "is_draining": self._parts.state.pools.drain_state.is_server_drained,
            "shard": shard.shard if shard else "",
            "role": shard.role if shard else "",
            "term": shard.term if shard else 0,
            "standbys_missing": shard.standbys_missing if shard else 0,
            "is_directory_up": shard.is_directory_up if shard else True,
            "num_pools": len(self._names()),
            "cost_seconds": round(self._cost_seconds, 6),
        }


def _group_json(group: GroupInfo) -> dict[str, Any]:
    misses = [{"reason": each.reason.value, "lookups": each.lookups, "tokens": each.tokens} for each in group.misses]
    return {**asdict(group), "misses": misses}


def _map_json(pool: KVCacheManager, found: BlockMap) -> dict[str, Any]:
    return {
        "pool": pool.config.name,
        "num_blocks": pool.config.num_blocks - 1,
        "blocks_per_cell": found.blocks_per_cell,
        "is_sampled": found.is_sampled,
        "in_use": found.in_use,
        "pending": found.pending,
        "quarantined": found.quarantined,
        "cached": found.cached,
        "sessions": found.sessions,
        "reuse_percent": found.reuse_percent,
    }
