"""Chooses kvpool's classes for an engine whose settings name a server. `kvpool.vllm_plugin` calls this.

1. A class or option that the user has set is respected or refused, never replaced.
2. Only vLLM's defaults are replaced: the scheduler's class and, in lent memory, the worker's.
"""

import logging
import multiprocessing
from typing import Any, Final

from vllm.utils.import_utils import resolve_obj_by_qualname

from kvpool.client.vllm.logs import log_with_vllm
from kvpool.client.vllm.settings import Settings, address_source

_SCHEDULER: Final = "kvpool.client.vllm.Scheduler"
_WORKER: Final = "kvpool.client.vllm.Worker"
_OWN: Final = "kvpool."
_DEFAULT_WORKER: Final = "auto"
_API_SERVER: Final = "ApiServer"
"""What names of processes begin with that `vllm serve` starts for users' requests, if it starts any."""

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
    from kvpool.client.vllm import lendable, version_check  # noqa: PLC0415 - import vLLM's KV cache management

    version_check.check_version(settings)
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


def log_use(vllm_config: Any) -> None:
    """Logs each engine that uses kvpool and that this process starts. Of `vllm serve`, API servers start none."""
    if multiprocessing.current_process().name.startswith(_API_SERVER):
        return
    log_with_vllm()
    parallel_config = vllm_config.parallel_config
    first = parallel_config.data_parallel_rank
    for index in range(first, first + parallel_config.data_parallel_size_local):
        settings = Settings.of_replica(vllm_config, index)
        _log.info(
            "engine uses kvpool",
            extra={
                "pool": settings.pool,
                "memory": settings.memory or settings.memory_id or "own",
                "address": settings.address,
                "setting": address_source(vllm_config.additional_config),
            },
        )
