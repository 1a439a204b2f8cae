"""Fills the messages that describe pools, sessions, requests, blocks and misses. They are their only description.

1. A message is filled when a reader asks for it. Steps fill none.
2. The id of a session is secret, and in no message.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from kvpool.core.blocks.host_tier import HostTier
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_map import FIRST_SCOPE
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import BlockId, GroupId
from kvpool.core.ranks.messages import PoolState, RankInfo, RankState
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import KIND_NAMES, allocation_spec
from kvpool.core.statistics import ActivityCounters, HostCounters, MissReason, PrefixCacheStats
from kvpool.core.views.inspection import BlockState, held_blocks, state_of
from kvpool.core.views.misses import MAX_LISTED_VERSIONS, GroupEnd, PromptEnd
from kvpool.v1 import admin_pb2, pool_pb2
from kvpool.wire import pools as wire_pools
from kvpool.wire.fields import EnumNumbers, field_values

MAX_LISTED_SCOPES: Final = 64
MAX_LISTED_SESSIONS: Final = 16
_BLOCK_STATES: Final = EnumNumbers(BlockState, admin_pb2.BlockState)
_RANK_STATES: Final = EnumNumbers(RankState, pool_pb2.RankState)
_MISS_REASONS: Final = EnumNumbers(MissReason, pool_pb2.MissReason)


def pool_figures(
    pool: KVCacheManager, state: PoolState, event_sequence: int, namespace: bytes | None = None
) -> pool_pb2.PoolInfo:
    """Describes the current state of a pool, of its configuration only name and sizes. O(its sessions).

    Args:
        pool: The pool.
        state: Its state.
        event_sequence: Number of its newest batch of events.
        namespace: Describes it for a tenant of this namespace: nothing then depends on which hashes and weights
            versions others have. None for an operator.
    """
    config, sessions = pool.config, pool.sessions.values()
    versions = {each.weights_version for each in sessions if namespace in (None, each.namespace)}
    hides_scopes, host = namespace is not None, pool.blocks.host
    return pool_pb2.PoolInfo(
        config=pool_pb2.PoolConfig(
            name=config.name,
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            num_host_blocks=config.num_host_blocks,
        ),
        epoch=pool.epoch,
        free_blocks=pool.blocks.num_free_blocks,
        cached_blocks=len(pool.blocks.prefix_map) - (sum(host.num_cached) if host else 0),
        usage=pool.blocks.usage,
        prefix_cache=pool_pb2.PrefixCacheCounters(**field_values(PrefixCacheStats, pool.stats)),
        recent_hit_rate=pool.recent_hit_rate.rate,
        evicted_blocks=pool.blocks.num_evicted,
        preemptions=pool.num_preemptions,
        sessions=len(sessions),
        requests=sum(len(session.requests) for session in sessions),
        event_sequence=event_sequence,
        sink_blocks=len(pool.sink_blocks),
        state=wire_pools.POOL_STATES.number(state),
        running_requests=sum(session.num_running for session in sessions),
        activity=pool_pb2.ActivityCounters(**field_values(ActivityCounters, pool.activity)),
        groups=[_group(pool, GroupId(i), hides_scopes=hides_scopes) for i in range(len(config.groups))],
        quarantined_blocks=pool.quarantine.num_blocks,
        quarantined_sessions=len(pool.quarantine),
        reserved_blocks=pool.quotas.num_reserved,
        weights_versions=sorted(versions)[:MAX_LISTED_VERSIONS],
        host_memory=_host_memory(host) if host else None,
    )


def _host_memory(host: HostTier) -> pool_pb2.HostMemoryInfo:
    return pool_pb2.HostMemoryInfo(
        cached_blocks=sum(host.num_cached),
        used_blocks=host.num_blocks - host.num_free,
        **field_values(HostCounters, host.counters),
    )


def pool_info(pool: KVCacheManager, state: PoolState, event_sequence: int) -> pool_pb2.PoolInfo:
    """Describes a pool as `pool_figures` does, with its whole configuration."""
    info = pool_figures(pool, state, event_sequence)
    add_configuration(info, pool)
    return info


def add_configuration(info: pool_pb2.PoolInfo, pool: KVCacheManager) -> None:
    """Adds the whole configuration of a pool, but the none_hash, and the id of its memory."""
    info.config.CopyFrom(wire_pools.config_to_proto(pool.config, with_none_hash=False))
    info.memory_id = pool.memory_id


def _group(pool: KVCacheManager, group_id: GroupId, *, hides_scopes: bool) -> pool_pb2.GroupInfo:
    counters = pool.blocks.group_counters[group_id]
    lookups, tokens = counters.misses, counters.missed_tokens
    if hides_scopes and MissReason.OTHER_SCOPE in lookups:
        lookups, tokens = Counter(lookups), Counter(tokens)
        for column in (lookups, tokens):
            column[MissReason.UNSEEN] += column.pop(MissReason.OTHER_SCOPE)
    return pool_pb2.GroupInfo(
        kind=KIND_NAMES[type(allocation_spec(pool.config.groups[group_id].spec))],
        used_blocks=counters.used_blocks,
        cached_blocks=pool.blocks.prefix_map.num_cached(group_id),
        allocated_blocks=counters.allocated_blocks,
        evicted_blocks=counters.evicted_blocks,
        misses=[
            pool_pb2.MissCount(reason=_MISS_REASONS.number(each), lookups=lookups[each], tokens=tokens[each])
            for each in MissReason
            if each in lookups
        ],
    )


def rank_infos(ranks: Iterable[RankInfo], max_processes: int | None) -> list[pool_pb2.RankInfo]:
    """Describes the ranks of a pool, and of each at most `max_processes` that map its memory; None for all."""
    return [
        pool_pb2.RankInfo(
            state=_RANK_STATES.number(each.state),
            mapping_processes=wire_pools.mapping_processes_to_proto(each.mapping_processes[:max_processes]),
            **field_values(RankInfo, each, ("state", "mapping_processes")),
        )
        for each in ranks
    ]


def session_info(pool: KVCacheManager, session: Session, now_seconds: float) -> admin_pb2.SessionInfo:
    """Describes a session. O(its requests)."""
    held = [held_blocks(request) for request in session.requests.values()]
    return admin_pb2.SessionInfo(
        session_number=session.session_number,
        client_name=session.client_name,
        pool_name=pool.config.name,
        lease_seconds=session.lease_seconds,
        age_seconds=max(now_seconds - session.opened_seconds, 0.0),
        idle_seconds=max(now_seconds - session.last_seen_seconds, 0.0),
        streaming=session.open_streams > 0,
        sequence=session.sequence,
        executed_sequence=session.executed_sequence,
        requests=len(held),
        running_requests=session.num_running,
        held_blocks=map(sum, zip(*held, strict=True)) if held else (0,) * len(pool.config.groups),
        min_blocks=session.holding.min_blocks if session.holding else 0,
        max_blocks=session.holding.max_blocks if session.holding else 0,
        weights_version=session.weights_version,
        reserve_tokens=session.reserve_tokens,
    )


def request_info(pool: KVCacheManager, request: Request) -> admin_pb2.RequestInfo:
    """Describes a request."""
    return admin_pb2.RequestInfo(
        request_id=request.request_id,
        session_number=request.session_number,
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        held_blocks=held_blocks(request),
        num_preemptions=request.num_preemptions,
        lora_name=request.lora_name or "",
        reserve_blocks=pool.num_reserve_blocks(request),
    )


def block_info(pool: KVCacheManager, block_id: BlockId) -> admin_pb2.BlockInfo:
    """Describes a block."""
    prefix_map, block_hash = pool.blocks.prefix_map, pool.blocks.block_hash(block_id)
    info = admin_pb2.BlockInfo(
        block_id=block_id,
        state=_BLOCK_STATES.number(state_of(pool, block_id)),
        ref_cnt=pool.blocks.ref_cnt(block_id),
        in_host_memory=block_id >= pool.config.num_blocks,
    )
    if block_hash is not None:
        info.block_hash = block_hash
        info.group_id = prefix_map.group_id(block_id)
        info.session_number = prefix_map.session_number(block_id)
        info.pending = block_id in prefix_map.pending.steps
    return info


def wanted_state(state: int) -> BlockState | None:
    """Decodes the block state of a filter; None for any state.

    Raises:
        InvalidArgumentError: The state is unknown.
    """
    found = _BLOCK_STATES.member(state)
    if found is None and state != admin_pb2.BLOCK_STATE_UNSPECIFIED:
        raise InvalidArgumentError("state", f"{state} is unknown")
    return found


def misses_info(pool: KVCacheManager, session: Session | None) -> admin_pb2.ExplainMissesResponse:
    """Describes what decides whether a session hits; None for one without namespace and weights version.

    O(sessions + scopes).
    """
    prefix_map, own = pool.blocks.prefix_map, session.scope if session else FIRST_SCOPE
    is_secret = session is not None and bool(session.salt)
    used = Counter(each.scope for each in pool.sessions.values())
    scopes = [each for each in prefix_map.scopes() if each[1] or each[0] == own or each[0] in used]
    listed = scopes[:MAX_LISTED_SCOPES] + [each for each in scopes[MAX_LISTED_SCOPES:] if each[0] == own]
    return admin_pb2.ExplainMissesResponse(
        hash_scheme=wire_pools.hash_scheme_to_proto(pool.config.hash_scheme, with_none_hash=not is_secret),
        scopes=[
            admin_pb2.ScopeInfo(
                weights_version=version,
                has_namespace=bool(namespace),
                cached_blocks=num_cached,
                sessions=used[namespace, version],
                is_own=own == (namespace, version),
            )
            for (namespace, version), num_cached in listed
        ],
        unexecuted=_unexecuted(pool)[:MAX_LISTED_SESSIONS],
        remembered_evictions=prefix_map.evicted.num_remembered,
    )


def _unexecuted(pool: KVCacheManager) -> list[admin_pb2.UnexecutedBlocks]:
    found = []
    for session in pool.sessions.values():
        by_step = pool.blocks.prefix_map.pending.num_by_step(session.session_number)
        if by_step:
            oldest = min(by_step)
            each = admin_pb2.UnexecutedBlocks(
                session_number=session.session_number,
                client_name=session.client_name,
                blocks=sum(by_step.values()),
                oldest_sequence=oldest if oldest <= session.sequence else 0,
                executed_sequence=session.executed_sequence,
            )
            found.append(each)
    return found


def prompt_end_info(end: PromptEnd) -> admin_pb2.ExplainPromptResponse:
    """Describes where a look-up ends."""
    groups = map(_group_end, end.groups)
    info = admin_pb2.ExplainPromptResponse(hit_tokens=end.hit_tokens, groups=groups, host_tokens=end.host_tokens)
    if end.miss:
        group_id, reason, num_tokens = end.miss
        miss = admin_pb2.Miss(group_id=group_id, reason=_MISS_REASONS.number(reason), num_tokens=num_tokens)
        info.miss.CopyFrom(miss)
    return info


def _group_end(end: GroupEnd) -> admin_pb2.GroupEnd:
    info = admin_pb2.GroupEnd(**field_values(GroupEnd, end, ["reason"]))
    if end.reason:
        info.reason = _MISS_REASONS.number(end.reason)
    return info
