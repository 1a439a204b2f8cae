"""The service's messages as the client's values, and back."""

import secrets
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from kvpool.client.lease import LeaseTimer
from kvpool.client.transports.transport import (
    EventBatch,
    OpenedSession,
    SessionCalls,
    SessionOptions,
    Transport,
    WatchKind,
    WatchOptions,
)
from kvpool.core.ids import SessionNumber
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.v1 import allocator_pb2, event_pb2
from kvpool.v1.pool_pb2 import PoolInfo, PoolState, RankState
from kvpool.wire import pools as wire_pools
from kvpool.wire import steps as wire_steps
from kvpool.wire.errors import DeadlineError
from kvpool.wire.fields import EnumNumbers
from kvpool.wire.protocol_version import PROTOCOL_VERSION, check_server
from kvpool.wire.readable import word

_AWAY_STATES: Final = (RankState.RANK_STATE_ABSENT, RankState.RANK_STATE_SILENT, RankState.RANK_STATE_LOST)
_MAX_SHOWN_RANKS: Final = 16

_KINDS: Final = EnumNumbers(WatchKind, event_pb2.WatchResponseKind)


def create_pool_request(config: PoolConfig, memory_id: str = "") -> allocator_pb2.CreatePoolRequest:
    """Makes a CreatePoolRequest."""
    message = wire_pools.config_to_proto(config, with_none_hash=True)
    return allocator_pb2.CreatePoolRequest(config=message, memory_id=memory_id)


def check_ready(pool: PoolInfo, timeout_seconds: float) -> PoolInfo:
    """Returns a pool after WaitUntilReady, if it is ready.

    Raises:
        DeadlineError: It is not; the message states the state of the pool and of its ranks.
    """
    if pool.state == PoolState.POOL_STATE_READY:
        return pool
    absent = [str(rank.rank) for rank in pool.ranks if rank.state in _AWAY_STATES]
    message = f"pool {pool.config.name!r} is {word(PoolState, pool.state)} after {timeout_seconds:g} s"
    if absent:
        shown = ", ".join(absent[:_MAX_SHOWN_RANKS]) + (", ..." if len(absent) > _MAX_SHOWN_RANKS else "")
        message += f"; {len(absent)} of {len(pool.ranks)} ranks are not there: {shown}"
    raise DeadlineError("POOL_NOT_READY", message)


def open_session_request(options: SessionOptions) -> allocator_pb2.OpenSessionRequest:
    """Makes an OpenSessionRequest. Its key allows the call to be repeated."""
    return allocator_pb2.OpenSessionRequest(
        **asdict(options), open_key=secrets.token_urlsafe(24), protocol_version=PROTOCOL_VERSION
    )


def set_weights_version_request(session_id: str, weights_version: str) -> allocator_pb2.SetWeightsVersionRequest:
    """Makes a SetWeightsVersionRequest. Its key allows the call to be repeated."""
    return allocator_pb2.SetWeightsVersionRequest(
        session_id=session_id, weights_version=weights_version, set_key=secrets.token_urlsafe(24)
    )


def read_session(
    response: allocator_pb2.OpenSessionResponse,
    sent_seconds: float,
    transport: Transport,
    open_calls: Callable[[str, LeaseTimer], SessionCalls],
) -> OpenedSession:
    """Reads a session that was opened.

    Args:
        response: The answer of the call.
        sent_seconds: When the call was sent.
        transport: The transport of the session.
        open_calls: Makes what makes the session's calls, given its id and lease.
    """
    session = response.session
    lease_timer = LeaseTimer(session.lease_seconds, sent_seconds)
    return OpenedSession(
        transport,
        open_calls(session.session_id, lease_timer),
        session.session_id,
        wire_pools.config_from_proto(response.config),
        session.lease_seconds,
        session.epoch,
        SessionNumber(session.session_number),
        lease_timer,
        session.weights_version,
        session.reserve_tokens,
    )


def watch_request(options: WatchOptions) -> event_pb2.WatchRequest:
    """Makes a WatchRequest."""
    return event_pb2.WatchRequest(**asdict(options), protocol_version=PROTOCOL_VERSION)


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
        _KINDS.member(response.kind) or WatchKind.BATCH,
        response.epoch,
        response.boot_id,
        response.time_seconds,
    )
