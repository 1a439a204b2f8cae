"""Engines on lent memory, with a lender of the tests: tokens, the memory itself, and what is refused at the start."""

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector import utils as kv_connector_utils
from vllm.v1.core.sched.scheduler import Scheduler as Plain
from vllm.v1.outputs import AsyncModelRunnerOutput

from engine.driving import Setup, make_scheduler
from engine.features import set_attribute
from engine.lending import PoolLender, attached_to, lenders
from engine.models import GEMMA, LFM2, LLAMA
from engine.pairs import POOLED_SCHEDULER, Engine, Pair, run_engine, run_pair
from engine.results import Results
from kvpool.client import connect
from kvpool.client.vllm import Scheduler, Settings, Worker
from kvpool.client.vllm.lendable import check_lendable, declared_memory
from kvpool.client.vllm.lent_allocation import LentAllocation, check_views
from kvpool.client.vllm.pool_config import UnsupportedError, pool_config
from kvpool.client.vllm.versions import VERSION
from kvpool.core.errors import UnavailableError, WrongStateError
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.lending.fence import StepTicket
from kvpool.lending.host_copies import CopyReport
from kvpool.lending.lender_client import connect_lender
from kvpool.lending.steps_in_flight import StepsInFlight
from support.lending import DECLARED

WORKER = "kvpool.client.vllm.Worker"
ENGINES = {
    "llama": Engine(LLAMA, 256, ("shared prefixes", "aborts"), {"max_num_seqs": 64}),
    "gemma": Engine(GEMMA, 700, ("shared prefixes",), {"max_num_seqs": 64}),
    "lfm2": Engine(
        LFM2, 150, ("crowded aborts", "shared prefixes"), {"max_num_seqs": 32, "max_num_batched_tokens": 256}
    ),
    **{
        parallel: Engine(LLAMA, 256, ("shared prefixes",), {"max_num_seqs": 64, f"{parallel}_parallel_size": 2})
        for parallel in ("tensor", "pipeline")
    },
}


@pytest.fixture
def lender(folder: Path, address: str, request: pytest.FixtureRequest) -> Iterator[PoolLender]:
    own = folder / str(abs(hash(request.node.name)))
    own.mkdir()
    started = PoolLender(own, address)
    yield started
    started.stop()


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma", marks=pytest.mark.complete), "lfm2"])
def lent(request: pytest.FixtureRequest, folder: Path, address: str) -> Iterator[tuple[PoolLender, Pair]]:
    """A lender, and what an engine on its memory answered beside vLLM alone."""
    own = folder / request.param
    own.mkdir()
    lender = PoolLender(own, address)
    yield lender, run_pair(ENGINES[request.param], lender.settings(f"lent-{request.param}"), own / "pair")
    lender.stop()


def test_every_token_is_that_of_vllm_alone(lent: tuple[PoolLender, Pair]) -> None:
    _, pair = lent
    assert pair.pooled["scheduler"] == POOLED_SCHEDULER
    for workload, plain in pair.plain["outcomes"].items():
        pooled = pair.pooled["outcomes"][workload]
        assert pooled["requests"] == plain["requests"]
        assert pooled["counters"] == plain["counters"]
        assert (pooled["tables"], pooled["resets"]) == (plain["tables"], plain["resets"])
        assert bool(plain["counters"]["prefix_cache_hits"]) == bool(plain["counters"]["prefix_cache_queries"])


def test_the_engine_computes_in_the_lent_memory(lent: tuple[PoolLender, Pair]) -> None:
    lender, _ = lent
    size = lender.declared.size_bytes
    blocks = torch.frombuffer(bytearray(lender.memory.read_bytes()), dtype=torch.int8)
    assert blocks.numel() == size
    assert blocks.count_nonzero() > size // 10


