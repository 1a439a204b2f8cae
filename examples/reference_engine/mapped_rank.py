"""The memory of a rank that a `kvpool worker` lends, in place of `Worker`: the engine lays it out and maps it."""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Self

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import PoolName, TableLease
from kvpool.core.planning.plan import RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.core.specs.base import KVCacheSpec
from kvpool.gpu_worker.device import open_device
from kvpool.gpu_worker.rank_pool import RankPool
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.tensors import reshape_kv_cache
from kvpool.lending.fence import StepTicket
from kvpool.lending.lender_client import connect_lender


class MappedRank:
    """The only rank of an engine, on lent memory."""

    def __init__(
        self,
        settings: WorkerSettings,
        address: str,
        specs: Mapping[str, KVCacheSpec],
        layouts: Mapping[str, str],
        fingerprint: Mapping[str, str],
    ) -> None:
        """Connects to the lender.

        Args:
            settings: The rank and its pool; its memory is what the engine needs.
            address: Socket of the lender.
            specs: Spec of each layer.
            layouts: Layout name of each layer.
            fingerprint: What the contents of a block depend on besides its tokens.

        Raises:
            InvalidArgumentError: The engine has several ranks; or fewer than two blocks fit the memory.
            KvpoolError: The lender cannot be reached, or refuses.
        """
        if settings.world_size > 1:
            raise InvalidArgumentError("memory", "this example maps the memory of one rank")
        self.device = open_device(settings.device)
        self._layouts = layouts
        memory = RankMemory(dict(specs), settings.memory_bytes or 0)
        self._plan = get_kv_cache_configs([memory], settings.options)
        (self._config,) = self._plan.configs
        pool = settings.options.pool_config(PoolName(settings.pool), self._plan)
        self._sizes = [tensor.size_bytes for tensor in self._config.tensors]
        self._declared = DeclaredMemory(pool, sum(self._sizes), tuple(sorted(fingerprint.items())))
        self._lender = connect_lender(address, settings.pool, client_name="reference engine")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lender.close()

    def wait_ready(self, timeout_seconds: float) -> RankPool:
        """Maps the memory when the pool is open, with the contents that earlier engines left."""
        self._memory = memory = self._lender.map(self._declared, timeout_seconds)
        ends = accumulate(self._sizes, initial=0)
        buffers = tuple(memory.buffer[start:end] for start, end in pairwise(ends))
        views = reshape_kv_cache(self._config, memory.num_blocks, buffers, self._layouts)
        return RankPool(memory.epoch, memory.num_blocks, self._config, self._plan.max_model_len, views, buffers)

    def step(self, lease: TableLease) -> StepTicket:
        """See `LentMemory.step`."""
        return self._memory.step(lease)
