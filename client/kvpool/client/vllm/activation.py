"""Chooses kvpool's classes for an engine whose settings name a server. `kvpool.vllm_plugin` calls this.

1. A class or option that the user has set is respected or refused, never replaced.
2. Only vLLM's defaults are replaced: the scheduler's class and, in lent memory, the worker's.
3. The process that starts engines asks server and lenders before. An engine would ask when its model is loaded, and its
   refusal stands far above the last line of vLLM's output.
"""

import contextlib
import difflib
import logging
import multiprocessing
import os
import re
from typing import Any, Final

from vllm.utils.import_utils import resolve_obj_by_qualname

from kvpool.client.connection import connect
from kvpool.client.vllm.logs import log_with_vllm
from kvpool.client.vllm.settings import VARIABLES, Settings, address_source
from kvpool.client.vllm.weights import identify_weights
from kvpool.core.errors import NotFoundError

_SCHEDULER: Final = "kvpool.client.vllm.Scheduler"
_WORKER: Final = "kvpool.client.vllm.Worker"
_OWN: Final = "kvpool."
_DEFAULT_WORKER: Final = "auto"
_API_SERVER: Final = "ApiServer"
"""What names of processes begin with that `vllm serve` starts for users' requests, if it starts any."""
_OF_OTHERS: Final = re.compile(r"KVPOOL_(SERVE|WORKER|REPLAY)_|.*_(SERVICE_HOST|SERVICE_PORT|PORT)(_|$)")
"""Variables that commands read, which refuse unknown ones, and those that Kubernetes makes of names of services."""

_log = logging.getLogger("kvpool.client.vllm")


def choose_classes(arguments: Any) -> None:
    """Completes vLLM's `EngineArgs` for an engine on kvpool.

    Raises:
        ValueError: The settings are invalid, the scheduler's class is another, or this vLLM is not supported or cannot
            use lent memory.
    """
    settings = Settings.of(arguments.additional_config, arguments.model)
    if arguments.scheduler_cls is not None and not _is_own(arguments.scheduler_cls):
        source = address_source(arguments.additional_config)
        raise ValueError(
            f"scheduler_cls is {arguments.scheduler_cls!r}, but {source} names a kvpool server. Set no scheduler_cls,"
            f" or a subclass of {_SCHEDULER}. To run without kvpool, set KVPOOL_VLLM_PLUGIN=0"
        )
    from kvpool.client.vllm import lendable, pool_config, version_check  # noqa: PLC0415 - import vLLM's KV cache management

    version_check.check_version(settings)
    pool_config.check_process(arguments)
    if settings.memory:
        lendable.check_version()
    if arguments.scheduler_cls is None:
        arguments.scheduler_cls = _SCHEDULER
    if settings.memory and arguments.worker_cls == _DEFAULT_WORKER:  # the scheduler refuses other workers
        arguments.worker_cls = _WORKER


def _is_own(scheduler_cls: Any) -> bool:
    """Returns whether it is kvpool's scheduler or a subclass. vLLM takes names and classes."""
    if isinstance(scheduler_cls, str):
        if scheduler_cls.startswith(_OWN):
            return True
        scheduler_cls = resolve_obj_by_qualname(scheduler_cls)
    return isinstance(scheduler_cls, type) and issubclass(scheduler_cls, resolve_obj_by_qualname(_SCHEDULER))


def warn_of_variables(*, uses_kvpool: bool) -> None:
    """Warns of variables without effect: a lender without a server, and names that nothing reads."""
    if _is_api_server():
        return
    log_with_vllm()
    ignored = {
        name: "not known" + "".join(f"; did you mean {each}?" for each in difflib.get_close_matches(name, VARIABLES, 1))
        for name in os.environ
        if name.startswith("KVPOOL_") and name not in VARIABLES and not _OF_OTHERS.match(name)
    }
    if os.environ.get("KVPOOL_MEMORY") and not uses_kvpool:
        ignored["KVPOOL_MEMORY"] = "KVPOOL_ADDRESS is not set, so the engine does not use kvpool"
    for name, error in ignored.items():
        _log.warning("variable ignored", extra={"setting": name, "error": error})


def check_services(vllm_config: Any) -> None:
    """Logs each engine that this process starts on kvpool, and asks its server and lenders; waits for those that start.

    In memory that engines share, it also notes what weights the engine is about to load.

    Raises:
        ValueError: A lender is of another rank or device.
        KvpoolError: A server or a lender cannot be reached, or would refuse the engine.
    """
    if _is_api_server():
        return
    log_with_vllm()
    parallel_config = vllm_config.parallel_config
    first = parallel_config.data_parallel_rank
    replicas = [Settings.of_replica(vllm_config, first + i) for i in range(parallel_config.data_parallel_size_local)]
    for settings in replicas:
        _log.info(
            "engine uses kvpool",
            extra={
                "pool": settings.pool,
                "memory": settings.memory or settings.memory_id or "own",
                "address": settings.address,
                "setting": address_source(vllm_config.additional_config),
            },
        )
        _ask(settings, vllm_config)
    if any(each.shares_memory and not each.weights_version for each in replicas):
        identify_weights(vllm_config)


def _is_api_server() -> bool:
    """Returns whether this is a process of `vllm serve` that starts no engine, although it configures them."""
    return multiprocessing.current_process().name.startswith(_API_SERVER)


def _ask(settings: Settings, vllm_config: Any) -> None:
    """Asks the server, and in lent memory the lenders, whether an engine can start."""
    pool, parallel_config = None, vllm_config.parallel_config
    access = connect(settings.address, deadline_seconds=settings.deadline_seconds)
    # A pool that does not exist is made by the engine. The channel is closed here, as vLLM forks engines.
    with access as client, contextlib.suppress(NotFoundError):
        pool = client.get_pool(settings.pool)
    if settings.memory:
        from kvpool.client.vllm import lendable, lenders  # noqa: PLC0415 - import torch, for lent memory only

        # Workers may be on other machines, and lend there.
        is_here = parallel_config.distributed_executor_backend in ("mp", "uni") and parallel_config.nnodes == 1
        for rank in range(parallel_config.world_size if is_here else 0):
            lenders.connect_to_lender(settings, parallel_config, rank, "start").close()
        if pool and pool.sessions:
            with lenders.explained(settings.memory):
                lendable.check_same(vllm_config, pool)
