"""A request that needs more blocks than its engine can ever hold ends with an error, and those behind it are served."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from engine.driving import STATES, Setup
from engine.test_sharing import Engine

pytestmark = pytest.mark.complete
MOST_STEPS = 1500
WINDOWS = {"plain": (0,), "windows": (0, 40), "states": (0, STATES)}


class Recording(Engine):
    """An engine that notes why its requests ended."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.reasons: dict[str, FinishReason] = {}
        update = self.scheduler.update_from_output

        def noting_update(*arguments: Any) -> Any:
            outputs = update(*arguments)
            for each in itertools.chain.from_iterable(client.outputs for client in outputs.values()):
                if each.finish_reason is not None:
                    self.reasons[each.request_id] = each.finish_reason
            return outputs

        self.scheduler.update_from_output = noting_update

    def run_all(self) -> None:
        for _ in range(MOST_STEPS):
            if self.driver.is_idle:
                break
            self.driver.step()
        self.driver.drain()


@pytest.mark.parametrize("groups", WINDOWS)
@pytest.mark.parametrize("is_async", [False, True], ids=["", "a_step_ahead"])
@pytest.mark.parametrize("reserves", [False, True], ids=["in_chunks", "whole"])
@pytest.mark.parametrize("grows", [False, True], ids=["prompt", "output"])
@pytest.mark.parametrize("quota", [{"max_blocks": 30}, {"min_blocks": 0}], ids=["maximum", "minimum_of_another"])
def test_it_ends_with_an_error_and_the_others_are_served(  # noqa: PLR0913 - kinds of requests and limits
    quota: dict[str, int], groups: str, address: str, tmp_path: Path, *, grows: bool, reserves: bool, is_async: bool
) -> None:
    setup = Setup(num_blocks=101, windows=WINDOWS[groups], is_async=is_async, reserves_sequence=reserves)
    pool = f"never.{groups}.{is_async}.{reserves}.{grows}.{quota}".translate(str.maketrans("{}': ", "....."))
    Engine(address, pool, tmp_path, setup, memory_id="m", min_blocks=0 if quota.get("max_blocks") else 70)
    engine = Recording(address, pool, tmp_path, setup, memory_id="m", **quota)
    engine.driver.add("first", list(range(20)), 30)
    engine.driver.add("long", list(range(100 if grows else 800)), 700 if grows else 4)
    engine.driver.add("short", list(range(30, 60)), 4)
    engine.run_all()
    ended = {name: reason.name for name, reason in engine.reasons.items()}
    assert ended == {"first": "LENGTH", "long": "ERROR", "short": "LENGTH"}
    assert engine.run("fits", list(range(200, 300)), 5) == 0
    assert engine.reasons["fits"] is FinishReason.LENGTH


def test_one_that_fits_waits_for_blocks_of_others(address: str, tmp_path: Path) -> None:
    engine = Recording(address, "waits", tmp_path, Setup(num_blocks=101), max_blocks=30)
    for i in range(4):
        engine.driver.add(f"r{i}", [i, *range(400)], 20)
    engine.run_all()
    assert set(engine.reasons.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("quota", [{"max_blocks": 30}, {}], ids=["maximum", "minimum_of_another"])
def test_an_engine_warns_at_its_start(
    quota: dict[str, int], address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup, pool = Setup(num_blocks=101), f"warns.{len(quota)}"
    Engine(address, pool, tmp_path, setup, memory_id="m", min_blocks=0 if quota else 70)
    assert "too few blocks for max_model_len" not in caplog.messages
    Engine(address, pool, tmp_path, setup, memory_id="m", **quota)
    (warned,) = (vars(each) for each in caplog.records if each.msg == "too few blocks for max_model_len")
    assert "needs 64 blocks, 30 are available" in warned["error"]
