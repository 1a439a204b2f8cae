"""Copies between the two tiers of a pool in an engine: what an output carries, when steps count as executed, and bytes.

The service is in this process and orders what a test says.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from engine.driving import STATES, Driver, Setup, make_scheduler
from engine.host_pools import give_host_memory
from engine.test_block_layouts import MIXES, full, their_config
from kvpool.client import AbortedError, Client, InvalidArgumentError, KvpoolError
from kvpool.client.vllm import Scheduler, Settings, Worker, attach
from kvpool.client.vllm import worker as worker_module
from kvpool.client.vllm.lent_allocation import block_regions
from kvpool.client.vllm.pool_config import UnsupportedError, pool_config
from kvpool.core.errors import WrongStateError
from kvpool.core.steps.columns import LOOKING_UP, Operation, Step, StepResult
from kvpool.lending.fence import StepTicket
from kvpool.lending.host_copies import CopyOrders, CopyReport, HostCopies, Region
from kvpool.lending.steps_in_flight import StepsInFlight
from support.session_transcript import RecordingTransport

SETUP: Final = Setup(num_blocks=64)
HOST: Final = SETUP.num_blocks
"""The first of ten blocks of host memory."""
PROMPT: Final = [i * 7 % 512 for i in range(100)]
EVICT: Final = Operation.EVICT


class Service(RecordingTransport):
    """A service in this process that orders copies.

    Attributes:
        orders: Called with results, returns what the step copies, until that is something.
        error: Raised in place of the next result, and then nothing is applied.
    """

    orders: Callable[[StepResult], list[int]] | None = None
    error: KvpoolError | None = None

    async def apply(self, session_id: str, step: Step) -> StepResult:
        if self.error:
            error, self.error = self.error, None
            raise error
        result = await super().apply(session_id, _in_first_tier(step))
        self.sent[-1] = step
        if self.orders and (copied := self.orders(result)):
            result, self.orders = replace(result, copied_block_ids=copied), None
        return result

    def order(self, *copied: int) -> None:
        """Orders copies with the next result: group, source and target of each."""
        self.orders = lambda _: [*copied]

    def evicted(self) -> list[tuple[list[int], int]]:
        """The blocks that steps since the last call evicted, each with what the step reports as executed."""
        return [(each.block_ids, each.executed_sequence) for each in self.take_sent() if each.block_ids]


def _in_first_tier(step: Step) -> Step:
    """A step without blocks of host memory."""
    if EVICT not in step.operations:
        return step
    kept = [each for each in step.block_ids if each < HOST]
    return replace(step, block_ids=kept, num_block_ids=[len(kept) if count else 0 for count in step.num_block_ids])


class Engine:
    """A scheduler on a pool with host memory, driven without a model."""

    def __init__(self, service: Service, folder: Path, setup: Setup, **settings: Any) -> None:
        given = {"address": "unix:/none", "pool": "m", "reserve_tokens": 0, **settings}
        setup = replace(setup, additional_config={"kvpool": given})
        self.service = service
        self.scheduler = make_scheduler(Scheduler, setup, folder)
        self.driver = Driver(self.scheduler, setup)

    @property
    def calls(self) -> Any:
        return self.scheduler.kv_cache_manager.calls

    def add(self, name: str, max_tokens: int = 20, **values: Any) -> None:
        self.driver.add(name, PROMPT, max_tokens, **values)

    def schedule(self) -> Any:
        """Schedules a step without outputs yet; returns what its workers get."""
        output = self.scheduler.schedule()
        self.driver._outputs.append(output)
        return pickle.loads(pickle.dumps(output))  # noqa: S301 - as vLLM sends it to its workers

    def order_at_once(self, *copied: int) -> int:
        """Sends a message between rounds whose result orders copies; returns its number."""
        self.service.order(*copied)
        self.calls.builder.evict_blocks([])
        self.calls.send()
        sequence: int = self.scheduler.kv_cache_manager.session.sequence
        return sequence


def host_copies(output: Any) -> list[tuple[int, int]] | None:
    orders: CopyOrders | None = getattr(output, "kvpool_copies", None)
    return list(orders.before) if orders else None


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()
    give_host_memory(monkeypatch, 10, service)
    return service


@pytest.fixture(params=[False, True], ids=["", "a_step_ahead"])
def engine(service: Service, tmp_path: Path, request: pytest.FixtureRequest) -> Engine:
    return Engine(service, tmp_path, replace(SETUP, is_async=request.param), memory_id="gpu0")


# What an output carries.


def test_copies_within_the_first_tier_are_vllms_and_the_others_kvpools(engine: Engine) -> None:
    engine.add("a")
    engine.service.order(0, 30, HOST + 1, 0, 31, 32, 0, HOST, 33, 0, HOST + 1, 34)
    output = engine.schedule()
    assert [tuple(each) for each in output.kv_cache_block_copies] == [(31, 32)]
    assert host_copies(output) == [(30, HOST + 1), (HOST, 33), (HOST + 1, 34)]
    output = engine.schedule()
    assert (output.kv_cache_block_copies, host_copies(output)) == (None, None)


def test_the_last_message_of_a_round_orders_copies_of_its_output(engine: Engine) -> None:
    engine.add("a", max_tokens=1)
    engine.add("b")
    engine.schedule()
    engine.driver.abort("a")  # it is freed when the round ends
    engine.calls.settle()
    engine.service.order(0, 30, HOST + 1)
    output = engine.schedule()
    assert host_copies(output) == [(30, HOST + 1)]


def test_a_block_that_a_copy_fills_is_not_zeroed_after_it(service: Service, tmp_path: Path) -> None:
    setup = replace(SETUP, windows=(0, STATES), block_sizes=(16, 16))
    engine = Engine(service, tmp_path, setup, memory_id="gpu0")
    engine.scheduler.needs_kv_cache_zeroing = True
    filled: list[int] = []

    def fill_the_second(result: StepResult) -> list[int]:
        filled.extend(result.block_ids[1:2])
        return [0, HOST, *filled] if filled else []

    engine.add("a")
    service.orders = fill_the_second
    output = engine.schedule()
    assert host_copies(output) == [(HOST, filled[0])]
    zeroed = output.new_block_ids_to_zero
    assert filled[0] in output.scheduled_new_reqs[0].block_ids[0]
    assert zeroed
    assert filled[0] not in zeroed


def test_a_request_that_needs_all_of_its_prompt_computed_is_hit_in_no_tier(engine: Engine) -> None:
    num_hit_tokens = []
    for name, values in (("first", {}), ("hits", {}), ("logprobs", {"sampling": {"prompt_logprobs": 1}})):
        engine.service.take_sent()
        engine.add(name, max_tokens=1, **values)
        (request,) = engine.schedule().scheduled_new_reqs
        num_hit_tokens.append(request.num_computed_tokens)
        sent = {Operation(each) for step in engine.service.take_sent() for each in step.operations}
        assert sent.isdisjoint(LOOKING_UP | {Operation.ADMIT}) == (name == "logprobs")
        _stop(engine)
    assert num_hit_tokens == [0, 96, 0]


# What is reported as executed.


def test_a_step_whose_copies_no_output_carries_is_not_reported_as_executed(engine: Engine) -> None:
    engine.add("a")
    engine.schedule()
    unmade = engine.order_at_once(0, 30, HOST + 1)
    engine.driver.settle()
    engine.service.take_sent()
    engine.add("b")
    output = engine.schedule()
    assert host_copies(output) == [(30, HOST + 1)]
    reported = [step.executed_sequence for step in engine.service.take_sent()]
    assert 0 < max(reported) < unmade
    engine.driver.settle()
    engine.driver.abort("b")
    engine.schedule()
    assert max(step.executed_sequence for step in engine.service.take_sent()) >= unmade


def _stop(engine: Engine) -> None:
    """Ends the request of an engine that is about to be idle."""
    engine.driver.step()
    engine.driver.drain()
    engine.service.take_sent()


def test_an_idle_engine_evicts_what_copies_would_have_filled(engine: Engine) -> None:
    """Also what a copy within the first tier would fill from there. No output carries the others then."""
    engine.add("a")
    _stop(engine)
    engine.service.order(0, 30, HOST + 1, 0, HOST, 33, 0, 33, 34, 0, 35, 36)
    engine.driver.abort("a")
    unmade = engine.scheduler.kv_cache_manager.session.sequence
    ((evicted, executed),) = engine.service.evicted()
    assert evicted == [33, 34, HOST + 1]
    assert executed < unmade
    engine.add("b", max_tokens=2)
    output = engine.schedule()
    assert host_copies(output) is None
    assert [tuple(each) for each in output.kv_cache_block_copies] == [(33, 34), (35, 36)]
    engine.driver.finish()
    engine.driver.drain()
    assert max(step.executed_sequence for step in engine.service.take_sent()) >= unmade


def test_an_eviction_that_the_service_refuses_goes_before_its_copies_count_as_executed(engine: Engine) -> None:
    engine.add("a")
    _stop(engine)
    engine.driver.abort("a")
    unmade = engine.order_at_once(0, 30, HOST + 1)
    engine.service.error = InvalidArgumentError("block_ids", "refused")
    with pytest.raises(InvalidArgumentError, match="refused"):
        engine.calls.give_up_host_copies()
    engine.calls.mark_executed(unmade, is_newest=True)
    assert not engine.service.evicted()
    engine.calls.deliver_all()
    ((evicted, executed),) = engine.service.evicted()
    assert evicted == [HOST + 1]
    assert executed == unmade - 1
    engine.calls.mark_executed(unmade, is_newest=True)
    engine.calls.deliver_all()
    assert engine.service.take_sent()[-1].executed_sequence >= unmade


def test_requests_that_wait_for_the_end_of_a_pause_keep_their_copies(engine: Engine) -> None:
    engine.add("a")
    _stop(engine)
    engine.order_at_once(0, HOST, 33)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.scheduler._flush_if_idle()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert host_copies(engine.schedule()) == [(HOST, 33)]


def test_copies_of_a_session_that_is_lost_are_not_made(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(service, tmp_path, SETUP)
    engine.add("a")
    _stop(engine)
    engine.order_at_once(0, 30, HOST + 1)
    engine.add("b")
    first, service.error = engine.calls, AbortedError("EVICTED", "an operator ended the session")
    monkeypatch.setattr(attach, "connect", lambda *_, **__: Client(Service()))
    outputs = [engine.schedule(), engine.schedule()]
    assert engine.calls is not first
    assert outputs[1].total_num_scheduled_tokens
    assert [host_copies(output) for output in outputs] == [None, None]
    assert not engine.service.evicted()


def test_the_pools_host_memory_is_no_difference_between_engine_and_workers(tmp_path: Path) -> None:
    scheduler = make_scheduler(Scheduler.__base__, SETUP, tmp_path)
    own = pool_config(scheduler, "p")
    attach._check_same(own, replace(own, num_host_blocks=7))
    with pytest.raises(ValueError, match="max_model_len"):
        attach._check_same(own, replace(own, num_host_blocks=7, max_model_len=99))


# The worker.


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a worker does."""
    log: list[Any] = []

    def execute_model(_: object, output: Any) -> str:
        log.append(output.num)
        return "output"

    monkeypatch.setattr(Worker.__base__, "execute_model", execute_model)
    for name in ("pp", "pcp", "tp"):
        group = SimpleNamespace(is_last_rank=True, barrier=partial(log.append, f"barrier {name}"))
        monkeypatch.setattr(worker_module, f"get_{name}_group", lambda group=group: group)
    return log


