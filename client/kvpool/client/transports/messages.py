"""The service's messages, made and read: what the sync and the asyncio transport share."""

import secrets
import time
from dataclasses import replace
from typing import Final

from kvpool.client.errors import DeadlineError, UnavailableError
from kvpool.client.lease import LeaseTimer
from kvpool.client.transports.embedded import EventBatch, HeldRequest, OpenedSession, WatchKind, WatchOptions
from kvpool.core.blocks.quota import Quota
from kvpool.core.ids import SessionNumber
from kvpool.core.ranks.messages import PoolState, RankState
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.views.pool_info import PoolInfo
from kvpool.v1 import allocator_pb2, event_pb2
from kvpool.wire import pools as wire_pools
from kvpool.wire import steps as wire_steps

DEFAULT_DEADLINE_SECONDS: Final = 30.0
REOPEN_PAUSES_SECONDS: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Before each further try of a watch, unless the server says when to try again."""

_WAIT_PAUSE_SECONDS: Final = 0.2
"""Before a server that cannot be reached is asked again whether a pool is ready."""

_AWAY_STATES: Final = (RankState.ABSENT, RankState.SILENT, RankState.LOST)


def create_pool_request(config: PoolConfig) -> allocator_pb2.CreatePoolRequest:
    """Makes CreatePool's message."""
    return allocator_pb2.CreatePoolRequest(config=wire_pools.config_to_proto(config, with_none_hash=True))


_PoolResponse = allocator_pb2.CreatePoolResponse | allocator_pb2.GetPoolResponse | allocator_pb2.WaitUntilReadyResponse


def read_pool(response: _PoolResponse) -> PoolInfo:
    """Reads what a pool is like."""
    return wire_pools.info_from_proto(response.pool)


def wait_request(pool: str, timeout_seconds: float) -> allocator_pb2.WaitUntilReadyRequest:
    """Makes WaitUntilReady's message."""
    return allocator_pb2.WaitUntilReadyRequest(pool_name=pool, timeout_seconds=timeout_seconds)


def wait_pause_seconds(error: UnavailableError, due_seconds: float) -> float:
    """How long to wait before asking again, after a server that cannot be reached or that stops.

    Args:
        error: What came instead of an answer.
        due_seconds: Until when the pool is waited for, on the monotonic clock.

    Raises:
        UnavailableError: The error, when the time is up.
    """
    left_seconds = due_seconds - time.monotonic()
    if left_seconds <= 0:
        raise error
    return min(error.retry_seconds or _WAIT_PAUSE_SECONDS, left_seconds)


def check_ready(pool: PoolInfo, timeout_seconds: float) -> PoolInfo:
    """Returns a pool that was waited for if it is ready.

    Raises:
        DeadlineError: It is not; says how it is.
    """
    if pool.state is PoolState.READY:
        return pool
    absent = [str(rank.rank) for rank in pool.ranks if rank.state in _AWAY_STATES]
    message = f"pool {pool.config.name!r} is {pool.state.value} after {timeout_seconds:g} s"
    if absent:
        shown = ", ".join(absent[:16]) + (", ..." if len(absent) > 16 else "")  # noqa: PLR2004 - a line's worth
        message += f"; {len(absent)} of {len(pool.ranks)} ranks are not there: {shown}"
    raise DeadlineError("POOL_NOT_READY", message)


def open_session_request(
    pool: str, client_name: str, lease_seconds: float, quota: Quota, memory_id: str = ""
) -> allocator_pb2.OpenSessionRequest:
    """Makes OpenSession's message, which may be sent again."""
    return allocator_pb2.OpenSessionRequest(
        pool_name=pool,
        client_name=client_name,
        lease_seconds=lease_seconds,
        open_key=secrets.token_urlsafe(24),
        min_blocks=quota.min_blocks,
        max_blocks=quota.max_blocks,
        memory_id=memory_id,
    )


def resume_session_request(session_id: str, sequence: int) -> allocator_pb2.ResumeSessionRequest:
    """Makes ResumeSession's message, which may be sent again."""
    return allocator_pb2.ResumeSessionRequest(
        session_id=session_id, sequence=sequence, resume_key=secrets.token_urlsafe(24)
    )


def read_session(
    response: allocator_pb2.OpenSessionResponse | allocator_pb2.ResumeSessionResponse, sent_seconds: float
) -> OpenedSession:
    """Reads a session that was opened or resumed, by a call that was sent then."""
    session = response.session
    opened = OpenedSession(
        session.session_id,
        wire_pools.config_from_proto(response.config),
        session.lease_seconds,
        session.epoch,
        SessionNumber(session.session_number),
        LeaseTimer(session.lease_seconds, sent_seconds),
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


_KINDS: Final = {
    event_pb2.WATCH_RESPONSE_KIND_START: WatchKind.START,
    event_pb2.WATCH_RESPONSE_KIND_BATCH: WatchKind.BATCH,
    event_pb2.WATCH_RESPONSE_KIND_SNAPSHOT: WatchKind.SNAPSHOT,
    event_pb2.WATCH_RESPONSE_KIND_SNAPSHOT_END: WatchKind.SNAPSHOT_END,
    event_pb2.WATCH_RESPONSE_KIND_HEARTBEAT: WatchKind.HEARTBEAT,
}


def watch_request(options: WatchOptions) -> event_pb2.WatchRequest:
    """Makes Watch's message."""
    return event_pb2.WatchRequest(
        pool_name=options.pool,
        from_sequence=options.from_sequence,
        snapshot=options.snapshot,
        heartbeat_seconds=options.heartbeat_seconds,
    )


def read_batch(response: event_pb2.WatchResponse) -> EventBatch:
    """Reads a message of a watch; kinds of events that only a newer server knows are left out."""
    events = (wire_steps.event_from_proto(event) for event in response.events)
    return EventBatch(
        response.sequence,
        tuple(event for event in events if event is not None),
        _KINDS.get(response.kind, WatchKind.BATCH),
        response.epoch,
        response.boot_id,
        response.time_seconds,
    )
