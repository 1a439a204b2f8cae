"""Engines that load other weights while they run, on memory that a `kvpool worker` lends."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from engine.forks import DEADLINE_SECONDS, start
from engine.lending import attached_to
from engine.models import LLAMA, write_model
from engine.pairs import Engine
from kvpool.client import connect
from support.logging_process import LoggingProcess

pytestmark = pytest.mark.complete

ENGINE = Engine(LLAMA, 256, frozenset(), ())
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as path:  # shorter than tmp_path: the address of a socket is limited
        write_model(LLAMA, Path(path) / "model")
        yield Path(path)


def run(folder: Path, name: str, attached: dict[str, Any], **pool: str) -> Results:
    """Runs an engine."""
    llm = {**ENGINE.specification(folder / "model")["llm"], **attached}
    specification, results = folder / f"{name}.json", folder / f"{name}-results.json"
    specification.write_text(json.dumps({"llm": llm, **pool}))
    log = folder / f"{name}.log"
    process = start("engine.weights_program", str(specification), str(results), log=log)
    try:
        assert process.wait(DEADLINE_SECONDS) == 0, log.read_text()
    finally:
        process.kill()
    found: Results = json.loads(results.read_text())
    return found


@pytest.fixture(scope="module")
def results(folder: Path, address: str) -> dict[str, Results]:
    """What vLLM alone answered, and two engines that ran one after the other on lent memory."""
    memory = f"unix:{folder}/m"
    command = ("worker", "--server", address, "--pool", "weights", "--rank", "0", "--device", "cpu")
    worker = LoggingProcess(str(Path(sys.executable).parent / "kvpool"), *command, "--memory", "1GiB", "--lend", memory)
    try:
        worker.wait_for("lending")
        attached = attached_to(address, "weights", memory)
        attached["additional_config"]["kvpool"]["weights_version"] = "1"
        pool = {"address": address, "pool": "weights"}
        found = {name: run(folder, name, attached, **pool) for name in ("first", "second")}
        with connect(address) as client:
            assert "weights_version" not in dict(client.get_pool("weights").fingerprint)
        return {"alone": run(folder, "alone", {}), **found}
    finally:
        worker.signal(signal.SIGTERM)
        assert worker.end() == 0, "".join(worker.lines)


def tokens(results: Results, weights: str) -> list[list[int]]:
    return [answer["token_ids"] for answer in results[weights]]


def cached(results: Results, weights: str) -> list[int]:
    return [answer["num_cached_tokens"] for answer in results[weights]]


def test_every_token_is_that_of_vllm_alone(results: dict[str, Results]) -> None:
    alone = results["alone"]
    assert all(one != other for one, other in zip(tokens(alone, "1"), tokens(alone, "2"), strict=True))
    for name in ("first", "second"):
        for weights in ("1", "2"):
            assert tokens(results[name], weights) == tokens(alone, weights)


def test_the_first_request_after_new_weights_is_computed_anew(results: dict[str, Results]) -> None:
    for weights in ("1", "2"):
        assert cached(results["first"], weights) == cached(results["alone"], weights)
        assert cached(results["first"], weights)[0] == 0


def test_another_engine_hits_what_was_computed_with_its_weights(results: dict[str, Results]) -> None:
    for weights in ("1", "2"):
        assert all(cached(results["second"], weights))
