"""A rank of a pool: joins the pool, holds the planned tensors, and admits the steps of a runner."""

from collections.abc import Mapping

from kvpool.core.ids import TableLease
from kvpool.core.specs.base import KVCacheSpec
from kvpool.gpu_worker.cache import HeldCache
from kvpool.gpu_worker.device import available_bytes, device_memory, open_device
from kvpool.gpu_worker.layouts import LayerCache, check_layouts
from kvpool.gpu_worker.rank_pool import RankPool, WorkerHooks
from kvpool.gpu_worker.rank_runner import RankRunner, rank_registration
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import DeviceMemory, WorkerStatus
from kvpool.gpu_worker.tensors import BufferAllocator, empty_buffer
from kvpool.lending.fence import Fence, StaleTablesError, StepTicket

__all__ = ["RankPool", "Worker", "WorkerHooks", "WorkerSettings", "WorkerStatus"]


class Worker(RankRunner[Fence]):
    """One rank with tensors of its own. Thread-safe.

    Attributes:
        device: The device of the tensors.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        layers: Mapping[str, KVCacheSpec],
        *,
        layouts: Mapping[str, str] | None = None,
        hooks: WorkerHooks | None = None,
        allocate: BufferAllocator = empty_buffer,
    ) -> None:
        """Opens the device and measures its memory. Does not join the pool.

        Args:
            settings: The rank, its pool and its device.
            layers: Spec of each layer of the rank, in the model's order.
            layouts: Layout name of each layer whose backend specifies one; other layers get the default of their kind.
            hooks: Callbacks of the runner.
            allocate: Allocates one buffer; for runners with their own allocator.

        Raises:
            InvalidArgumentError: The device does not exist or lacks memory, a layer or layout is unknown, or a layout
                cannot represent its layer's pages.
        """
        check_layouts(layouts or {}, layers)
        self.device = device = open_device(settings.device)
        registration = rank_registration(
            settings, device, available_bytes=available_bytes(device, settings), layers=dict(layers)
        )
        reserve_bytes = settings.reserve_bytes if device.type == "cuda" else 0
        cache = HeldCache(device, layouts or {}, reserve_bytes, allocate)
        super().__init__(settings, registration, cache=cache, fence=Fence, hooks=hooks or WorkerHooks())

    def device_memory(self) -> DeviceMemory:
        """Reads the memory of the device; costs a driver call."""
        return device_memory(self.device)

    @property
    def kv_caches(self) -> Mapping[str, LayerCache]:
        """View of each layer's pages in the current epoch; empty if there is none."""
        pool = self._loop.readiness.pool
        return pool.kv_caches if pool else {}

    def step(self, lease: TableLease) -> StepTicket:
        """Admits a step whose block tables were handed out under a lease: `Session.table_lease`.

        No other session is given the step's blocks until its ticket is done. Use `with worker.step(lease):` around the
        step and the wait for the device, or call `ticket.done()` later, from any thread. Where one rank sends steps to
        the others, only that rank calls this, and holds the ticket until all ranks have run the step, so that a step
        runs on all ranks or on none. Costs a lock.

        Leases outlive a broken stream: the rank keeps its tensors until the server ends the epoch.

        Raises:
            StaleTablesError: The epoch has passed or the session has ended: the step must not run.
        """
        try:
            return self._loop.fence.step(lease)
        except StaleTablesError as error:
            if error.reason == "NOT_READY":
                message = f"a step of epoch {lease.epoch}: {self.status.describe()}"
                raise StaleTablesError(error.reason, message, field=error.field) from None
            raise