def test_worker_and_scheduler_introduce_themselves_and_the_session(lent: tuple[PoolLender, Pair]) -> None:
    lender, _ = lent
    names = {hello.lending.client_name.split()[-1] for hello in lender.wait_for("hello", 2)}
    assert names == {"start", "0", "scheduler"}
    assert lender.count("map") == 1
    binds = lender.wait_for("bind", 2)
    assert len(binds) == 2
    assert binds[0] == binds[1]


def test_the_memory_is_described(lent: tuple[PoolLender, Pair]) -> None:
    lender, pair = lent
    config = lender.config
    assert config.num_blocks == pair.plain["num_blocks"]
    assert [group.spec.block_size for group in config.groups] == [size for _, size in pair.plain["groups"]]
    assert lender.declared.size_bytes % config.num_blocks == 0
    fingerprint = dict(lender.declared.fingerprint)
    assert all(name.isidentifier() and name == name.lower() for name in fingerprint)
    expected = {"dtype": "float32", "tensor_parallel_size": "1", "vllm_version": VERSION}
    assert expected.items() <= fingerprint.items()
    assert "weights_version" not in fingerprint, "it may change while the memory stays"
    assert fingerprint["rank_attention_backend"].startswith("vllm.")


@pytest.fixture(scope="module")
def lent_twice(folder: Path, address: str) -> tuple[Results, Results]:
    """What two engines answered that ran one after the other on the memory of a real `kvpool worker`."""
    own = folder / "real"
    own.mkdir()
    memory = f"unix:{own}/m"
    with lenders(address, "twice", memory):
        attached = attached_to(address, "twice", memory)
        first = run_engine(ENGINES["llama"], attached, own / "first")
        return first, run_engine(ENGINES["llama"], attached, own / "second")


def test_an_engine_finds_what_an_earlier_engine_computed(lent_twice: tuple[Results, Results]) -> None:
    first, second = (results["outcomes"]["shared prefixes"] for results in lent_twice)
    tokens = [[[each["token_ids"] for each in answers] for answers in run["requests"]] for run in (first, second)]
    assert tokens[0] == tokens[1]
    cached = [[answers[0]["num_cached_tokens"] for answers in run["requests"]] for run in (first, second)]
    assert cached[0][0] == 0
    assert cached[1][0]
    assert first["counters"]["prefix_cache_hits"] < second["counters"]["prefix_cache_hits"]


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def lent_in_parallel(request: pytest.FixtureRequest, folder: Path, address: str) -> Iterator[tuple[str, Pair]]:
    """The pool of an engine of two workers, on the memory of two `kvpool worker`; its answers beside vLLM alone."""
    pool = f"{request.param}-parallel"
    own = folder / request.param
    own.mkdir()
    memory = f"unix:{own}/m{{rank}}"
    with lenders(address, pool, memory, world_size=2):
        yield pool, run_pair(ENGINES[request.param], attached_to(address, pool, memory), own / "pair")


def test_two_workers_compute_in_the_memory_of_two_ranks(lent_in_parallel: tuple[str, Pair], address: str) -> None:
    pool, pair = lent_in_parallel
    plain, pooled = pair.outcomes("shared prefixes")
    assert pooled["requests"] == plain["requests"]
    assert pooled["counters"] == plain["counters"]
    assert plain["counters"]["prefix_cache_hits"]
    with connect(address) as client:
        assert len(client.get_pool(pool).ranks) == 2


# The allocation.


def test_the_allocation_is_answered_with_the_buffer() -> None:
    buffer = torch.ones(64, dtype=torch.int8)
    with LentAllocation(buffer):
        others = [torch.zeros(64), torch.zeros(63, dtype=torch.int8), torch.zeros(2, 32, dtype=torch.int8)]
        made = torch.zeros(64, dtype=torch.int8, device=torch.device("cpu"))
    assert made.data_ptr() == buffer.data_ptr()
    assert buffer.sum() == 64
    assert not any(other.any() for other in others)
    assert torch.zeros(64, dtype=torch.int8).data_ptr() != buffer.data_ptr()
    check_views(buffer, [buffer[8:16], [buffer.view(torch.float32)[3:]]])
    for outside in ([torch.zeros(1)], []):
        with pytest.raises(UnsupportedError, match="KV cache allocation of vLLM"):
            check_views(buffer, outside)


