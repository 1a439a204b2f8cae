"""Encodes sessions."""

from dataclasses import replace

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.v1 import allocator_pb2, pool_pb2
from kvpool.wire import pools as wire_pools
from kvpool.wire.protocol_version import PROTOCOL_VERSION


def session_to_proto(pool: KVCacheManager, session: Session) -> allocator_pb2.Session:
    """Encodes a session for the process that uses it, with its secret id."""
    return allocator_pb2.Session(
        session_id=session.current_id,
        pool_name=pool.config.name,
        lease_seconds=session.lease_seconds,
        epoch=pool.epoch,
        session_number=session.session_number,
        min_blocks=session.holding.min_blocks if session.holding else 0,
        max_blocks=session.holding.max_blocks if session.holding else 0,
        weights_version=session.weights_version,
    )


def config_to_proto(pool: KVCacheManager, session: Session) -> pool_pb2.PoolConfig:
    """Encodes a pool configuration for a session, with the none_hash for the session's salt."""
    scheme = pool.config.hash_scheme.salted(session.salt)
    return wire_pools.config_to_proto(replace(pool.config, hash_scheme=scheme), with_none_hash=True)


def resumption_to_proto(pool: KVCacheManager, session: Session) -> allocator_pb2.ResumeSessionResponse:
    """Encodes everything that a session holds. O(blocks of the session)."""
    return allocator_pb2.ResumeSessionResponse(
        session=session_to_proto(pool, session),
        config=config_to_proto(pool, session),
        sequence=session.sequence,
        executed_sequence=session.executed_sequence,
        requests=[_held_request(request) for request in session.requests.values()],
        protocol_version=PROTOCOL_VERSION,
    )


def _held_request(request: Request) -> allocator_pb2.HeldRequest:
    return allocator_pb2.HeldRequest(
        request_id=request.request_id,
        request_number=max(request.number, 0),
        num_tokens=request.num_tokens,
        num_computed_tokens=request.num_computed_tokens,
        tables=[allocator_pb2.GroupBlocks(block_ids=table.block_ids) for table in request.tables],
        lora_name=request.lora_name or "",
        last_block_hash=request.hashes[-1] if request.hashes else b"",
    )
