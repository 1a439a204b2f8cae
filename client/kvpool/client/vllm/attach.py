"""An engine's way to its pool: connect, declare, open a session."""

import os
import socket
import uuid
from typing import Any

from kvpool.client.connection import Client, connect
from kvpool.client.session import Session
from kvpool.client.vllm.missing_methods import missing_methods
from kvpool.client.vllm.pool_config import UnsupportedError, pool_config
from kvpool.client.vllm.settings import Settings
from kvpool.core.specs.pool_config import PoolConfig


def attach(scheduler: Any, settings: Settings) -> tuple[Client, Session]:
    """Declares the pool of an engine, from what its scheduler was made with, and opens the engine's session in it.

    Raises:
        UnsupportedError: The engine is configured to do what the service cannot.
        KvpoolError: The service refuses the pool or the session, or is not there.
    """
    for sentence in missing_methods():
        raise UnsupportedError("this version", sentence)
    if settings.memory_id and scheduler.scheduler_config.async_scheduling:
        # A step may be writing blocks yet when they are freed: no other engine must be given them before it ends.
        raise UnsupportedError("async scheduling in memory that others see", "set async_scheduling=False")
    if settings.memory_id and scheduler.connector is not None:
        # What it fails to load is found out after the step, when other engines may have found it already.
        raise UnsupportedError("KV connectors in memory that others see", "set no memory_id")
    parallel = scheduler.vllm_config.parallel_config
    pool = settings.pool if parallel.data_parallel_size == 1 else f"{settings.pool}.dp{parallel.data_parallel_index}"
    config = pool_config(scheduler, pool)
    client = connect(settings.address, deadline_seconds=settings.deadline_seconds)
    try:
        client.create_pool(config)
        session = client.open_session(
            pool,
            client_name=settings.client_name or f"vllm@{socket.gethostname()}:{os.getpid()}",
            lease_seconds=settings.lease_seconds,
            memory_id=settings.memory_id or f"vllm-{uuid.uuid4()}",
            min_blocks=settings.min_blocks,
            max_blocks=settings.max_blocks,
        )
        _check_unsalted(session, config)
    except BaseException:
        client.close()
        raise
    return client, session


def _check_unsalted(session: Session, config: PoolConfig) -> None:
    if config.enable_caching and session.config.hash_scheme.none_hash != config.hash_scheme.none_hash:
        session.close()
        raise UnsupportedError("tokens with a salt", "vLLM hashes by itself: give requests a cache_salt")
