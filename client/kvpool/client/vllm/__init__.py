"""vLLM on kvpool: vLLM's own scheduler, with the service in place of the KV cache manager in its process.

    KVPOOL_ADDRESS=unix:/run/kvpool.sock vllm serve MODEL

`kvpool.vllm_plugin` chooses the classes of this package for an engine whose settings name a server: `Scheduler`, and
`Worker` in memory that a `kvpool worker` lends. Settings come from the environment, or from `additional_config` under
"kvpool": see `Settings`.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvpool.client.vllm.scheduler import AsyncScheduler, Scheduler
    from kvpool.client.vllm.settings import Settings
    from kvpool.client.vllm.worker import Worker

__all__ = ["AsyncScheduler", "Scheduler", "Settings", "Worker"]

_MODULES: Final = {"AsyncScheduler": "scheduler", "Scheduler": "scheduler", "Settings": "settings", "Worker": "worker"}


def __getattr__(name: str) -> Any:
    """Imports a class when it is needed: an API server needs no scheduler, and a scheduler no worker."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