def _worker(log: list[Any], world_size: int = 1) -> Any:
    worker: Any = object.__new__(Worker)
    worker._kvpool_settings = Settings.of({"kvpool": {"address": "a:1", "pool": "p", "memory": "unix:/m"}})
    worker._kvpool_ticket = worker._kvpool_transfers = None
    worker._kvpool_is_warming_up, worker._kvpool_steps = False, StepsInFlight(None)

    def step(_: object) -> StepTicket:
        log.append("ticket")
        return StepTicket(lambda: log.append("done"))

    worker._kvpool_memory = SimpleNamespace(step=step)

    def begin(copies: list[tuple[int, int]]) -> Any:
        log.append(("begin", copies))
        return SimpleNamespace(query=lambda: worker._kvpool_copies.report.num_made > 0)

    worker._kvpool_copies = SimpleNamespace(
        make=log.append,
        wait=lambda: log.append("wait"),
        begin=begin,
        join=lambda count: log.extend([f"join {count}"] if count else []),
        report=CopyReport(),
    )
    worker._kvpool_report = CopyReport()
    worker.parallel_config = SimpleNamespace(world_size=world_size)
    worker.vllm_config = SimpleNamespace(kv_transfer_config=None)
    return worker


def _output(num_tokens: int, **fields: Any) -> Any:
    return SimpleNamespace(
        num=f"{num_tokens} tokens",
        total_num_scheduled_tokens=num_tokens,
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
        kv_connector_metadata=None,
        kvpool_lease=("p", 1, 1),
        **fields,
    )


