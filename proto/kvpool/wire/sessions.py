"""Encodes sessions."""

from dataclasses import replace

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.sessions.session import Session
from kvpool.v1 import allocator_pb2, pool_pb2
from kvpool.wire import pools as wire_pools


def session_to_proto(pool: KVCacheManager, session: Session) -> allocator_pb2.Session:
    """Encodes a session for the process that uses it, with its secret id."""
    return allocator_pb2.Session(
        session_id=session.session_id,
        pool_name=pool.config.name,
        lease_seconds=session.lease_seconds,
        epoch=pool.epoch,
        session_number=session.session_number,
        min_blocks=session.holding.min_blocks if session.holding else 0,
        max_blocks=session.holding.max_blocks if session.holding else 0,
        weights_version=session.weights_version,
        reserve_tokens=session.reserve_tokens,
    )


def config_to_proto(pool: KVCacheManager, session: Session) -> pool_pb2.PoolConfig:
    """Encodes a pool configuration for a session, with the none_hash for the session's salt."""
    scheme = pool.config.hash_scheme.salted(session.salt)
    return wire_pools.config_to_proto(replace(pool.config, hash_scheme=scheme), with_none_hash=True)
