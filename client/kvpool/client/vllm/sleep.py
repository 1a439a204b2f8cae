"""Has engine cores announce to their schedulers that they sleep, so that cached prefixes stay in lent memory.

vLLM 0.32 resets the prefix cache before its workers free the memory. Its scheduler cannot tell this reset from one for
a user or for new weights, and a reset drops the prefixes of all engines of the pool.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from vllm.v1.engine.core import EngineCore


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