@pytest.mark.parametrize("uses", [0, 2])
def test_another_allocation_is_refused(uses: int) -> None:
    allocation = LentAllocation(torch.ones(64, dtype=torch.int8))
    for _ in range(uses):
        allocation.__torch_function__(torch.zeros, (), (64,), {"dtype": torch.int8})
    with pytest.raises(UnsupportedError, match=f"used {uses} times, not once"), allocation:
        pass


# Refusals at the start.

REFUSED: dict[str, tuple[dict[str, Any], str, Any, str]] = {
    "elastic experts": ({}, "parallel_config.enable_elastic_ep", True, "elastic expert parallelism in lent memory"),
    "ReplaySSM": ({}, "cache_config.use_replayssm", True, "ReplaySSM in lent memory"),
    "sleep with a connector": (
        {"load_failures": "fail"},
        "model_config.enable_sleep_mode",  # which vLLM refuses on CPU
        True,
        "sleep mode with a KV connector in lent memory",
    ),
}


def _vllm_config(tmp_path: Path, **setup: Any) -> Any:
    scheduler = make_scheduler(Plain, Setup(**setup), tmp_path)
    config = scheduler.vllm_config
    scheduler.shutdown()
    return config


@pytest.mark.parametrize("case", REFUSED)
def test_features_that_need_memory_of_ones_own_are_refused(case: str, tmp_path: Path) -> None:
    setup, path, value, message = REFUSED[case]
    config = _vllm_config(tmp_path, additional_config=_kvpool("unix:/none"), **setup)
    check_lendable(config)
    assert set_attribute(config, path, value)
    with pytest.raises(UnsupportedError, match=message):
        Worker(config, 0, 0, "", is_driver_worker=True)


def test_sleep_mode_and_the_cumem_allocator_are_not_refused(tmp_path: Path) -> None:
    config = _vllm_config(tmp_path, additional_config=_kvpool("unix:/none"))
    for name in ("enable_sleep_mode", "enable_cumem_allocator"):
        object.__setattr__(config.model_config, name, True)  # which vLLM refuses on CPU
    check_lendable(config)


