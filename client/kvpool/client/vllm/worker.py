"""vLLM's worker with the KV cache in memory that a `kvpool worker` lends.

What vLLM 0.32 and 0.33 write to the KV cache outside of scheduled steps, and why none of it reaches a block of an
engine:

- Profiling runs before the cache exists; CUDA graphs are profiled on a small cache of their own.
- Dummy runs, for compilation and for CUDA graphs, have no slots: their slot mappings are -1, and states of Mamba layers
  go to the null block.
- `warmup_kernels` of the second model runner executes requests of its own on blocks 1, 2, 3 ... It is turned off, with
  `enable_jit_warmup`.
- Warm-ups of FlashInfer and of sparse MLA execute such requests on the second runner, too, and cannot be turned off.
  While a worker warms up, block tables are redirected to the null block, as vLLM does for elastic expert parallelism.
- ReplaySSM's tuning writes to states in real blocks, and is refused.
- Dummy batches, which engines of MoE models run while a data-parallel one has a step, are such dummy runs. They need no
  ticket.
"""

import contextlib
import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.parallel_state import get_pcp_group
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput

from kvpool.client.vllm.lendable import check_lendable, check_version, declared_memory
from kvpool.client.vllm.lenders import connect_to_lender, explained
from kvpool.client.vllm.lent_allocation import LentAllocation, block_regions, check_views
from kvpool.client.vllm.logs import log_with_vllm
from kvpool.client.vllm.pool_config import UnsupportedError
from kvpool.client.vllm.settings import Settings
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.lending.fence import StepTicket
from kvpool.lending.host_copies import CopyOrders, CopyReport, HostCopies
from kvpool.lending.lender_client import LenderClient, LentMemory
from kvpool.lending.processes import end_with_parent
from kvpool.lending.steps_in_flight import DeviceEvent, StepsInFlight

check_version()  # other versions have other modules

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401 - must be imported first, as in cpu_worker.py
    from vllm.v1.worker.cpu_worker import CPUWorker as EngineWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as EngineWorker

from vllm.v1.worker import gpu_worker  # noqa: E402 - after the platform's

from kvpool.client.vllm.device_memory import requested_bytes, too_full  # noqa: E402 - imports it, too

_SCHEDULER: Final = "kvpool.client.vllm.Scheduler"
_KV_CACHE: Final = "kv_cache"
"""vLLM's tag for the memory of the KV cache."""


