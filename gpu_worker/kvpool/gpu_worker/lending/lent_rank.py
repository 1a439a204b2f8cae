"""A rank whose memory engines declare and map.

1. The rank joins its pool with the first declaration, and keeps its memory when all engines have gone.
2. A declaration that differs from that of the memory is refused while a process maps the memory. Otherwise the rank
   leaves the pool, frees the memory and joins again with the new declaration.
3. A process that is killed leaves the memory in its folder. The next process continues with it, as the same rank in the
   same epoch, if the server still expects the rank.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from kvpool.core.errors import AbortedError, InvalidArgumentError, KvpoolError, WrongStateError
from kvpool.core.ids import TableLease
from kvpool.core.planning.plan import KVCacheConfig, KVCacheTensor
from kvpool.core.ranks.declared import declared_difference
from kvpool.core.ranks.messages import DeclaredMemory, HeldTensors, Registration
from kvpool.gpu_worker.device import available_bytes, device_memory, open_device
from kvpool.gpu_worker.hooks import ReadyPool, WorkerHooks
from kvpool.gpu_worker.join import Phase
from kvpool.gpu_worker.lending.borrowers import Borrowers
from kvpool.gpu_worker.lending.lent_cache import LentCache
from kvpool.gpu_worker.lending.memory_folder import MemoryFolder
from kvpool.gpu_worker.lending.processes import kill, started
from kvpool.gpu_worker.messages import Allocation
from kvpool.gpu_worker.rank_runner import RankRunner, rank_registration
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import DeviceMemory, WorkerStatus, WorkerUsage
from kvpool.wire.errors import DeadlineError

_POLL_SECONDS: Final = 0.5

_log = logging.getLogger("kvpool.worker")


class LentRank:
    """The rank. The event loop alone calls its methods, except `status`, `usage` and `device_memory`.

    Attributes:
        settings: The rank, its pool and its device.
        device: The device.
        borrowers: The processes that map the memory.
    """

    def __init__(
        self, settings: WorkerSettings, folder: MemoryFolder, on_status: Callable[[WorkerStatus], None] = lambda _: None
    ) -> None:
        """Measures the device. Continues with the memory of an earlier process, if there is any.

        Args:
            settings: The rank, its pool and its device; its options are those that engines declare.
            folder: Folder of the memory.
            on_status: Called with each new status of the rank, from other threads.

        Raises:
            InvalidArgumentError: The device does not exist, lacks memory, or is not supported.
        """
        self.settings: Final = settings
        self.device: Final = open_device(settings.device)
        if self.device.type != "cpu":
            raise InvalidArgumentError("device", f"memory of {self.device} cannot be lent yet, only that of cpu")
        self._available_bytes: Final = available_bytes(self.device, settings)
        self._folder: Final = folder
        self._hooks: Final = WorkerHooks(on_status=on_status, on_epoch=self._keep, on_kill=self._kill)
        self.borrowers: Final = Borrowers(folder.write_borrowers)
        self._registration: Registration | None = None
        self._cache: LentCache | None = None
        self._runner: RankRunner[Borrowers] | None = None
        self._changing: Final = asyncio.Lock()
        self._restore()

    @property
    def rank_fields(self) -> dict[str, object]:
        """Log fields of the rank."""
        return {"pool": self.settings.pool, "rank": self.settings.rank}

    @property
    def is_lent(self) -> bool:
        """Whether there is memory, so that engines must declare the same layout."""
        return self._declared is not None

    @property
    def offered_bytes(self) -> int:
        """Size of the memory; the most that may be allocated while there is none."""
        declared = self._declared
        return declared.size_bytes if declared else self._available_bytes

    @property
    def status(self) -> WorkerStatus:
        """The status of the rank."""
        runner = self._runner
        return runner.status if runner else WorkerStatus(Phase.IDLE)

    @property
    def usage(self) -> WorkerUsage:
        """Memory, stream and step counts of the rank."""
        runner = self._runner
        usage = runner.usage if runner else WorkerUsage(self._available_bytes)
        return replace(usage, mapping_processes=self.borrowers.num_mapping)

    def device_memory(self) -> DeviceMemory:
        """Memory of the device."""
        return device_memory(self.device)

    async def mapped(self, declared: DeclaredMemory) -> tuple[int, int, int]:
        """Makes the memory that an engine declares available, and waits until the pool is open.

        Returns:
            Epoch, number of blocks, and the descriptor of the memory, which the caller must not close.

        Raises:
            WrongStateError: Processes map memory of another layout, or the other ranks declared fewer blocks.
            KvpoolError: The declaration is not valid, or the server refuses the rank.
        """
        try:
            declared.check()
        except InvalidArgumentError as error:
            error.rename_field(f"declared.{error.field}")
            raise
        async with self._changing:
            runner = await self._runner_for(declared)
        while True:
            try:
                pool = await asyncio.to_thread(runner.wait_ready, _POLL_SECONDS)
            except DeadlineError:
                continue
            except KvpoolError as error:
                if runner is self._runner and runner.status.phase is Phase.FAILED:
                    self._runner = self._registration = None
                error.rename_field(error.field.removeprefix("register."))
                raise
            break
        if runner is not self._runner or self._cache is None or self._cache.descriptor < 0:
            raise AbortedError("MEMORY_REPLACED", "another engine declared other memory meanwhile")
        if pool.num_blocks != declared.config.num_blocks:
            message = f"{declared.config.num_blocks}; the ranks of the pool have {pool.num_blocks}"
            raise WrongStateError("FEWER_BLOCKS", message, field="declared.config.num_blocks")
        return pool.epoch, pool.num_blocks, self._cache.descriptor

    def report_gone(self, leases: Collection[TableLease]) -> None:
        """Reports sessions whose processes have exited."""
        if self._runner:
            self._runner.report_gone(leases)

    async def stop(self, *, keeps_memory: bool) -> None:
        """Leaves the pool and frees the memory, or keeps it for a later process."""
        runner, self._runner = self._runner, None
        if runner:
            await asyncio.to_thread(runner.abandon if keeps_memory else runner.close)
        if self._cache:
            self._cache.close()
        if not keeps_memory:
            self._folder.delete()

    @property
    def _declared(self) -> DeclaredMemory | None:
        return self._registration.declared if self._registration else None

    async def _runner_for(self, declared: DeclaredMemory) -> RankRunner[Borrowers]:
        runner, held = self._runner, self._declared
        if runner and held:
            found = declared_difference(declared, held)
            if found is None:
                return runner
            field = f"declared.{found.field}"
            if self.borrowers.num_mapping:
                message = f"{found.mine}, the memory that other processes map has {found.theirs}"
                raise WrongStateError("MEMORY_DIFFERS", message, field=field)
            _log.info("memory replaced", extra={**self.rank_fields, "field": field})
            self._runner = None
            await asyncio.to_thread(runner.close)
        return self._start(self._register(declared), LentCache(self._folder))

    def _register(self, declared: DeclaredMemory, boot_id: str = "") -> Registration:
        settings = replace(self.settings, options=declared.options)
        try:
            return rank_registration(settings, self.device, layers=declared.layers, declared=declared, boot_id=boot_id)
        except InvalidArgumentError as error:
            error.rename_field(error.field.removeprefix("register."))
            raise

    def _start(
        self, registration: Registration, cache: LentCache, held: Allocation | None = None
    ) -> RankRunner[Borrowers]:
        runner = RankRunner(
            self.settings,
            registration,
            device=self.device,
            cache=cache,
            fence=self.borrowers.attach,
            hooks=self._hooks,
            held=held,
        )
        self._registration, self._cache, self._runner = registration, cache, runner
        runner.start()
        return runner

    def _keep(self, pool: ReadyPool) -> None:
        """Job of the rank's thread: states whose memory it is, before steps are admitted."""
        if self._registration:
            held = HeldTensors(pool.epoch, pool.num_blocks)
            self._folder.write_rank(self.settings.pool, replace(self._registration, held=held, last_epoch=pool.epoch))

    def _kill(self, session_numbers: Collection[int]) -> None:
        """Kills the processes of ended sessions. Called from the rank's thread."""
        for borrower in self.borrowers.all():
            if any(lease.session_number in session_numbers for lease in borrower.leases):
                _log.warning("process killed", extra={**self.rank_fields, "pid": borrower.pid, "client": borrower.name})
                kill(borrower.pid, borrower.started_ticks)

    def _restore(self) -> None:
        """Continues with the memory of an earlier process."""
        past = self._folder.read_rank()
        if past is None or past.declared is None or past.held is None or past.world_size != self.settings.world_size:
            self._folder.delete()
            return
        declared, num_blocks = past.declared, past.held.num_blocks
        buffer = KVCacheTensor(declared.size_bytes, tuple(declared.layers))
        held = Allocation(KVCacheConfig(num_blocks, (buffer,), declared.config.groups), num_blocks, declared.size_bytes)
        try:
            cache = LentCache(self._folder, held)
        except OSError:
            self._folder.delete()
            return
        gone: list[TableLease] = []
        for borrower in self._folder.read_borrowers():
            if started(borrower.pid) == borrower.started_ticks:
                self.borrowers.restore(borrower)
            else:
                gone += borrower.leases
        registration = self._register(declared, past.boot_id)
        runner = self._start(replace(registration, held=past.held, last_epoch=past.last_epoch), cache, held)
        runner.report_gone(gone)
        _log.info("memory found", extra={**self.rank_fields, "epoch": past.held.epoch, "bytes": declared.size_bytes})
