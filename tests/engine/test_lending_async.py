"""Engines on one lent memory with several steps in flight. Their steps run late, in processes of their own."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.models import VOCABULARY
from engine.serving import AHEAD, SLOW, Answer, ServedEngine, Site, site
from kvpool.client import connect
from support.waiting import wait_until

ENDS = range(3, VOCABULARY, 40)
"""Tokens that end a request: the step after it has been launched by then."""
NUM_BLOCKS = 120
"""Two engines with 32 requests want four times as many, so that requests are preempted."""
PIPELINE = {"pipeline_parallel_size": 2}
WAIT_SECONDS = 60.0


class Load:
    """Requests of one engine: a third begin as those of the other engine do, and some are aborted."""

    def __init__(self, name: str, count: int) -> None:
        draw, common = random.Random(name), random.Random(0)
        heads = [[common.randrange(3, VOCABULARY) for _ in range(96)] for _ in range(3)]
        self._requests = {
            f"{name}-{i}": (
                (draw.choice(heads) if draw.random() < 0.3 else [])
                + [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 180))],
                draw.randint(1, 120),
            )
            for i in range(count)
        }
        self._aborted = {each: draw.randint(1, 40) for each in self._requests if draw.random() < 0.05}

    def ask(self, engine: ServedEngine) -> dict[str, Answer]:
        """Sends all requests at once."""
        return {name: engine.ask(name, *request, ENDS) for name, request in self._requests.items()}

    def abort_some(self, engine: ServedEngine, answers: dict[str, Answer]) -> None:
        """Aborts a few requests, each after some steps, and forgets those that had not ended."""
        for name, num_steps in sorted(self._aborted.items(), key=lambda each: each[1]):
            engine.wait_for_steps(num_steps)
            engine.abort(name)
            answers.pop(name)


def tokens(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in answers.items()}


def of_vllm_alone(place: Site, options: dict[str, Any], loads: list[Load]) -> dict[str, list[int]]:
    engine = place.engine(is_attached=False, num_blocks=600, options=options)
    engine.wait_ready()
    answers = {name: answer for load in loads for name, answer in load.ask(engine).items()}
    engine.wait(*answers.values())
    engine.stop()
    return tokens(answers)


@pytest.fixture
def place(address: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    with site(address, NUM_BLOCKS, tmp_path.name, num_ranks=request.param) as started:
        yield started


@pytest.mark.complete  # three engines
@pytest.mark.parametrize(
    ("place", "options", "count"),
    [(1, AHEAD, 60), (1, AHEAD, 500), (2, PIPELINE, 60)],
    ids=["ahead", "ahead, long", "stages"],
    indirect=["place"],
)
def test_two_engines_at_once_answer_as_vllm_alone(place: Site, options: dict[str, Any], count: int) -> None:
    loads = [Load(name, count) for name in "ab"]
    expected = of_vllm_alone(place, options, loads)
    engines = [place.engine(options=options | SLOW) for _ in loads]
    for engine in engines:
        engine.wait_ready()
    asked = [load.ask(engine) for load, engine in zip(loads, engines, strict=True)]
    for load, engine, answers in zip(loads, engines, asked, strict=True):
        load.abort_some(engine, answers)
    for engine, answers in zip(engines, asked, strict=True):
        engine.wait(*answers.values())
        found = tokens(answers)
        assert found == {name: expected[name] for name in found}
    with connect(place.service) as client:
        pool = client.get_pool(place.pool)
        assert pool.preemptions
        assert pool.prefix_cache.shared_hits_tokens
        wait_until(
            lambda: client.get_pool(place.pool).free_blocks == NUM_BLOCKS - 1, "all blocks are free", WAIT_SECONDS
        )
    for engine in engines:
        engine.stop()