def test_drafts_are_refused_with_stages_of_a_pipeline_only(tmp_path: Path) -> None:
    settings = _kvpool("unix:/none")
    check_lendable(_vllm_config(tmp_path, additional_config=settings, num_stages=2))
    check_lendable(_vllm_config(tmp_path, additional_config=settings, num_drafts=2))
    both = _vllm_config(tmp_path, additional_config=settings, num_stages=2, num_drafts=2)
    with pytest.raises(UnsupportedError, match="drafts with pipeline parallelism in lent memory"):
        Worker(both, 0, 0, "", is_driver_worker=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("cache_config.kv_cache_dtype_skip_layers", ["1"]),
        ("model_config.multimodal_config.media_io_kwargs", {"image": {"image_mode": "RGBA"}}),
        ("model_config.multimodal_config.mm_processor_kwargs", {"max_pixels": 100}),
        ("model_config.multimodal_config.video_pruning_rate", 0.5),
        ("model_config.quantization_config", {"moe": "mxfp4"}),
        ("parallel_config.cp_kv_cache_interleave_size", 2),
    ],
)
def test_options_that_contents_depend_on_are_declared(
    path: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler(Plain, Setup(), tmp_path)
    config, kv_cache_config = scheduler.vllm_config, scheduler.kv_cache_config
    config.model_config.multimodal_config = MultiModalConfig()
    tensor = SimpleNamespace(size=640, layers=(), offset=0, layer_stride=0, block_stride=0)
    kv_cache_config.kv_cache_tensors = [tensor]
    monkeypatch.setattr(kv_connector_utils, "get_current_attn_backends", lambda _: [])
    before = declared_memory(config, kv_cache_config, "p")
    assert declared_memory(config, kv_cache_config, "p") == before
    set_attribute(config, path, value)
    after = declared_memory(config, kv_cache_config, "p")
    assert after.config == before.config
    assert len(set(after.fingerprint) - set(before.fingerprint)) == 1


def test_a_worker_needs_a_lender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_MEMORY", raising=False)
    settings = {"kvpool": {"address": "a:1", "pool": "p", "deadline_seconds": 0.1}}
    with pytest.raises(ValueError, match=r"needs additional_config\['kvpool'\]\['memory'\], or KVPOOL_MEMORY"):
        Worker(_vllm_config(tmp_path, additional_config=settings), 0, 0, "")
    monkeypatch.setenv("KVPOOL_MEMORY", f"unix:{tmp_path}/{{rank}}")
    with pytest.raises(UnavailableError, match=r"/3: no such socket"):
        Worker(_vllm_config(tmp_path, additional_config=settings), 0, 3, "")


def _kvpool(memory: str, address: str = "a:1", pool: str = "p") -> dict[str, Any]:
    return {"kvpool": {"address": address, "pool": pool, "memory": memory}}


def test_memory_that_differs_is_refused_with_the_reason_and_what_to_do(
    lender: PoolLender, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = object.__new__(Worker)
    worker._kvpool_settings = Settings.of(_kvpool(lender.address))
    worker._kvpool_lender, worker._kvpool_memory = connect_lender(lender.address, "p"), None
    worker._kvpool_steps, worker.vllm_config, worker.model_runner = StepsInFlight(None), None, SimpleNamespace()
    monkeypatch.setattr("kvpool.client.vllm.worker.declared_memory", lambda *_: DECLARED)
    field = 'declared.fingerprint["model"]'
    lender.answers["map"] = WrongStateError("MEMORY_DIFFERS", "'a', the memory has 'b'", field=field)
    message = rf"^kvpool memory {lender.address}: MEMORY_DIFFERS: {re.escape(field)}: .* has 'b'\. Start the"
    with pytest.raises(WrongStateError, match=message):
        worker.initialize_from_config(None)
    assert worker._kvpool_memory is None
    worker._kvpool_lender.close()


def test_memory_excludes_a_memory_id() -> None:
    given = {**_kvpool("unix:/m")["kvpool"], "memory_id": "m"}
    with pytest.raises(ValueError, match=r"\['memory_id'\] must not be set with memory"):
        Settings.of({"kvpool": given})


def test_the_lenders_token_comes_from_a_file(
    lender: PoolLender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender.answers["hello"] = WrongStateError("STOP", "enough")
    file = tmp_path / "token"
    monkeypatch.setenv("KVPOOL_MEMORY_TOKEN_FILE", str(file))
    config = _vllm_config(tmp_path, additional_config=_kvpool(lender.address))
    with pytest.raises(ValueError, match=r"KVPOOL_MEMORY_TOKEN_FILE: .*No such file"):
        Worker(config, 0, 0, "")
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"KVPOOL_MEMORY_TOKEN_FILE: .* is empty"):
        Worker(config, 0, 0, "")
    given = "s3"
    file.write_text(f"{given}\n")
    with pytest.raises(WrongStateError, match="enough"):
        Worker(config, 0, 0, "")
    (hello,) = lender.wait_for("hello")
    assert hello.token == given


# The scheduler.


def _map(lender: PoolLender, tmp_path: Path, pool: str) -> Any:
    """Forms the pool, as the workers do; returns their connection."""
    scheduler = make_scheduler(Plain, Setup(), tmp_path)
    config = pool_config(scheduler, pool)
    scheduler.shutdown()
    worker = connect_lender(lender.address, pool)
    worker.map(DeclaredMemory(config, 64 * config.num_blocks), 10.0)
    return worker


def test_the_scheduler_puts_its_lease_into_steps(lender: PoolLender, address: str, tmp_path: Path) -> None:
    worker = _map(lender, tmp_path, "lease")
    setup = Setup(additional_config=_kvpool(lender.address, address, "lease"), worker_cls=WORKER)
    scheduler = make_scheduler(Scheduler, setup, tmp_path)
    output = pickle.loads(pickle.dumps(scheduler.schedule()))  # noqa: S301 - as vLLM sends it to its workers
    (bind,) = lender.wait_for("bind")
    assert output.kvpool_lease == ("lease", bind.epoch, bind.session_number)
    scheduler.shutdown()
    worker.close()


def test_a_scheduler_that_differs_from_its_workers_is_refused(lender: PoolLender, address: str, tmp_path: Path) -> None:
    lender.changes = {"max_model_len": 99}
    worker = _map(lender, tmp_path, "differs")
    setup = Setup(additional_config=_kvpool(lender.address, address, "differs"), worker_cls=WORKER)
    with pytest.raises(ValueError, match="engine and scheduler differ in max_model_len of pool differs"):
        make_scheduler(Scheduler, setup, tmp_path)
    worker.close()


def test_workers_with_memory_of_their_own_are_refused(lender: PoolLender, address: str, tmp_path: Path) -> None:
    setup = Setup(additional_config=_kvpool(lender.address, address, "own"))
    with pytest.raises(UnsupportedError, match=r"the worker vllm\..* in lent memory .* set worker_cls to kvpool"):
        make_scheduler(Scheduler, setup, tmp_path)
    assert not lender.requests


@pytest.mark.parametrize(
    ("lease", "message"),
    [(("other", 1, 1), "the scheduler uses pool other, the worker p"), (None, "set scheduler_cls to kvpool")],
    ids=["another pool", "another scheduler"],
)
def test_steps_of_another_pool_or_scheduler_are_refused(lease: Any, message: str) -> None:
    worker = object.__new__(Worker)
    worker._kvpool_settings = Settings.of(_kvpool("unix:/m"))
    mapped: Any = SimpleNamespace()
    worker._kvpool_memory, worker._kvpool_is_warming_up, worker._kvpool_ticket = mapped, False, None
    worker._kvpool_steps = StepsInFlight(None)
    output = SimpleNamespace(total_num_scheduled_tokens=1, kvpool_lease=lease)
    with pytest.raises(ValueError, match=message):
        worker.execute_model(output)


@pytest.mark.parametrize("is_last", [True, False], ids=["last stage", "earlier stage"])
@pytest.mark.parametrize("is_async", [True, False], ids=["a step ahead", "one step"])
def test_an_output_arrives_when_the_device_has_completed_its_step(
    *, is_async: bool, is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts and copies of states write to blocks after the output has been copied."""
    log: list[str] = []

    class Copied(AsyncModelRunnerOutput):  # type: ignore[misc]
        def get_output(self) -> str:
            log.append("copied")
            return "tokens"

        def get_kv_connector_output(self) -> str:
            return "transfers"

    output = Copied() if is_async else "tokens"
    monkeypatch.setattr(Worker.__base__, "sample_tokens", lambda *_: output)
    monkeypatch.setattr("kvpool.client.vllm.worker.get_pp_group", lambda: SimpleNamespace(is_last_rank=is_last))
    event: Any = SimpleNamespace(synchronize=lambda: log.append("completed"), query=bool)
    worker = object.__new__(Worker)
    worker._kvpool_ticket, worker._kvpool_steps = StepTicket(lambda: None), StepsInFlight(lambda: event)
    worker._kvpool_copies, worker._kvpool_report = None, CopyReport()
    returned = worker.sample_tokens(None)
    assert log == ([] if is_async or not is_last else ["completed"])
    assert (returned.get_output() if is_async else returned) == "tokens"
    assert not is_async or returned.get_kv_connector_output() == "transfers"
    assert log == ["copied"] * is_async + ["completed"] * is_last
