"""What a runner is given and told of its rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvpool.core.planning.plan import KVCacheConfig
from kvpool.gpu_worker.layouts import LayerCache
from kvpool.gpu_worker.status import WorkerStatus


@dataclass(frozen=True, slots=True, eq=False)
class ReadyPool:
    """What a rank holds in one epoch.

    Attributes:
        epoch: Which. Steps of another are not to be run.
        num_blocks: Blocks of the pool, the null block included: the smallest number over all ranks.
        config: The rank's buffers and the pool's groups, for that many blocks.
        max_model_len: Most tokens a request may have.
        kv_caches: View of each layer's pages, as its backend sees them; block 0 is the null block. They are the
            worker's memory: whoever keeps them beyond the epoch drops them in `WorkerHooks.on_release`.
        buffers: int8 (bytes,), one for each of the config's tensors, with room for `num_blocks` or more: for runners
            that see pages otherwise, as kernel blocks. Memory of the worker too.
    """

    epoch: int
    num_blocks: int
    config: KVCacheConfig
    max_model_len: int
    kv_caches: Mapping[str, LayerCache]
    buffers: tuple[torch.Tensor, ...]

    @property
    def allocated_bytes(self) -> int:
        """Memory of the buffers."""
        return sum(map(len, self.buffers))


def _nothing(*_: object) -> None:
    """Stands for a hook that nobody asked for."""


@dataclass(frozen=True, slots=True)
class WorkerHooks:
    """What a runner wants to be told, from threads of the worker. An error ends the rank.

    `on_epoch` and `on_release` are called one at a time, and may wait for the device.

    Attributes:
        on_epoch: An epoch begins: wait for the step of the last one that may still run, then bind the tensors. Steps
            are let through when this returns. The buffers may be those of the epoch before, as nothing in them moved,
            but what they hold is worth nothing.
        on_release: The tensors are about to be freed: wait for the step that may still run, then drop every view.
        on_status: The rank's status changed. Called from the thread that talks to the server, beside the others: return
            at once.
    """

    on_epoch: Callable[[ReadyPool], None] = _nothing
    on_release: Callable[[], None] = _nothing
    on_status: Callable[[WorkerStatus], None] = _nothing
