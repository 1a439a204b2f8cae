"""Engines on one lent memory with several steps in flight. Their steps run late, in processes of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.load import Load, of_vllm_alone, tokens
from engine.serving import AHEAD, SLOW, Site, site
from kvpool.client import connect
from support.waiting import wait_until

NUM_BLOCKS = 120
"""Two engines with 32 requests want four times as many, so that requests are preempted."""
PIPELINE = {"pipeline_parallel_size": 2}
WAIT_SECONDS = 60.0


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
    engines = place.engines(len(loads), options=options | SLOW)
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
