"""Has engine cores announce to their schedulers what they do to memory that engines share.

1. A sleep: cached prefixes stay in lent memory. vLLM 0.32 resets the prefix cache before its workers free the memory.
   Its scheduler cannot tell this reset from one for a user or for new weights, and a reset drops the prefixes of all
   engines of the pool.
2. A load of other weights, or of a LoRA: its blocks must not be taken for those of the weights before.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final

from vllm.v1.engine.core import EngineCore

_LOADS: Final = (
    *("reload_weights", "reset_weights"),
    *("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
)
"""Calls of workers that change weights."""


def announce_loads() -> None:
    """Has the engine cores of this process announce weights and LoRAs before they load them. Repeats do nothing."""
    call, add_lora = EngineCore.collective_rpc, EngineCore.add_lora
    if hasattr(call, "__wrapped__"):
        return

    @functools.wraps(call)
    def announced_call(engine_core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method in _LOADS and _shares_memory(engine_core.scheduler):
            engine_core.scheduler.kvpool_load_weights()
        return call(engine_core, method, *args, **kwargs)

    @functools.wraps(add_lora)
    def announced_lora(engine_core: Any, lora_request: Any) -> Any:
        scheduler = engine_core.scheduler
        if not _shares_memory(scheduler):
            return add_lora(engine_core, lora_request)
        scheduler.kvpool_load_lora(lora_request)
        try:
            return add_lora(engine_core, lora_request)
        except BaseException:
            scheduler.kvpool_loras.forget(lora_request)
            raise

    EngineCore.collective_rpc, EngineCore.add_lora = announced_call, announced_lora


def _shares_memory(scheduler: Any) -> bool:
    """Returns whether it is kvpool's, and other engines use its memory. A process can have engines of other kinds."""
    return getattr(scheduler, "kvpool_loras", None) is not None


def announce_sleep() -> None:
    """Has the engine cores of this process announce their sleep. Repeats do nothing."""
    sleep, release = EngineCore.sleep, EngineCore.release_kv_cache_memory
    if hasattr(sleep, "__wrapped__"):
        return

    @functools.wraps(sleep)
    def announced_sleep(engine_core: Any, level: int = 1, mode: str = "abort") -> Any:
        with _announced(engine_core.scheduler, level):
            return sleep(engine_core, level, mode)

    @functools.wraps(release)
    def announced_release(engine_core: Any) -> Any:
        with _announced(engine_core.scheduler, 1):  # the weights stay
            return release(engine_core)

    EngineCore.sleep, EngineCore.release_kv_cache_memory = announced_sleep, announced_release


@contextlib.contextmanager
def _announced(scheduler: Any, level: int) -> Iterator[None]:
    """Announces a sleep whose reset may follow later, when the steps in flight have run; not one that fails."""
    scheduler.kvpool_sleep_level = level
    try:
        yield
    except BaseException:
        scheduler.kvpool_sleep_level = 0
        raise
