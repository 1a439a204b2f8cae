"""The service's messages as the client's values, and back."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvpool.client.lease import LeaseTimer
from kvpool.client.transports.transport import (
    EventBatch,
    HeldRequest,
    OpenedSession,
    SessionCalls,
    SessionOptions,
    Transport,
    WatchKind,
    WatchOptions,
)
from kvpool.core.ids import SessionNumber
from kvpool.core.ranks.messages import PoolState, RankState
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.views.pool_info import PoolInfo
from kvpool.v1 import allocator_pb2, event_pb2
from kvpool.wire import pools as wire_pools
from kvpool.wire import steps as wire_steps
from kvpool.wire.errors import DeadlineError
from kvpool.wire.protocol_version import PROTOCOL_VERSION, check_server

_AWAY_STATES: Final = (RankState.ABSENT, RankState.SILENT, RankState.LOST)
_MAX_SHOWN_RANKS: Final = 16

_KINDS: Final = {
    event_pb2.WATCH_RESPONSE_KIND_START: WatchKind.START,
    event_pb2.WATCH_RESPONSE_KIND_BATCH: WatchKind.BATCH,
    event_pb2.WATCH_RESPONSE_KIND_SNAPSHOT: WatchKind.SNAPSHOT,
    event_pb2.WATCH_RESPONSE_KIND_SNAPSHOT_END: WatchKind.SNAPSHOT_END,
    event_pb2.WATCH_RESPONSE_KIND_HEARTBEAT: WatchKind.HEARTBEAT,
}

_PoolResponse = allocator_pb2.CreatePoolResponse | allocator_pb2.GetPoolResponse | allocator_pb2.WaitUntilReadyResponse


def create_pool_request(config: PoolConfig, memory_id: str = "") -> allocator_pb2.CreatePoolRequest:
    """Makes a CreatePoolRequest."""
    message = wire_pools.config_to_proto(config, with_none_hash=True)
    return allocator_pb2.CreatePoolRequest(config=message, memory_id=memory_id)


def read_pool(response: _PoolResponse) -> PoolInfo:
    """Reads a pool's state."""
    return wire_pools.info_from_proto(response.pool)


def check_ready(pool: PoolInfo, timeout_seconds: float) -> PoolInfo:
    """Returns a pool after WaitUntilReady, if it is ready.

    Raises:
        DeadlineError: It is not; the message states the state of the pool and of its ranks.
    """
    if pool.state is PoolState.READY:
        return pool
    absent = [str(rank.rank) for rank in pool.ranks if rank.state in _AWAY_STATES]
    message = f"pool {pool.config.name!r} is {pool.state.value} after {timeout_seconds:g} s"
    if absent:
        shown = ", ".join(absent[:_MAX_SHOWN_RANKS]) + (", ..." if len(absent) > _MAX_SHOWN_RANKS else "")
        message += f"; {len(absent)} of {len(pool.ranks)} ranks are not there: {shown}"
    raise DeadlineError("POOL_NOT_READY", message)


def open_session_request(options: SessionOptions) -> allocator_pb2.OpenSessionRequest:
    """Makes an OpenSessionRequest. Its key allows the call to be repeated."""
    return allocator_pb2.OpenSessionRequest(
        pool_name=options.pool,
        client_name=options.client_name,
        lease_seconds=options.lease_seconds,
        open_key=secrets.token_urlsafe(24),
        min_blocks=options.quota.min_blocks,
        max_blocks=options.quota.max_blocks,
        memory_id=options.memory_id,
        weights_version=options.weights_version,
        protocol_version=PROTOCOL_VERSION,
    )


def set_weights_version_request(session_id: str, weights_version: str) -> allocator_pb2.SetWeightsVersionRequest:
    """Makes a SetWeightsVersionRequest. Its key allows the call to be repeated."""
    return allocator_pb2.SetWeightsVersionRequest(
        session_id=session_id, weights_version=weights_version, set_key=secrets.token_urlsafe(24)
    )


def resume_session_request(session_id: str, sequence: int) -> allocator_pb2.ResumeSessionRequest:
    """Makes a ResumeSessionRequest. Its key allows the call to be repeated."""
    return allocator_pb2.ResumeSessionRequest(
        session_id=session_id,
        sequence=sequence,
        resume_key=secrets.token_urlsafe(24),
        protocol_version=PROTOCOL_VERSION,
    )


def read_session(
    response: allocator_pb2.OpenSessionResponse | allocator_pb2.ResumeSessionResponse,
    sent_seconds: float,
    transport: Transport,
    open_calls: Callable[[str, LeaseTimer], SessionCalls],
) -> OpenedSession:
    """Reads a session that was opened or resumed.

    Args:
        response: The answer of the call.
        sent_seconds: When the call was sent.
        transport: The transport of the session.
        open_calls: Makes what makes the session's calls, given its id and lease.
    """
    session, config = response.session, wire_pools.config_from_proto(response.config)
    lease_timer = LeaseTimer(session.lease_seconds, sent_seconds)
    opened = OpenedSession(
        transport,
        open_calls(session.session_id, lease_timer),
        session.session_id,
        config,
        session.lease_seconds,
        session.epoch,
        SessionNumber(session.session_number),
        lease_timer,
        weights_version=session.weights_version,
    )
    if isinstance(response, allocator_pb2.OpenSessionResponse):
        return opened
    return replace(opened, sequence=response.sequence, held=tuple(map(_held_request, response.requests)))


def _held_request(request: allocator_pb2.HeldRequest) -> HeldRequest:
    return HeldRequest(
        request.request_id,
        request.request_number,
        request.num_tokens,
        request.num_computed_tokens,
        tuple(tuple(table.block_ids) for table in request.tables),
        request.lora_name,
        request.last_block_hash,
    )


def watch_request(options: WatchOptions) -> event_pb2.WatchRequest:
    """Makes a WatchRequest."""
    return event_pb2.WatchRequest(
        pool_name=options.pool,
        from_sequence=options.from_sequence,
        snapshot=options.snapshot,
        heartbeat_seconds=options.heartbeat_seconds,
        protocol_version=PROTOCOL_VERSION,
    )


def read_batch(response: event_pb2.WatchResponse) -> EventBatch:
    """Reads a message of a watch. Events of unknown kinds are left out.

    Raises:
        ServerError: The server speaks another protocol version.
    """
    if response.kind == event_pb2.WATCH_RESPONSE_KIND_START:
        check_server(response.protocol_version)
    events = (wire_steps.event_from_proto(event) for event in response.events)
    return EventBatch(
        response.sequence,
        tuple(event for event in events if event is not None),
        _KINDS.get(response.kind, WatchKind.BATCH),
        response.epoch,
        response.boot_id,
        response.time_seconds,
    )
