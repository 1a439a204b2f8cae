"""Hooks of a runner, the pool that they receive, and the memory of a rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvpool.core.planning.plan import KVCacheConfig
from kvpool.gpu_worker.cache import HeldCache
from kvpool.gpu_worker.layouts import LayerCache
from kvpool.gpu_worker.lent_cache import LentCache
from kvpool.gpu_worker.status import WorkerStatus


@dataclass(frozen=True, slots=True, eq=False)
class RankPool:
    """The tensors of a rank in one epoch.

    Attributes:
        epoch: The epoch. Steps of another epoch must not run.
        num_blocks: Number of blocks of the pool, including the null block: the smallest number over all ranks.
        config: The rank's buffers and the pool's groups, for `num_blocks` blocks.
        max_model_len: Maximum number of tokens of a request.
        kv_caches: View of each layer's pages, as its backend sees them; block 0 is the null block. The worker owns the
            memory: a runner that keeps views beyond the epoch drops them in `WorkerHooks.on_release`.
        buffers: int8 (bytes,), one per tensor of the config, large enough for at least `num_blocks` blocks: for
            runners that see pages differently, as kernel blocks. The worker owns this memory too.
        num_host_blocks: Number of blocks of the pool in host memory: the smallest number over all ranks.
    """

    epoch: int
    num_blocks: int
    config: KVCacheConfig
    max_model_len: int
    kv_caches: Mapping[str, LayerCache]
    buffers: tuple[torch.Tensor, ...]
    num_host_blocks: int = 0


def _no_hook(*_: object) -> None:
    """The default hook, which does nothing."""


@dataclass(frozen=True, slots=True)
class WorkerHooks:
    """Callbacks of a runner, called from threads of the worker. An error ends the rank.

    `on_epoch` and `on_release` are called one at a time and may wait for the device.

    Attributes:
        on_epoch: An epoch begins: wait for a step of the previous epoch that may still run, then bind the tensors.
            Steps are admitted when this returns. The buffers may be those of the previous epoch at the same addresses,
            but their contents are invalid.
        on_release: The tensors are about to be freed: wait for a step that may still run, then drop every view.
        on_status: The rank's status changed. Called from the thread that handles the stream, concurrently with the
            other hooks; must not block.
    """

    on_epoch: Callable[[RankPool], None] = _no_hook
    on_release: Callable[[], None] = _no_hook
    on_status: Callable[[WorkerStatus], None] = _no_hook


RankCache = HeldCache | LentCache
"""The memory of a rank. Only the cache thread calls its methods; any thread may read `allocated_bytes`."""
