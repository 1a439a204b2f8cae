"""Every step that vLLM's scheduler makes on the service is the step that it makes by itself, block for block.

Of vLLM's own tests of its scheduler these behaviours are covered so: adding and finishing requests; aborts of waiting
and running ones; first come first served and priorities; preemption, resumption and its order; chunked prefill with
token budgets and thresholds; prefix caching within and across steps; salts; resets of the prefix cache, with running
requests too; admission of whole sequences; watermarks; scheduling a step ahead; sliding windows; caching turned off;
drafts that are taken or thrown away; images, with encoder budgets that suffice or not; KV connectors whose loads are
waited for or not, fail, and are freed late.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as PlainAsync
from vllm.v1.core.sched.scheduler import Scheduler as Plain

from engine.connector import ENDS, ScriptedConnector
from engine.driving import Driver, Setup, images, make_scheduler
from engine.schedules import KINDS, run, setup_of
from engine.test_sharing import Engine
from kvpool.client import Session, connect
from kvpool.client.vllm import AsyncScheduler, Scheduler
from kvpool.client.vllm.manager import KVCacheManager
from kvpool.client.vllm.schedule_predictor import SchedulePredictor
from kvpool.client.vllm.versions import IS_0_33_OR_NEWER


def _names(values: dict[str, Any]) -> str:
    return ".".join(values) or "no_drafts"


SEEDS = range(12)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_vllm(kind: str, address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if "hashes_ahead" in KINDS[kind] and not IS_0_33_OR_NEWER:
        pytest.skip("hashes cover their block alone in this version")
    preemptions = cached = 0
    ends: Counter[str] = Counter()
    for seed in SEEDS:
        setup = setup_of(KINDS[kind], seed)
        plain = run(PlainAsync if setup.is_async else Plain, setup, seed, tmp_path)
        pool = f"{kind}.{seed}"
        attached = replace(setup, additional_config={"kvpool": {"address": address, "pool": pool}})
        served = run(Scheduler, attached, seed, tmp_path)
        for i, (mine, theirs) in enumerate(zip(served.steps, plain.steps, strict=False)):
            assert mine == theirs, f"seed {seed}, step {i}"
        assert served == plain, f"seed {seed}"
        with connect(address) as client:
            info = client.get_pool(pool)
        counted = info.prefix_cache
        assert plain.lookups == {
            "requests": counted.requests,
            "queries": counted.queries_tokens,
            "hits": counted.hits_tokens,
            "preempted_requests": counted.preempted_requests,
            "preempted_queries": counted.preempted_queries_tokens,
            "preempted_hits": counted.preempted_hits_tokens,
        }
        assert (info.sessions, info.free_blocks) == (0, setup.num_blocks - 1)
        preemptions += plain.num_preemptions
        cached += sum(plain.cached.values())
        ends.update(kind for kind, *_ in plain.calls or ())
    logged = {record.msg for record in caplog.records if record.name.startswith("kvpool")}
    slow_machine = "no answer yet, trying again"
    assert logged <= {"too few blocks for max_model_len", slow_machine}  # no wrong predictions
    assert preemptions > 20
    assert cached > 5000 or not setup.enable_caching
    assert not setup.load_failures or min(ends[end] for end in ENDS) > 10, ends


def test_connectors_that_complete_hits_per_group_are_supported(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NixlConnector, for which the scheduler calls another method."""
    monkeypatch.setattr(ScriptedConnector, "supports_divergent_local_hybrid_hits", True)
    setup = setup_of(KINDS["connector"], 1)
    attached = replace(setup, additional_config={"kvpool": {"address": address, "pool": "completes"}})
    served, plain = run(Scheduler, attached, 1, tmp_path), run(Plain, setup, 1, tmp_path)
    assert served == plain
    assert sum(plain.cached.values()) > 100