def test_copies_are_made_before_the_step_with_its_ticket(log: list[Any]) -> None:
    worker, copies = _worker(log, world_size=2), [(1, HOST)]
    assert worker.execute_model(_output(3, kvpool_copies=CopyOrders(copies))) == "output"
    assert log == ["ticket", copies, "3 tokens", "done"]


def test_copies_have_been_made_before_a_connector_can_load_into_their_sources(log: list[Any]) -> None:
    worker, copies = _worker(log), [(1, HOST)]
    worker.vllm_config.kv_transfer_config = object()
    worker.execute_model(_output(3, kvpool_copies=CopyOrders(copies)))
    assert log == ["ticket", copies, "wait", "3 tokens", "done"]


def test_copies_in_the_background_have_a_ticket_of_their_own(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    worker, copies, beside = _worker(log), [(1, HOST)], [(HOST, 2)]
    monkeypatch.setattr(Worker.__base__, "execute_model", lambda *_: SimpleNamespace())
    output = worker.execute_model(_output(3, kvpool_copies=CopyOrders(copies, beside, 1)))
    assert log == ["ticket", "join 1", copies, "ticket", ("begin", beside), "join 1", "done"]
    assert not hasattr(output, "kvpool_report")
    log.clear()
    worker._kvpool_copies.report = report = CopyReport(num_made=1)
    output = worker.execute_model(_output(3))
    assert log == ["done", "ticket", "done"]
    assert output.kvpool_report == report
    assert not hasattr(worker.execute_model(_output(3)), "kvpool_report")


def test_an_engine_sleeps_when_its_copies_have_been_made(log: list[Any]) -> None:
    worker = _worker(log)
    worker._kvpool_memory = SimpleNamespace(unmap=lambda: log.append("unmap"))
    worker._kvpool_unmap()
    assert log == ["wait", "unmap"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_copies_without_tokens_are_made_by_all_ranks_before_one_answers(world_size: int, log: list[Any]) -> None:
    worker, copies = _worker(log, world_size), [(1, HOST)]
    waits = ["wait", "barrier pp", "barrier pcp", "barrier tp"]
    assert worker.execute_model(_output(0, kvpool_copies=CopyOrders(copies))) == "output"
    assert log == ["ticket", copies, *(waits if world_size > 1 else ()), "0 tokens", "done"]
    log.clear()
    worker.execute_model(_output(0))
    assert log == ["0 tokens"]


def test_no_copy_is_made_while_the_engine_sleeps(log: list[Any]) -> None:
    worker = _worker(log)

    def refuse(_: object) -> None:
        raise WrongStateError("UNMAPPED", "the engine sleeps")

    worker._kvpool_memory.step = refuse
    with pytest.raises(WrongStateError, match="sleeps"):
        worker.execute_model(_output(0, kvpool_copies=CopyOrders([(1, HOST)])))
    assert not log


def test_copies_that_fail_end_the_step(log: list[Any]) -> None:
    worker = _worker(log)
    worker._kvpool_copies = None
    with pytest.raises(ValueError, match="the lender of this worker has none"):
        worker.execute_model(_output(3, kvpool_copies=CopyOrders([(1, HOST)])))
    assert log == ["ticket", "done"]


def _initialize(host: torch.Tensor | None, kv_cache_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Initializes a worker; returns what makes its copies."""
    monkeypatch.setattr(worker_module, "declared_memory", lambda *_: None)
    monkeypatch.setattr(worker_module, "check_views", lambda *_: None)
    monkeypatch.setattr(Worker.__base__, "initialize_from_config", lambda *_: None)
    size_bytes = kv_cache_config.kv_cache_tensors[0].size
    memory = SimpleNamespace(buffer=torch.zeros(size_bytes, dtype=torch.int8), host=host)
    worker = _worker([])
    worker._kvpool_lender = SimpleNamespace(address="unix:/m", map=lambda *_, **__: memory)
    worker._kvpool_copies, worker.vllm_config, worker.model_runner = None, None, SimpleNamespace(kv_caches=[])
    worker.initialize_from_config(kv_cache_config)
    return worker._kvpool_copies


def _with_gap() -> Any:
    config = their_config({f"f{i}": full() for i in range(2)}, "LBNHC")
    config.kv_cache_layout = "LBNHC"
    (tensor,) = config.kv_cache_tensors
    tensor.layer_stride += tensor.block_stride
    return config


def test_a_layout_without_whole_blocks_is_refused_with_host_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _with_gap()
    assert _initialize(None, config, monkeypatch) is None
    with pytest.raises(UnsupportedError, match="the KV cache layout LBNHC with host memory"):
        _initialize(torch.zeros(4, 64, dtype=torch.int8), config, monkeypatch)


# Bytes.

LAYOUTS: Final = [
    *((mix, layout) for mix in MIXES for layout in ("BLNHC", "BLHNC")),
    *((mix, layout) for mix in ("one size", "latent and indexer") for layout in ("LBNHC", "LBHNC")),
    ("one size", "LHBNC"),
    ("states", "LBNHC"),
]


@pytest.mark.parametrize(("mix", "layout"), LAYOUTS)
def test_every_layer_finds_a_block_after_copies_to_host_memory_and_back(mix: str, layout: str) -> None:
    config = their_config(MIXES[mix], layout)
    views = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout])
    storage = next(iter(views.values())).untyped_storage()
    buffer = torch.empty(0, dtype=torch.int8).set_(storage, 0, (storage.nbytes(),), (1,))
    buffer.random_(-128, 128)
    num_blocks, slot_bytes = config.num_blocks, buffer.numel() // config.num_blocks
    regions = block_regions(config)
    assert sum(block_bytes for _, block_bytes in regions) == slot_bytes
    host = torch.zeros(3, slot_bytes, dtype=torch.int8)
    copies = HostCopies(buffer, regions, host, num_blocks)
    before, expected = buffer.clone(), {name: _bytes(view, num_blocks) for name, view in views.items()}
    copies.make([(1, num_blocks + 2), (num_blocks - 1, num_blocks)])
    assert torch.equal(buffer, before)
    copies.make([(num_blocks + 2, 2), (num_blocks, 1), (num_blocks + 1, num_blocks - 1)])
    for name, view in views.items():
        found, own = _bytes(view, num_blocks), expected[name]
        own[2], own[1] = own[1].clone(), own[num_blocks - 1].clone()
        own[num_blocks - 1] = 0
        assert torch.equal(found, own), name
    assert int((buffer != before).sum()) <= 3 * slot_bytes


def _bytes(view: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A copy of the bytes of each block in a layer's view, uint8 (num_blocks, num_bytes)."""
    return view.contiguous().view(torch.uint8).reshape(num_blocks, -1).clone()


def test_regions_of_a_group_are_those_of_the_others() -> None:
    config = their_config(MIXES["one size"], "LBNHC")
    page_bytes = config.kv_cache_tensors[0].block_stride
    assert len(config.kv_cache_tensors) == 3
    assert block_regions(config) == [Region(i * page_bytes * config.num_blocks, page_bytes) for i in range(3)]
