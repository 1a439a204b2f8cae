"""Engines on one lent memory with several steps in flight. Their steps run late, in processes of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.load import Load, answer_at_once_as_vllm_alone
from engine.serving import AHEAD, Site, site
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
    answer_at_once_as_vllm_alone(place, options, [Load(name, count) for name in "ab"])
    with connect(place.service) as client:
        pool = client.get_pool(place.pool)
        assert pool.preemptions
        assert pool.prefix_cache.shared_hits_tokens
        wait_until(
            lambda: client.get_pool(place.pool).free_blocks == NUM_BLOCKS - 1, "all blocks are free", WAIT_SECONDS
        )
