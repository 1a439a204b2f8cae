"""A rank whose memory engines declare and map.

1. The rank joins its pool with the first declaration, and keeps its memory when all engines have gone.
2. A declaration that differs from that of the memory is refused while a process maps the memory, or may map it again
   for an open session. Otherwise the rank leaves the pool, frees the memory and joins again with the new declaration.
3. A process that is killed leaves the memory in its folder. The next process continues with it, as the same rank in the
   same epoch, if the server still expects the rank.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from kvpool.core.errors import (
    AbortedError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    WrongStateError,
    fields_renamed,
)
from kvpool.core.ids import TableLease
from kvpool.core.planning.plan import KVCacheConfig, KVCacheTensor
from kvpool.core.ranks.declared import declared_difference
from kvpool.core.ranks.messages import DeclaredMemory, HeldTensors, Registration
from kvpool.gpu_worker.device import available_bytes, check_host_memory, device_memory, open_device
from kvpool.gpu_worker.lent_cache import LentCache
from kvpool.gpu_worker.rank_effects import Allocation
from kvpool.gpu_worker.rank_pool import RankPool, WorkerHooks
from kvpool.gpu_worker.rank_protocol import Phase
from kvpool.gpu_worker.rank_runner import RankRunner, rank_registration
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import DeviceMemory, WorkerStatus, WorkerUsage
from kvpool.lending.borrower_registry import Borrower, BorrowerRegistry
from kvpool.lending.cuda_memory import CudaMemoryFolder
from kvpool.lending.memory_folder import MemoryFolder
from kvpool.lending.processes import kill
from kvpool.lending.rank import ReadyMemory
from kvpool.v1.lending_pb2 import LendingOffer
from kvpool.wire.peer_process import started

_log = logging.getLogger("kvpool.worker")


@dataclass(frozen=True, slots=True)
class _Held:
    """Memory, what an engine declared of it, and the threads of the rank that holds it."""

    declared: DeclaredMemory
    cache: LentCache
    runner: RankRunner[BorrowerRegistry]


def memory_folder(settings: WorkerSettings, root: Path) -> MemoryFolder:
    """Opens the folder of a rank's memory, for its device; raises as `MemoryFolder` and `open_device` do."""
    device = open_device(settings.device)
    if device.type == "cuda":
        return CudaMemoryFolder(settings.pool, settings.rank, root, device)
    return MemoryFolder(settings.pool, settings.rank, root)


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
        check_host_memory(self.device, settings)
        past = folder.read_rank()
        held_bytes = past.declared.size_bytes if past and past.declared else 0
        self._available_bytes: Final = available_bytes(self.device, settings, held_bytes)
        self._folder: Final = folder
        self._on_status: Final = on_status
        self.borrowers: Final = BorrowerRegistry(folder.write_borrowers, folder.add_sessions, self._kill)
        self._held: _Held | None = None
        self._last_epoch = 0
        """The newest epoch of the rank."""
        self._weights_bytes = 0
        """What the weights of the newest engine take of the device; 0 if it is not known."""
        self._changing: Final = asyncio.Lock()
        """Held while the memory is replaced."""
        self._restore(past)

    @property
    def rank_fields(self) -> dict[str, object]:
        """Log fields of the rank."""
        return {"pool": self.settings.pool, "rank": self.settings.rank}

    @property
    def pool_name(self) -> str:
        """Name of the pool."""
        return self.settings.pool

    @property
    def offer(self) -> LendingOffer:
        """The memory, whose layout engines must declare; the most that may be allocated while there is none."""
        held, settings = self._current, self.settings
        return LendingOffer(
            rank=settings.rank,
            world_size=settings.world_size,
            available_bytes=held.declared.size_bytes if held else self._available_bytes,
            is_lent=held is not None,
            device=str(self.device),
            weights_bytes=self._weights_bytes,
            host_bytes=settings.host_memory_bytes,
        )

    @property
    def status(self) -> WorkerStatus:
        """The status of the rank."""
        held = self._held
        return held.runner.status if held else WorkerStatus(Phase.IDLE)

    @property
    def usage(self) -> WorkerUsage:
        """Memory, stream and step counts of the rank."""
        held = self._held
        usage = held.runner.usage if held else WorkerUsage(self._available_bytes)
        host_bytes = held.cache.host_bytes if held else 0
        return replace(usage, mapping_processes=self.borrowers.num_mapping, host_bytes=host_bytes)

    def device_memory(self) -> DeviceMemory:
        """Memory of the device."""
        return device_memory(self.device)

    async def ready_memory(self, declared: DeclaredMemory, weights_bytes: int = 0) -> ReadyMemory:
        """Makes the memory that an engine declares available, and waits until the pool is open. See `MemoryOwner`.

        Raises:
            WrongStateError: Processes use memory of another layout, or the other ranks declared fewer blocks.
            KvpoolError: The declaration is not valid, the memory does not fit, or the server refuses the rank.
        """
        with fields_renamed("declared.{}".format):
            declared.check()
        held = await asyncio.shield(self._held_for(declared))  # a replacement, once begun, is finished
        try:
            pool = await asyncio.wrap_future(held.runner.ready())
        except KvpoolError as error:
            error.rename_field(error.field.removeprefix("register."))
            raise
        except Exception as error:  # not of kvpool; the runner has logged it
            raise AbortedError("RANK_FAILED", f"the rank has failed: {error}") from error
        if pool.num_blocks != declared.config.num_blocks:
            message = f"{declared.config.num_blocks}; the ranks of the pool have {pool.num_blocks}"
            raise WrongStateError("FEWER_BLOCKS", message, field="declared.config.num_blocks")
        self._weights_bytes = weights_bytes or self._weights_bytes
        return ReadyMemory(pool.epoch, pool.num_blocks, pool.num_host_blocks, held.cache.duplicate)

    def report_gone(self, leases: Collection[TableLease]) -> None:
        """Reports sessions whose processes have exited."""
        if self._held:
            self._held.runner.report_gone(leases)

    async def stop(self, *, keeps_memory: bool) -> None:
        """Leaves the pool and frees the memory, or keeps it for a later process."""
        async with self._changing:
            held, self._held = self._held, None
            if held:
                await asyncio.to_thread(held.runner.abandon if keeps_memory else held.runner.close)
                held.cache.close()
            if not keeps_memory:
                self._folder.delete()

    @property
    def _current(self) -> _Held | None:
        """The memory; None while there is none, or after the rank has failed, as it then holds none."""
        held = self._held
        return None if held is None or held.runner.is_over else held

    async def _held_for(self, declared: DeclaredMemory) -> _Held:
        async with self._changing:
            held = self._current
            if held is None:
                return self._start(declared, self._register(declared))
            found = declared_difference(declared, held.declared)
            if found is None:
                return held
            field = f"declared.{found.field}"
            if self.borrowers.is_in_use:
                message = f"{found.mine}, the memory that other processes use has {found.theirs}"
                raise WrongStateError("MEMORY_DIFFERS", message, field=field)
            registration = self._register(declared)
            _log.info("memory replaced", extra={**self.rank_fields, "field": field})
            await asyncio.to_thread(held.runner.close)
            return self._start(declared, registration)

    def _register(self, declared: DeclaredMemory) -> Registration:
        settings = replace(self.settings, options=declared.options)
        with fields_renamed(lambda field: field.removeprefix("register.")):
            registration = rank_registration(
                settings,
                self.device,
                available_bytes=self._available_bytes,
                layers=declared.layers,
                declared=declared,
            )
            num_host_blocks = self._num_host_blocks(declared)
            registration = replace(registration, last_epoch=self._last_epoch, num_host_blocks=num_host_blocks)
            registration.check()
        return registration

    def _num_host_blocks(self, declared: DeclaredMemory) -> int:
        """Number of blocks that fit the host memory; without caching no block stays to be evicted."""
        host_bytes, slot_bytes = self.settings.host_memory_bytes, declared.block_bytes
        if not host_bytes or not declared.config.enable_caching:
            return 0
        if slot_bytes > host_bytes:
            message = f"{host_bytes} bytes hold no block of this engine, which takes {slot_bytes}"
            raise InvalidArgumentError("host_memory", message, reason="NO_MEMORY")
        return host_bytes // slot_bytes

    def _start(self, declared: DeclaredMemory, registration: Registration, cache: LentCache | None = None) -> _Held:
        """Starts the rank, with the memory of an earlier process or without memory."""
        cache = cache or LentCache(self._folder, registration.num_host_blocks)
        hooks = WorkerHooks(on_status=self._on_status, on_epoch=partial(self._keep, registration))
        runner = RankRunner(self.settings, registration, cache=cache, fence=self.borrowers.attach, hooks=hooks)
        self._held = _Held(declared, cache, runner)
        runner.start()
        return self._held

    def _keep(self, registration: Registration, pool: RankPool) -> None:
        """Job of the rank's thread: states whose memory it is, before steps are admitted."""
        self._last_epoch = pool.epoch
        held = HeldTensors(pool.epoch, pool.num_blocks)
        try:
            self._folder.write_rank(self.settings.pool, replace(registration, held=held, last_epoch=pool.epoch))
        except OSError as error:
            message = f"cannot write to {self._folder.path}: {error.strerror}"
            raise ExhaustedError("OUT_OF_MEMORY", message, field="declared.size_bytes") from error

    def _kill(self, borrower: Borrower) -> None:
        """Kills a process at the request of an operator. Called from the rank's thread."""
        fields = {**self.rank_fields, "pid": borrower.pid, "client": borrower.name}
        try:
            kill(borrower.pid, borrower.started_ticks)
        except OSError as error:
            _log.error("process not killed", extra={**fields, "error": error.strerror})
        else:
            _log.warning("process killed", extra=fields)

    def _restore(self, past: Registration | None) -> None:
        """Continues with the memory of an earlier process."""
        if past is None or past.declared is None or past.held is None or past.world_size != self.settings.world_size:
            self._folder.delete()
            return
        declared, num_blocks = past.declared, past.held.num_blocks
        buffer = KVCacheTensor(declared.size_bytes, tuple(declared.layers))
        held = Allocation(KVCacheConfig(num_blocks, (buffer,), declared.config.groups), num_blocks, declared.size_bytes)
        self._last_epoch = past.last_epoch
        try:
            registration = replace(self._register(declared), boot_id=past.boot_id, held=past.held)
            processes = self._folder.read_borrowers()
            cache = LentCache(self._folder, registration.num_host_blocks, held)
        except (OSError, KvpoolError) as error:
            _log.warning("memory dropped", extra={**self.rank_fields, "error": str(error)})
            self._folder.delete()
            return
        self.borrowers.begin(past.held.epoch)
        gone: list[TableLease] = []
        for process in processes:
            if started(process.pid) == process.started_ticks:
                self.borrowers.restore(process, past.held.epoch)
            else:
                gone += process.leases
        self._start(declared, registration, cache)
        self.report_gone(gone)
        _log.info("memory found", extra={**self.rank_fields, "epoch": past.held.epoch, "bytes": declared.size_bytes})
