"""Hits that are copied from host memory in the background: the scheduler on a pool of this process, without a model."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from vllm.v1.core.sched.interface import PauseState

from engine.driving import Driver, Setup, make_scheduler
from engine.host_pools import give_host_memory
from kvpool.client.vllm import Scheduler
from kvpool.lending.host_copies import CopyOrders, CopyReport
from support.session_transcript import RecordingTransport

SETUP: Final = Setup(num_blocks=28)
PROMPT: Final = [i * 7 % 512 for i in range(100)]
NUM_HIT: Final = 96
"""Tokens of its full blocks."""
NONE: Final = CopyOrders()


def prompt_of(number: int) -> list[int]:
    """One of many prompts; the first is PROMPT."""
    return [(each + 19 * number) % 512 for each in PROMPT]


class Engine:
    """An engine that has evicted PROMPT to host memory."""

    def __init__(
        self, service: RecordingTransport, folder: Path, setup: Setup, mib: int = 0, num_evicted: int = 8
    ) -> None:
        kvpool = {"address": "unix:/none", "pool": "m", "memory_id": "gpu0", "background_copy_mib": mib}
        self.service = service
        self.scheduler = make_scheduler(Scheduler, replace(setup, additional_config={"kvpool": kvpool}), folder)
        self.driver = Driver(self.scheduler, setup)
        for i in range(num_evicted):
            self.serve(f"{i}", prompt_of(i))

    def serve(self, name: str, prompt: list[int]) -> None:
        """Computes a prompt."""
        self.driver.add(name, prompt, 1)
        self.driver.finish()
        self.driver.drain()

    @property
    def promotions(self) -> Any:
        return self.scheduler.kv_cache_manager.calls.promotions

    def run_long(self) -> None:
        """Has a request run all the time."""
        self.driver.add("long", PROMPT[:5], 300)
        self.step()

    def step(self) -> tuple[dict[str, int], CopyOrders]:
        """Runs a step; returns its tokens, and what copies go with it."""
        output = self.driver.run_step()
        return dict(output.num_scheduled_tokens), getattr(output, "kvpool_copies", NONE)

    def is_executed(self, sequence: int) -> bool:
        """Whether the engine has reported a step as executed, or does so now."""
        self.scheduler.kv_cache_manager.calls.deliver_all()
        return max(each.executed_sequence for each in self.service.sent) >= sequence


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> RecordingTransport:
    service = RecordingTransport()
    give_host_memory(monkeypatch, 200, service)
    return service


SETUPS: Final = {
    "predicted": SETUP,
    "a_step_ahead": replace(SETUP, is_async=True),
    "looked_up": replace(SETUP, num_stages=2),
}


@pytest.fixture(params=SETUPS)
def engine(service: RecordingTransport, tmp_path: Path, request: pytest.FixtureRequest) -> Engine:
    return Engine(service, tmp_path, SETUPS[request.param])


def test_a_large_hit_is_copied_while_others_run(engine: Engine) -> None:
    engine.run_long()
    engine.driver.add("a", PROMPT, 4)
    tokens, orders = engine.step()
    assert "a" not in tokens
    assert (len(orders.beside), orders.joined) == (6, 0)
    sequence = engine.scheduler.kv_cache_manager.session.sequence
    for _ in range(3):
        tokens, orders = engine.step()
        assert "a" not in tokens
        assert not orders.beside
    assert not engine.is_executed(sequence)
    engine.driver.drain()
    engine.driver.report = CopyReport(num_made=1)
    while "a" not in tokens:
        tokens, orders = engine.step()
    assert (tokens["a"], orders.joined) == (len(PROMPT) - NUM_HIT, 1)
    for _ in range(3):
        engine.step()
    assert engine.is_executed(sequence)
    assert engine.driver.cached["a"] == NUM_HIT
    engine.driver.abort("long")
    engine.driver.finish()
    engine.driver.drain()
    assert len(engine.driver.generated["a"]) == 4
    assert not engine.promotions.waiting


def test_a_request_continues_before_the_report_if_no_other_runs(engine: Engine) -> None:
    engine.run_long()
    engine.driver.add("a", PROMPT, 4)
    _, orders = engine.step()
    assert orders.beside
    engine.driver.abort("long")
    tokens, orders = engine.step()
    assert (list(tokens), orders.joined) == (["a"], 1)
    engine.driver.finish()
    engine.driver.drain()
    assert len(engine.driver.generated["a"]) == 4


def test_hits_are_copied_before_the_step_if_no_other_runs(engine: Engine) -> None:
    engine.driver.add("a", PROMPT, 4)
    tokens, orders = engine.step()
    assert tokens == {"a": len(PROMPT) - NUM_HIT}
    assert (len([source for source, _ in orders.before if source >= SETUP.num_blocks]), orders.beside) == (6, [])


def test_small_hits_are_copied_before_the_step(service: RecordingTransport, tmp_path: Path) -> None:
    engine = Engine(service, tmp_path, SETUP, mib=64)
    engine.run_long()
    engine.driver.add("a", PROMPT, 4)
    tokens, orders = engine.step()
    assert tokens["a"] == len(PROMPT) - NUM_HIT
    assert not orders.beside


def test_the_step_after_an_abort_comes_after_the_copies(engine: Engine) -> None:
    engine.run_long()
    engine.driver.add("a", PROMPT, 4)
    engine.step()
    sequence = engine.scheduler.kv_cache_manager.session.sequence
    for name in ("a", "long"):
        engine.driver.abort(name)
    assert not engine.promotions.waiting
    engine.driver.drain()
    assert not engine.is_executed(sequence)
    assert engine.scheduler.has_requests()  # vLLM runs a step, which tells the workers of the ends
    assert engine.step() == ({}, CopyOrders([], [], 1))
    engine.driver.drain()
    assert engine.is_executed(sequence)


def test_a_request_that_hits_blocks_of_a_copy_in_the_background_runs_after_it(engine: Engine) -> None:
    engine.run_long()
    engine.driver.add("a", PROMPT, 4)
    engine.step()
    engine.driver.add("b", PROMPT[:80], 4)
    tokens, orders = engine.step()
    assert ("a" in tokens, tokens["b"], orders.joined) == (False, 16, 1)
    engine.driver.report = CopyReport(num_made=1)
    for _ in range(3):
        tokens, _ = engine.step()
    assert "a" in tokens or engine.driver.generated["a"]


def test_requests_of_one_round_are_one_batch(engine: Engine) -> None:
    engine.run_long()
    engine.driver.add("a", PROMPT, 4)
    engine.driver.add("b", prompt_of(1), 4)
    _, orders = engine.step()
    assert len(orders.beside) == 12
    engine.driver.report = CopyReport(num_made=1)
    engine.driver.finish()
    engine.driver.drain()
    assert [len(engine.driver.generated[name]) for name in "ab"] == [4, 4]


def test_how_long_copies_took_is_reported_once(service: RecordingTransport, tmp_path: Path) -> None:
    engine = Engine(service, tmp_path, SETUP)
    engine.driver.report = CopyReport(0, 700, 30)
    engine.run_long()
    engine.driver.report = CopyReport(0, 1000, 30)
    engine.step()
    engine.scheduler.kv_cache_manager.calls.deliver_all()
    engine.driver.abort("long")
    engine.scheduler.kv_cache_manager.calls.deliver_all()
    sent = [(each.copying_out_microseconds, each.copying_in_microseconds) for each in service.sent]
    assert [sum(each) for each in zip(*sent, strict=True)] == [1000, 30]


def test_a_small_hit_of_the_same_prefix_is_copied_before_the_step(engine: Engine) -> None:
    engine.run_long()
    engine.promotions.max_blocks = 2
    engine.driver.add("small", PROMPT[:40], 1)
    engine.driver.add("a", PROMPT, 4)
    tokens, orders = engine.step()
    assert "small" in tokens
    assert len([source for source, _ in orders.before if source >= SETUP.num_blocks]) == 2
    assert (len(orders.beside), orders.joined) == (4, 0)


def test_a_reset_takes_the_hits_of_requests_that_wait_for_copies(engine: Engine) -> None:
    """The weights may change next, and vLLM preempts only requests that run."""
    engine.run_long()
    engine.driver.add("a", PROMPT, 4)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.driver.requests["a"].num_computed_tokens == 0
    engine.driver.finish()
    engine.driver.drain()
    assert engine.driver.cached["a"] < NUM_HIT
    assert len(engine.driver.generated["a"]) == 4


def test_requests_that_lack_the_blocks_of_each_others_hits_go_on(engine: Engine) -> None:
    rng = random.Random(1)
    small, large, rest = ([rng.randrange(512) for _ in range(count)] for count in (33, 228, 223))
    for number, prompt in enumerate((large, small, *([rng.randrange(512) for _ in range(100)] for _ in range(8)))):
        engine.serve(f"earlier {number}", prompt)
    engine.driver.add("long", PROMPT[:5], 6)
    engine.step()
    engine.driver.add("a", small + rest, 2)
    engine.driver.add("b", large, 2)
    engine.step()
    engine.driver.report = CopyReport(num_made=1)
    assert set(engine.promotions.waiting) == {"a", "b"}
    for _ in range(40):
        engine.step()
    assert engine.driver.is_idle


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_no_more_requests_wait_for_copies_than_can_run(
    setup: Setup, service: RecordingTransport, tmp_path: Path
) -> None:
    engine = Engine(service, tmp_path, replace(setup, num_blocks=60, max_num_seqs=3), num_evicted=20)
    engine.run_long()
    for i in range(4):
        engine.driver.add(f"new {i}", prompt_of(i), 2)
    engine.step()
    engine.step()
    assert len(engine.promotions.waiting) == 2
    engine.driver.report = CopyReport(num_made=2)
    for _ in range(30):
        engine.step()
    assert [len(engine.driver.generated[f"new {i}"]) for i in range(4)] == [2] * 4


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_steps_are_reported_although_the_request_that_waited_cannot_run(
    setup: Setup, service: RecordingTransport, tmp_path: Path
) -> None:
    engine = Engine(service, tmp_path, replace(setup, max_num_seqs=2))
    engine.run_long()
    engine.driver.add("a", PROMPT, 4)
    assert engine.step()[1].beside
    sequence = engine.scheduler.kv_cache_manager.session.sequence
    engine.scheduler.max_num_active_reqs = 1
    engine.driver.report = CopyReport(num_made=1)
    for _ in range(5):
        tokens, _ = engine.step()
        assert "a" not in tokens
    assert engine.is_executed(sequence)


def test_a_pause_begins_when_the_copies_have_been_made(engine: Engine) -> None:
    engine.run_long()
    engine.driver.add("a", PROMPT, 4)
    engine.step()
    sequence = engine.scheduler.kv_cache_manager.session.sequence
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.driver.drain()
    assert engine.scheduler.has_requests()
    assert engine.step()[1].joined == 1
    engine.driver.drain()
    assert not engine.scheduler.has_requests()
    assert engine.is_executed(sequence)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.driver.report = CopyReport(num_made=1)
    engine.driver.abort("long")
    engine.driver.finish()
    engine.driver.drain()
    assert engine.driver.cached["a"] == NUM_HIT


def test_running_requests_get_the_blocks_of_an_aborted_one_after_its_copies(engine: Engine) -> None:
    engine.run_long()
    engine.driver.add("a", PROMPT, 4)
    engine.step()
    engine.driver.abort("a")
    assert engine.step()[1].joined == 1