def test_a_wrong_prediction_costs_messages_and_nothing_else(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of each chunk is foreseen, a token too much of each decode, and of admissions seven tokens."""
    foresee = SchedulePredictor.running

    def foresee_wrongly(self: SchedulePredictor, *args: Any) -> tuple[list[tuple[Any, int]], bool]:
        asking, is_all = foresee(self, *args)
        return [(request, 2 if num_tokens == 1 else num_tokens // 2) for request, num_tokens in asking], is_all

    setup = replace(setup_of(KINDS["first_come"], 1), num_blocks=80, max_num_batched_tokens=64)
    plain = Driver(make_scheduler(Plain, setup, tmp_path), setup)
    monkeypatch.setattr(SchedulePredictor, "running", foresee_wrongly)
    monkeypatch.setattr(SchedulePredictor, "long_prefill_tokens", lambda _: 7)
    served = Engine(address, "wrong", tmp_path, setup).driver
    for driver in (plain, served):
        for i in range(12):
            driver.add(f"r{i}", [(i // 2 + j) % 512 for j in range(90 + i)], 30)
        while not driver.is_idle:
            driver.step()
            if driver is served:
                requests = served.scheduler.kv_cache_manager.batcher.requests
                for request in served.scheduler.running:
                    room = len(requests[request.request_id].block_ids[0]) * setup.block_size
                    assert room >= request.num_computed_tokens
    assert served.generated == plain.generated
    served.scheduler.shutdown()
    with connect(address) as client:
        assert client.get_pool("wrong").free_blocks == setup.num_blocks - 1


@pytest.mark.parametrize("drafts", [{}, {"num_drafts": 3}, {"num_drafts": 3, "uses_eagle": True}], ids=_names)
def test_a_round_of_running_requests_is_a_message_at_most(drafts: dict[str, Any], address: str, tmp_path: Path) -> None:
    """Since 0.33 vLLM caches blocks that drafts fill after each round, which goes ahead of the round's message."""
    max_messages = 2 if drafts and "_update_request_with_output" not in vars(PlainAsync) else 1
    setup = Setup(num_blocks=400, **drafts)
    driver = Engine(address, _names(drafts), tmp_path, setup).driver
    for i in range(setup.max_num_seqs):
        driver.add(f"r{i}", [i] * (10 + i), 200)
    driver.step()
    session = driver.scheduler.kv_cache_manager.session
    assert len(driver.scheduler.running) == setup.max_num_seqs
    assert driver.scheduler.num_lookahead_tokens == (3 if setup.uses_eagle else 0)
    for _ in range(40):
        before = session.sequence
        driver.step()
        assert session.sequence <= before + max_messages
    assert not driver.is_idle


@pytest.mark.parametrize("enable_caching", [True, False])
def test_a_round_with_images_is_a_message_at_most(address: str, tmp_path: Path, *, enable_caching: bool) -> None:
    """Requests are admitted, computed in pieces that end within images, and decode past them, up to 16 together."""
    setup = Setup(num_blocks=800, encoder_budget=2000, enable_caching=enable_caching)
    driver = Engine(address, f"images.{enable_caching}", tmp_path, setup).driver
    session = driver.scheduler.kv_cache_manager.session
    num_encoded = []
    for i in range(60):
        if i % 4 == 0 and len(driver.scheduler.running) < setup.max_num_seqs:
            prompt = [i] * (200 + i)
            driver.add(f"r{i}", prompt, 30, mm_features=images(prompt, f"r{i}."))
        before = session.sequence
        step = driver.step()
        num_encoded.append(sum(map(len, step["encoded"].values())))
        assert session.sequence <= before + 1
    assert sum(map(bool, num_encoded)) > 10


def test_the_scheduler_continues_while_the_service_answers(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for kind, name in ((KVCacheManager, "allocate_slots"), (Session, "begin"), (Session, "settle")):
        function = getattr(kind, name)

        def noted(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            calls.append(_name)
            return _function(*args, **kwargs)

        monkeypatch.setattr(kind, name, noted)
    setup = Setup(num_blocks=400)
    driver = Engine(address, "goes.on", tmp_path, setup).driver
    for i in range(setup.max_num_seqs):
        driver.add(f"r{i}", [i] * (10 + i), 200)
    driver.step()
    rounds = []
    for _ in range(16):
        calls.clear()
        driver.step()
        rounds.append(list(calls))
    assert ["begin", *["allocate_slots"] * setup.max_num_seqs, "settle"] in rounds


def test_blocks_that_are_read_too_early_end_the_engine(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a version of vLLM would that makes its output otherwise: an error, never wrong blocks."""
    monkeypatch.delattr(Scheduler, "_make_cached_request_data")
    driver = Engine(address, "early", tmp_path, Setup(num_blocks=400)).driver
    driver.add("r", [1] * 10, 100)
    driver.step()
    steps = (driver.step() for _ in range(16))
    with pytest.raises(RuntimeError, match="before the answer of the round"):
        list(steps)


def test_a_round_with_a_refused_grant_restarts(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler has gone on with blocks that there are not, once they are refused."""
    setup = Setup(num_blocks=24)
    plain = Driver(make_scheduler(Plain, setup, tmp_path), setup)
    served = Engine(address, "begins.again", tmp_path, setup).driver
    num_begun = 0
    schedule = Plain.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_begun
        num_begun += 1
        return schedule(*args, **kwargs)

    for driver in (plain, served):
        for i in range(4):
            driver.add(f"r{i}", [i] * 60, 60)
    steps = []
    while not plain.is_idle:
        steps.append(plain.step())
    monkeypatch.setattr(Plain, "schedule", counted)
    assert [served.step() for _ in steps] == steps
    assert served.is_idle
    assert num_begun > len(steps)


def test_the_scheduler_class_follows_the_configuration(address: str, tmp_path: Path) -> None:
    assert type(Engine(address, "kinds", tmp_path).scheduler) is Scheduler
    ahead = Engine(address, "kinds.ahead", tmp_path, Setup(is_async=True)).scheduler
    assert type(ahead) is AsyncScheduler
    assert isinstance(ahead, PlainAsync)
