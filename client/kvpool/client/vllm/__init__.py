"""vLLM on kvpool: vLLM's own scheduler, with the service in place of the KV cache manager in its process.

    vllm serve MODEL --scheduler-cls kvpool.client.vllm.Scheduler

Set `KVPOOL_ADDRESS` and `KVPOOL_POOL` in the environment, or the settings in `additional_config` under "kvpool": see
`Settings`.
"""

from kvpool.client.vllm.scheduler import AsyncScheduler, Scheduler
from kvpool.client.vllm.settings import Settings

__all__ = ["AsyncScheduler", "Scheduler", "Settings"]