class Worker(EngineWorker):  # type: ignore[misc]  # vLLM has no types here
    """The platform's worker, on lent memory.

    The engine's scheduler must be `kvpool.client.vllm.Scheduler`, which puts its lease of the blocks into each step.
    """

    def __init__(self, vllm_config: Any, local_rank: int, rank: int, *args: Any, **kwargs: Any) -> None:
        """Connects to the lender, and makes vLLM's worker.

        Raises:
            ValueError: The settings are invalid, or the engine uses a feature that lent memory does not support.
            KvpoolError: The lender cannot be reached, or refuses the engine.
        """
        log_with_vllm()
        self._kvpool_settings = Settings.of_engine(vllm_config)
        if not self._kvpool_settings.memory:
            raise ValueError(
                "kvpool.client.vllm.Worker needs additional_config['kvpool']['memory'], or KVPOOL_MEMORY in the"
                " environment: the socket of a `kvpool worker --lend`"
            )
        check_lendable(vllm_config)
        # Steps of a killed engine would keep its blocks from other engines until vLLM's worker notices, a second later.
        end_with_parent()
        self._kvpool_lender = self._kvpool_connect(vllm_config, rank)
        self._kvpool_memory: LentMemory | None = None
        self._kvpool_copies: HostCopies | None = None
        self._kvpool_report = CopyReport()
        self._kvpool_ticket: StepTicket | None = None
        self._kvpool_transfers: StepTicket | None = None
        self._kvpool_is_warming_up = False
        record_event = None if current_platform.is_cpu() else _record_event
        self._kvpool_steps = StepsInFlight(record_event)
        offer = self._kvpool_lender.offer
        if offer.is_lent:
            # The memory is allocated, by the lender: do not look for as much free memory again.
            vllm_config.cache_config.kv_cache_memory_bytes = offer.available_bytes
        vllm_config.kernel_config.enable_jit_warmup = False  # see above
        super().__init__(vllm_config, local_rank, rank, *args, **kwargs)

    def _kvpool_connect(self, vllm_config: Any, rank: int) -> LenderClient:
        return connect_to_lender(self._kvpool_settings, vllm_config.parallel_config, rank, f"worker {rank}")

    def init_device(self) -> None:
        """Initializes the device as vLLM's worker does, with a check of its memory that knows of the lender."""
        vllms_check = gpu_worker.request_memory
        gpu_worker.request_memory = partial(requested_bytes, self._kvpool_lender.offer)
        try:
            super().init_device()
        finally:
            gpu_worker.request_memory = vllms_check

    def determine_available_memory(self) -> int:
        """Returns what the lender has if others use it; otherwise at most what vLLM measures."""
        measured_bytes = self._kvpool_lender.offer.available_bytes
        # On CPU vLLM would look for as much free memory again.
        if not self._kvpool_lender.offer.is_lent or not current_platform.is_cpu():
            with self._kvpool_fits():
                measured_bytes = int(super().determine_available_memory())
        elif self._should_warm_up_model():
            self.model_runner.warming_up_model()
        # Of engines that start at the same time, one may have sized the memory while this one was loading.
        newest = self._kvpool_connect(self.vllm_config, self.rank)
        newest.close()
        offer = newest.offer
        return offer.available_bytes if offer.is_lent else min(measured_bytes, offer.available_bytes)

    @contextlib.contextmanager
    def _kvpool_fits(self) -> Iterator[None]:
        """Explains an error of a device that is too full."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise too_full(self._kvpool_lender.offer, self.init_snapshot, f"more than it got: {error}") from error

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Maps the memory, when all ranks of the pool are ready, and makes the layers' views of it.

        Raises:
            ValueError: The KV cache has a form that lent memory does not support.
            KvpoolError: The lender refuses, for example because other engines use another layout; names the field.
        """
        settings = self._kvpool_settings
        declared = declared_memory(self.vllm_config, kv_cache_config, settings.pool)
        # On CPU vLLM does not measure the weights.
        weights_bytes = int(getattr(self.model_runner, "model_memory_usage", 0))
        with explained(self._kvpool_lender.address):
            self._kvpool_memory = self._kvpool_lender.map(
                declared,
                settings.deadline_seconds,
                finish_steps=self._kvpool_steps.finish_all,
                weights_bytes=weights_bytes,
            )
        buffer, host = self._kvpool_memory.buffer, self._kvpool_memory.host
        if host is not None:
            regions = block_regions(kv_cache_config)
            self._kvpool_copies = HostCopies(buffer, regions, host, kv_cache_config.num_blocks)
        super().initialize_from_config(kv_cache_config)
        check_views(buffer, self.model_runner.kv_caches)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """Returns vLLM's context for an allocation; for that of the KV cache, the lent memory."""
        if tag == _KV_CACHE and self._kvpool_memory:
            return LentAllocation(self._kvpool_memory.buffer)
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return context

    def compile_or_warm_up_model(self) -> Any:
        """Warms up as vLLM does, without a write to a block."""
        with self._kvpool_fits(), self._kvpool_warm_up():
            return super().compile_or_warm_up_model()

    @contextlib.contextmanager
    def _kvpool_warm_up(self) -> Iterator[None]:
        """Redirects the writes of steps to the null block. The first model runner warms up without steps."""
        if not self.use_v2_model_runner:
            yield
            return
        tables = self.model_runner.block_tables
        if not hasattr(tables, "redirect_writes_to_null_block"):
            raise UnsupportedError("warm-up in lent memory", "block tables have no redirect_writes_to_null_block")
        self._kvpool_is_warming_up = tables.redirect_writes_to_null_block = True
        try:
            yield
        finally:
            self._kvpool_is_warming_up = tables.redirect_writes_to_null_block = False

    def execute_model(self, scheduler_output: Any) -> Any:
        """Runs a step if the lender permits it. Before, makes its copies from and to host memory.

        Raises:
            StaleTablesError: The step must not run: other engines may own its blocks.
            KvpoolError: The lender does not know the session.
        """
        self._kvpool_end_step()  # of a rank that does not sample
        self._kvpool_ticket = self._kvpool_admit(scheduler_output)
        try:
            if orders := _copy_orders(scheduler_output):
                self._kvpool_copy(scheduler_output, orders)
            output = super().execute_model(scheduler_output)
        except BaseException:
            self._kvpool_end_step()
            raise
        return None if output is None else self._kvpool_ended(output)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Samples, and drafts, which may write to the step's blocks; then the step has ended."""
        try:
            output = super().sample_tokens(*args, **kwargs)
        except BaseException:
            self._kvpool_end_step()
            raise
        return self._kvpool_ended(output)

    def _kvpool_ended(self, output: Any) -> Any:
        """Ends the step, whose output reports it as executed.

        vLLM's output arrives before drafts and copies of states have run on the device, and they write to blocks. A
        stage of a pipeline that is not the last one is not waited for: its output reports nothing.
        """
        event = self._kvpool_end_step()
        report = self._kvpool_copies.report if self._kvpool_copies else None
        if report == self._kvpool_report:
            report = None
        if not (event or report) or not get_pp_group().is_last_rank:
            return output
        self._kvpool_report = report or self._kvpool_report
        if isinstance(output, AsyncModelRunnerOutput):
            return CompletedOutput(output, event, report)
        if event:
            event.synchronize()
        return _with_report(output, report)

    def _kvpool_copy(self, scheduler_output: Any, orders: CopyOrders) -> None:
        """Makes the copies from and to host memory that go with a step, which may have no tokens."""
        copies = self._kvpool_copies
        if copies is None:
            raise ValueError("kvpool: the scheduler's pool has host memory, and the lender of this worker has none")
        copies.join(orders.joined)
        if orders.before:
            copies.make(orders.before)
        if orders.beside:
            # They can outlast the step. Until they have been made, no other session may use the blocks.
            ticket = self._kvpool_step(scheduler_output)
            try:
                self._kvpool_steps.launched_beside(ticket, copies.begin(orders.beside))
            except BaseException:
                ticket.done()
                raise
            copies.join(orders.joined)
        if self.vllm_config.kv_transfer_config is not None:
            # A connector loads into blocks when it likes, also into the source of a copy, which is free.
            copies.wait()
        is_alone = not scheduler_output.total_num_scheduled_tokens
        if is_alone and self.parallel_config.world_size > 1:
            # Layers exchange data, so that the output of a step shows that all ranks have made its copies. Here, the
            # rank that answers must wait for the others.
            copies.wait()
            for group in (get_pp_group(), get_pcp_group(), get_tp_group()):  # one dimension after the other
                group.barrier()

    def _kvpool_admit(self, scheduler_output: Any) -> StepTicket | None:
        writes = (
            scheduler_output.total_num_scheduled_tokens
            or scheduler_output.new_block_ids_to_zero
            or scheduler_output.kv_cache_block_copies
            or _copy_orders(scheduler_output)
            or scheduler_output.kv_connector_metadata is not None
        )
        if not writes or self._kvpool_is_warming_up:
            return None
        self._kvpool_steps.finish_completed()
        ticket = self._kvpool_step(scheduler_output)
        if self._kvpool_transfers is None and scheduler_output.kv_connector_metadata is not None:
            # A connector may transfer blocks at any time from now on, so the session is in flight to the end.
            self._kvpool_transfers = self._kvpool_step(scheduler_output)
        return ticket

    def _kvpool_step(self, scheduler_output: Any) -> StepTicket:
        """Returns a ticket for work on the blocks of a step."""
        if not self._kvpool_memory:
            raise UnsupportedError("steps before the KV cache is there, in lent memory")
        lease = getattr(scheduler_output, "kvpool_lease", None)
        if lease is None:
            raise UnsupportedError("other schedulers in lent memory", f"set scheduler_cls to {_SCHEDULER}")
        pool, epoch, session_number = lease
        if pool != self._kvpool_settings.pool:
            raise ValueError(f"kvpool: the scheduler uses pool {pool}, the worker {self._kvpool_settings.pool}")
        return self._kvpool_memory.step(TableLease(epoch, SessionNumber(session_number)))

    def _kvpool_end_step(self) -> DeviceEvent | None:
        ticket, self._kvpool_ticket = self._kvpool_ticket, None
        return self._kvpool_steps.launched(ticket) if ticket else None

    def sleep(self, level: int = 1) -> None:
        """Unmaps the lent memory, which keeps the prefixes, and frees the weights as vLLM's worker does.

        Raises:
            WrongStateError: A step is in flight.
            StaleTablesError: The memory is lost.
        """
        self._kvpool_unmap()
        super().sleep(level)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Unmaps the lent memory in place of the KV cache; discards the rest as vLLM's worker does."""
        if _KV_CACHE in tags:
            self._kvpool_unmap()
        if others := tuple(tag for tag in tags if tag != _KV_CACHE):
            super().discard(others)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restores what vLLM's worker has freed, and maps the lent memory at the addresses where it was.

        Raises:
            StaleTablesError: The lender has other memory.
            KvpoolError: The lender refuses, does not answer in time, or is gone. The worker can wake up later.
        """
        super().wake_up(tags)
        if self._kvpool_memory and (not tags or _KV_CACHE in tags):
            self._kvpool_memory.map_again()

    def _kvpool_unmap(self) -> None:
        if self._kvpool_copies:
            self._kvpool_copies.wait()
            self._kvpool_steps.finish_completed()
        if self._kvpool_memory:
            self._kvpool_memory.unmap()

    def shutdown(self) -> None:
        """Ends as vLLM's worker does, and disconnects from the lender."""
        super().shutdown()
        if self._kvpool_transfers:
            self._kvpool_transfers.done()
        self._kvpool_lender.close()


class CompletedOutput(AsyncModelRunnerOutput):  # type: ignore[misc]  # vLLM has no types here
    """An output that arrives when the device has completed its step."""

    def __init__(self, output: Any, event: DeviceEvent | None, report: CopyReport | None) -> None:
        self._output = output
        self._event = event
        self._report = report

    def get_output(self) -> Any:
        """Waits for the output and for the step. Another thread than that of the steps may call it."""
        output = self._output.get_output()
        if self._event:
            self._event.synchronize()
        return _with_report(output, self._report)

    def get_kv_connector_output(self) -> Any:
        """The connector's part, which vLLM 0.33 asks for if the output fails."""
        return self._output.get_kv_connector_output()


def _copy_orders(scheduler_output: Any) -> CopyOrders | None:
    """The copies from and to host memory that `kvpool.client.vllm.Scheduler` has put there."""
    orders: CopyOrders | None = getattr(scheduler_output, "kvpool_copies", None)
    return orders


def _with_report(output: Any, report: CopyReport | None) -> Any:
    """A copy of an output, as vLLM has one for all steps without tokens, with a report for the scheduler, if any."""
    if report is None:
        return output
    reporting = copy.copy(output)
    reporting.kvpool_report = report
    return reporting


def _record_event() -> Any:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
