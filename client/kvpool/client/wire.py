"""The service's messages, made and read: what the sync and the asyncio transport share."""

from typing import Final

from kvpool.client.transport import EventBatch, OpenedSession
from kvpool.server.core.allocator import PoolInfo
from kvpool.server.core.config import PoolConfig
from kvpool.server.rpc import convert
from kvpool.v1 import allocator_pb2, event_pb2

DEFAULT_DEADLINE_SECONDS: Final = 30.0
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
REOPEN_PAUSES_SECONDS: Final = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)

_RETRIES: Final = """{"methodConfig": [{"name": [{"service": "kvpool.v1.AllocatorService"}], "retryPolicy": {
  "maxAttempts": 5, "initialBackoff": "0.05s", "maxBackoff": "1s", "backoffMultiplier": 2,
  "retryableStatusCodes": ["UNAVAILABLE"]}}]}"""
"""Unary calls are sent again when the server cannot be reached; numbered as they are, no change counts twice."""

CHANNEL_OPTIONS: Final[list[tuple[str, int | str]]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.service_config", _RETRIES),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


def create_pool_request(config: PoolConfig) -> allocator_pb2.CreatePoolRequest:
    """Makes CreatePool's message."""
    return allocator_pb2.CreatePoolRequest(config=convert.config_to_proto(config, with_none_hash=True))


def read_pool(response: allocator_pb2.CreatePoolResponse | allocator_pb2.GetPoolResponse) -> PoolInfo:
    """Reads what a pool is like."""
    return convert.info_from_proto(response.pool)


def open_session_request(pool: str, client_name: str, lease_seconds: float) -> allocator_pb2.OpenSessionRequest:
    """Makes OpenSession's message."""
    return allocator_pb2.OpenSessionRequest(pool_name=pool, client_name=client_name, lease_seconds=lease_seconds)


def read_session(response: allocator_pb2.OpenSessionResponse) -> OpenedSession:
    """Reads an opened session."""
    session = response.session
    config = convert.config_from_proto(response.config)
    return OpenedSession(session.session_id, config, session.lease_seconds, session.epoch)


def read_batch(response: event_pb2.WatchResponse) -> EventBatch:
    """Reads a batch of events; kinds that only a newer server knows are left out."""
    events = (convert.event_from_proto(event) for event in response.events)
    return EventBatch(response.sequence, tuple(event for event in events if event is not None))
