"""Attaches an engine to its pool: connects, creates the pool or finds that of its workers, opens a session."""

import logging
import multiprocessing
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from vllm.utils.import_utils import resolve_obj_by_qualname

from kvpool.client.connection import Client, connect
from kvpool.client.process_name import process_name
from kvpool.client.session import Session
from kvpool.client.vllm.lendable import check_lendable
from kvpool.client.vllm.logs import log_with_vllm
from kvpool.client.vllm.pool_config import UnsupportedError, pool_config
from kvpool.client.vllm.settings import Settings
from kvpool.client.vllm.version_check import check_version
from kvpool.client.vllm.weights import default_weights_version, unknown_weights_version
from kvpool.core.sessions.session import MAX_RESERVE_TOKENS
from kvpool.core.specs.longest_request import shortfall
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.v1.pool_pb2 import PoolInfo

if TYPE_CHECKING:
    from kvpool.lending.lender_client import LenderClient

_WORKER: Final = "kvpool.client.vllm.Worker"

_log = logging.getLogger("kvpool.client.vllm")


@dataclass(frozen=True, slots=True)
class Attachment:
    """What an engine is attached with.

    Attributes:
        client: Connection to the service.
        session: The engine's session.
        memory_id: Name of the engine's memory; empty if the engine's workers form the pool.
        lender: Connection to the lender of rank 0; None if the engine has memory of its own.
    """

    client: Client
    session: Session
    memory_id: str
    lender: "LenderClient | None"


def attach(scheduler: Any, settings: Settings, lost: Attachment | None = None) -> Attachment:
    """Opens an engine's session in its pool. Creates the pool, unless the engine's workers form it, in lent memory.

    `lost` is the engine's attachment whose session has ended: the memory is attached again. An operator may have stated
    another version of the weights to that session, so that the engine hits only what it computes from then on.

    Raises:
        UnsupportedError: The engine uses a feature that the service does not support.
        ValueError: The scheduler's configuration differs from that of the workers.
        KvpoolError: The service or the lender refuses, or is unavailable.
    """
    log_with_vllm()
    check_version(settings)
    if settings.memory:
        check_lendable(scheduler.vllm_config)
        _check_worker(scheduler.vllm_config.parallel_config.worker_cls)
    if settings.memory_id and scheduler.vllm_config.model_config.enable_sleep_mode:
        raise UnsupportedError(
            "sleep mode with a memory_id", "it discards contents that other engines hit: use `memory`"
        )
    pool = settings.pool
    config = pool_config(scheduler, pool)
    client_name = settings.client_name or process_name("vllm")
    weights_version = settings.weights_version
    if settings.shares_memory and not weights_version:
        weights_version = default_weights_version(scheduler.vllm_config)
    with ExitStack() as stack:  # closes all after an error
        client = stack.enter_context(connect(settings.address, deadline_seconds=settings.deadline_seconds))
        if settings.memory:
            client.wait_until_ready(pool, timeout_seconds=settings.deadline_seconds)
            memory_id = ""  # the ranks report their memory
        else:
            memory_id = lost.memory_id if lost else settings.memory_id or f"vllm-{uuid.uuid4()}"
            client.create_pool(config, memory_id=memory_id)
        session = stack.enter_context(
            client.open_session(
                pool,
                client_name=client_name,
                lease_seconds=settings.lease_seconds,
                memory_id=memory_id,
                min_blocks=settings.min_blocks,
                max_blocks=settings.max_blocks,
                weights_version=unknown_weights_version() if lost else weights_version,
                reserve_tokens=_reserve_tokens(scheduler, settings, config),
            )
        )
        if settings.memory:
            _check_same(config, session.config)
        elif config.enable_caching and session.config.hash_scheme.none_hash != config.hash_scheme.none_hash:
            raise UnsupportedError("tokens with a salt", "vLLM computes the hashes: give requests a cache_salt instead")
        lender = _bound_lender(settings, scheduler.vllm_config, session, stack) if settings.memory else None
        info = client.get_pool(pool)
        _warn_of(config, settings, info)
        stack.pop_all()
    _log.info(
        "engine attached",
        extra={
            "pool": pool,
            "session": session.table_lease.session_number,
            "epoch": session.epoch,
            "memory": settings.memory or memory_id,
            "blocks": config.num_blocks,
            "cached_blocks": info.cached_blocks,
            "address": settings.address,
            "async_scheduling": bool(scheduler.scheduler_config.async_scheduling),
        },
    )
    return Attachment(client, session, memory_id, lender)


def _reserve_tokens(scheduler: Any, settings: Settings, config: PoolConfig) -> int:
    """Slots in reserve. Drafts that are rejected, and what a connector loads, need a message for each step anyway."""
    if scheduler.connector is not None or scheduler.vllm_config.speculative_config:
        return 0
    if settings.reserve_tokens >= 0:
        return settings.reserve_tokens
    spans = [span for span in config.spans_tokens if span < config.max_model_len]  # without groups of one state
    return min(max(spans, default=0), MAX_RESERVE_TOKENS)


def _warn_of(config: PoolConfig, settings: Settings, info: PoolInfo) -> None:
    reserved_for_others = info.reserved_blocks - settings.min_blocks  # as the session holds no block yet
    if error := shortfall(config, reserved_for_others, settings.max_blocks):
        _log.warning("too few blocks for max_model_len", extra={"pool": config.name, "error": error})
    if error := config.rare_hits:
        _log.warning("prefixes hit rarely", extra={"pool": config.name, "error": error})


def _check_worker(worker_cls: str) -> None:
    """Refuses workers that compute in memory of their own, where no other engine finds the blocks."""
    from kvpool.client.vllm.worker import Worker  # noqa: PLC0415 - imports vLLM's worker, for lent memory only

    if not issubclass(resolve_obj_by_qualname(worker_cls), Worker):
        raise UnsupportedError(f"the worker {worker_cls} in lent memory", f"set worker_cls to {_WORKER}")


def _check_same(own: PoolConfig, declared: PoolConfig) -> None:
    """Refuses a scheduler that manages other blocks than the workers laid out.

    Layers are the workers' alone, and blocks in host memory the lenders'.
    """
    own, declared = (
        replace(config, groups=tuple(replace(group, layer_names=()) for group in config.groups), num_host_blocks=0)
        for config in (own, declared)
    )
    if field := declared.difference(own):  # without caching, the pool draws the none_hash
        raise ValueError(f"kvpool: engine and scheduler differ in {field} of pool {own.name}")


def _bound_lender(settings: Settings, vllm_config: Any, session: Session, stack: ExitStack) -> "LenderClient":
    """Names the session to the lender of rank 0, which reports it as gone when this process has exited, too."""
    from kvpool.client.vllm.lenders import connect_to_lender  # noqa: PLC0415 - imports torch, for lent memory only

    lender = connect_to_lender(settings, vllm_config.parallel_config, 0, "scheduler")
    stack.callback(lender.close)
    lender.bind(session.table_lease)
    return lender


def has_own_process() -> bool:
    """Returns whether vLLM has started this process for the engine, which is not in the process of its user then."""
    return multiprocessing.current_process().name.startswith("EngineCore")
