"""Attaches an engine to its pool: connects, creates the pool, opens a session."""

import logging
import os
import socket
import uuid
from contextlib import ExitStack
from typing import Any

from kvpool.client.connection import Client, connect
from kvpool.client.session import Session
from kvpool.client.vllm.missing_methods import missing_methods
from kvpool.client.vllm.pool_config import UnsupportedError, pool_config
from kvpool.client.vllm.settings import Settings
from kvpool.core.specs.longest_request import shortfall

_log = logging.getLogger("kvpool.client.vllm")


def attach(scheduler: Any, settings: Settings) -> tuple[Client, Session]:
    """Creates the pool of an engine from the scheduler's configuration, and opens the engine's session in it.

    Raises:
        UnsupportedError: The engine uses a feature that the service does not support.
        KvpoolError: The service refuses the pool or the session, or is unavailable.
    """
    for problem in missing_methods():
        raise UnsupportedError("this version", problem)
    if settings.memory_id and scheduler.scheduler_config.async_scheduling:
        # A running step may still write freed blocks, so no other engine may own them before the step ends.
        raise UnsupportedError("async scheduling in memory that other engines share", "set async_scheduling=False")
    if settings.memory_id and scheduler.connector is not None:
        # Load failures are detected after the step, when other engines may already have hit the blocks.
        raise UnsupportedError("KV connectors in memory that other engines share", "set no memory_id")
    parallel = scheduler.vllm_config.parallel_config
    pool = settings.pool if parallel.data_parallel_size == 1 else f"{settings.pool}.dp{parallel.data_parallel_index}"
    config = pool_config(scheduler, pool)
    if missing := shortfall(config):
        _log.warning("too few blocks for max_model_len", extra={"pool": pool, "error": missing})
    with ExitStack() as stack:  # closes both after an error
        client = stack.enter_context(connect(settings.address, deadline_seconds=settings.deadline_seconds))
        client.create_pool(config)
        session = stack.enter_context(
            client.open_session(
                pool,
                client_name=settings.client_name or f"vllm@{socket.gethostname()}:{os.getpid()}",
                lease_seconds=settings.lease_seconds,
                memory_id=settings.memory_id or f"vllm-{uuid.uuid4()}",
                min_blocks=settings.min_blocks,
                max_blocks=settings.max_blocks,
            )
        )
        if config.enable_caching and session.config.hash_scheme.none_hash != config.hash_scheme.none_hash:
            raise UnsupportedError("tokens with a salt", "vLLM computes the hashes: give requests a cache_salt instead")
        stack.pop_all()
    return client, session
