"""Every step that vLLM's scheduler makes on the service is the step that it makes by itself, block for block.

Of vLLM's own tests of its scheduler these behaviours are covered so: adding and finishing requests; aborts of waiting
and running ones; first come first served and priorities; preemption, resumption and its order; chunked prefill with
token budgets and thresholds; prefix caching within and across steps; salts; resets of the prefix cache, with running
requests too; admission of whole sequences; watermarks; scheduling a step ahead; sliding windows; caching turned off;
drafts that are taken or thrown away; images, with encoder budgets that suffice or not; KV connectors whose loads are
waited for or not, fail, and are freed late.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as PlainAsync
from vllm.v1.core.sched.scheduler import Scheduler as Plain

from engine.block_contents import BlockContents
from engine.connector import ENDS, ScriptedConnector
from engine.driving import STATES, Driver, Setup, images, make_scheduler
from engine.schedules import KINDS, MIXED, run, setup_of
from engine.test_sharing import Engine
from kvpool.client import connect
from kvpool.client.vllm import AsyncScheduler, Scheduler
from kvpool.client.vllm.schedule_predictor import SchedulePredictor
from kvpool.client.vllm.versions import IS_0_33_OR_NEWER


def _names(values: dict[str, Any]) -> str:
    return ".".join(values) or "no_drafts"


def _kinds(kinds: Collection[str], in_change: Collection[str]) -> pytest.MarkDecorator:
    """Some kinds, of which a change must pass some."""
    marks = {kind: [pytest.mark.complete] * (kind not in in_change) for kind in kinds}
    return pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks[kind]) for kind in kinds])


SEEDS = range(12)


@_kinds(KINDS, KINDS.keys() - MIXED)
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
    slow_machine = {"no answer yet, trying again", "steps not reached, using gRPC"}
    assert logged <= {"too few blocks for max_model_len", *slow_machine}  # no wrong predictions
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
                requests = served.scheduler.kv_cache_manager.calls.requests
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


RESERVING = [
    kind
    for kind, values in KINDS.items()
    if not {"num_drafts", "load_failures", "match_unit"} & values.keys()
    and not values.get("replays")  # writes to blocks of hits
    and not (STATES in values.get("windows", ()) and "block_sizes" in values)  # hits end within blocks
]
"""Kinds in which running requests hold slots in reserve."""
_REPRESENTATIVE = (
    "first_come",
    "a_step_ahead",
    "without_caching",
    "windows",
    "sizes",
    "images_a_step_ahead",
    "states_a_step_ahead",
)


def counts_of(step: Any) -> Any:
    """A step with numbers of blocks in place of blocks."""
    if isinstance(step, bool):
        return step
    counted = {
        name: [(*each[:2], each[2] and [len(ids) for ids in each[2]]) for each in step[name]]
        for name in ("new", "cached")
    }
    return {**step, **counted}


@_kinds(RESERVING, _REPRESENTATIVE)
def test_with_slots_in_reserve_a_step_schedules_the_same_tokens(kind: str, address: str, tmp_path: Path) -> None:
    """With the same preemptions and hits, if blocks suffice. If not, what is evicted may differ, and so the rest."""
    preemptions, num_different = [0, 0], 0
    for num_blocks, seed in product((4000, 80), SEEDS[:3]):
        setup = replace(setup_of(KINDS[kind], seed), num_blocks=num_blocks)
        kvpool = {"address": address, "pool": f"{kind}.{num_blocks}.{seed}.reserve", "reserve_tokens": -1}
        plain = run(PlainAsync if setup.is_async else Plain, setup, seed, tmp_path)
        served = run(Scheduler, replace(setup, additional_config={"kvpool": kvpool}), seed, tmp_path)
        for outcome in (plain, served):
            contents = BlockContents(setup, outcome)
            for step in outcome.steps:
                contents.run(step)
        if num_blocks > 1000 or not setup.enable_caching:
            num_different += list(map(counts_of, served.steps)) != list(map(counts_of, plain.steps))
        preemptions[0] += plain.num_preemptions
        preemptions[1] += served.num_preemptions
        with connect(address) as client:
            assert client.get_pool(str(kvpool["pool"])).free_blocks == setup.num_blocks - 1
    assert num_different <= 1  # a block is found up to four steps later
    assert 0.6 < (preemptions[1] + 10) / (preemptions[0] + 10) < 1.6, preemptions


def test_requests_of_the_first_round_do_not_hit_its_states(address: str, tmp_path: Path) -> None:
    setup = Setup(windows=(0, STATES))
    drivers = [
        Engine(address, "first", tmp_path, setup, reserve_tokens=-1).driver,
        Driver(make_scheduler(Plain, setup, tmp_path), setup),
    ]
    for driver in drivers:
        for i in range(6):
            driver.add(f"r{i}", [*range(40), i, *range(9)], 5)
    served, plain = [driver.step() for driver in drivers]
    assert served["tokens"] == plain["tokens"]
    assert {num_computed for _, num_computed, _ in served["new"]} == {0}


def test_the_scheduler_class_follows_the_configuration(address: str, tmp_path: Path) -> None:
    assert type(Engine(address, "kinds", tmp_path).scheduler) is Scheduler
    ahead = Engine(address, "kinds.ahead", tmp_path, Setup(is_async=True)).scheduler
    assert type(ahead) is AsyncScheduler
    assert isinstance(ahead, PlainAsync)
