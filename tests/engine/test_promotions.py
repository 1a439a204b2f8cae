"""Hits that are copied from host memory in the background: the scheduler on a pool of this process, without a model."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from engine.driving import Driver, Setup, make_scheduler
from kvpool.client import Client
from kvpool.client.vllm import Scheduler, attach
from kvpool.client.vllm.pool_config import pool_config
from kvpool.lending.host_copies import CopyOrders, CopyReport
from support.session_transcript import RecordingTransport

SETUP: Final = Setup(num_blocks=28)
PROMPT: Final = [i * 7 % 512 for i in range(100)]
NUM_HIT: Final = 96
"""Tokens of its full blocks."""
NONE: Final = CopyOrders()


class Engine:
    """An engine that has evicted PROMPT to host memory, and that runs another request unless `is_idle`."""

    def __init__(self, service: RecordingTransport, folder: Path, setup: Setup, mib: int = 0) -> None:
        kvpool = {"address": "unix:/none", "pool": "m", "memory_id": "gpu0", "background_copy_mib": mib}
        self.service = service
        self.scheduler = make_scheduler(Scheduler, replace(setup, additional_config={"kvpool": kvpool}), folder)
        self.driver = Driver(self.scheduler, setup)
        for i in range(8):
            self.driver.add(f"{i}", [(each + 64 * i) % 512 for each in PROMPT], 1)
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
        output = self.scheduler.schedule()
        self.driver._outputs.append(output)
        if len(self.driver._outputs) > self.driver._lag:
            self.driver.settle()
        return dict(output.num_scheduled_tokens), getattr(output, "kvpool_copies", NONE)

    def is_executed(self, sequence: int) -> bool:
        """Whether the engine has reported a step as executed, or does so now."""
        self.scheduler.kv_cache_manager.calls.deliver_all()
        return max(each.executed_sequence for each in self.service.sent) >= sequence


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> RecordingTransport:
    service = RecordingTransport()
    monkeypatch.setattr(attach, "connect", lambda *_, **__: Client(service))
    monkeypatch.setattr(attach, "pool_config", lambda *given: replace(pool_config(*given), num_host_blocks=200))
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
    engine.driver.add("b", [(each + 64) % 512 for each in PROMPT], 4)
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
