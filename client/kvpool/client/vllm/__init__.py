"""vLLM on kvpool: vLLM's own scheduler, with the service in place of the KV cache manager in its process.

    vllm serve MODEL --scheduler-cls kvpool.client.vllm.Scheduler

Set `KVPOOL_ADDRESS` and `KVPOOL_POOL` in the environment, or the settings in `additional_config` under "kvpool": see
`Settings`. An engine on memory that a `kvpool worker` lends needs `--worker-cls kvpool.client.vllm.Worker`, too.
"""

from typing import TYPE_CHECKING, Any

from kvpool.client.vllm.scheduler import AsyncScheduler, Scheduler
from kvpool.client.vllm.settings import Settings

if TYPE_CHECKING:
    from kvpool.client.vllm.worker import Worker

__all__ = ["AsyncScheduler", "Scheduler", "Settings", "Worker"]


def __getattr__(name: str) -> Any:
    """Imports the worker when it is asked for: the scheduler's process does not need it."""
    if name != "Worker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpool.client.vllm.worker import Worker  # noqa: PLC0415 - imports torch and vLLM's worker

    return Worker
