"""What limits the requests of a plan, in figures and as a picture."""

import math
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kvpool.cli.plan_limits import hit_multiple_tokens, loads
from kvpool.cli.plan_plot import draw
from kvpool.cli.plan_report import PlannedModel
from kvpool.core.planning.plan import Plan, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from support.command import kvpool
from support.models import derive
from support.paths import MODEL_CONFIGS

FULL = FullAttentionSpec(16, 1, 8, "float32")
WINDOW = SlidingWindowSpec(16, 1, 8, "float32", sliding_window=32)
STATE = MambaSpec(4096, ((16, 16),), ("float32",), 1024)


def planned_of(layers: dict[str, KVCacheSpec], *memory_blocks: int) -> PlannedModel:
    block_bytes = FULL.page_size_bytes
    ranks = tuple(RankMemory(layers, count * block_bytes + 1) for count in memory_blocks)
    options = PlanOptions(4096, max_num_batched_tokens=32)
    return PlannedModel(derive("llama-3.1-8b"), ranks, options, get_kv_cache_configs(ranks, options), len(ranks))


def test_short_requests_end_at_blocks_and_long_ones_at_tokens() -> None:
    planned = planned_of({"full": FULL, "window": WINDOW}, 1001)
    found = loads(planned.plan, planned.options)
    assert [load.request_tokens for load in found] == [16, 64, 256, 1024, 4096]
    assert [load.blocks_per_request for load in found] == [1 + 2, 4 + 5, 16 + 5, 64 + 5, 256 + 5]
    assert [load.num_requests for load in found] == [333, 111, 47, 14, 3]
    assert found[-1].num_tokens == 3 * 4096


def test_a_load_of_the_longest_requests_is_the_concurrency_without_the_null_block() -> None:
    planned = planned_of({"full": FULL, "state": STATE}, 1001)
    last = loads(planned.plan, planned.options)[-1]
    assert last.blocks_per_request == planned.plan.blocks_per_request
    assert last.num_requests == math.floor(planned.plan.max_concurrency * 1000 / 1001)


def test_hits_are_multiples_of_the_largest_block_that_a_request_fills() -> None:
    assert hit_multiple_tokens(*_plan({"full": FULL})) == 16
    assert hit_multiple_tokens(*_plan({"full": FULL, "state": STATE})) == 16
    assert hit_multiple_tokens(*_plan({"state": STATE})) == 0


def _plan(layers: dict[str, KVCacheSpec]) -> tuple[Plan, PlanOptions]:
    planned = planned_of(layers, 1001)
    return planned.plan, planned.options


def test_ranks_of_more_memory_leave_some_unused() -> None:
    planned = planned_of({"full": FULL}, 300, 310)
    assert [planned.unused_bytes(rank) for rank in range(2)] == [1, 10 * FULL.page_size_bytes + 1]


@pytest.mark.parametrize("name", ["gemma-3-27b-it", "mamba-2.8b", "llama-3.1-8b"])
def test_the_picture_has_a_line_for_memory_and_one_for_requests(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    done = kvpool("plan", MODEL_CONFIGS / f"{name}.json", "--memory", "80GiB", "--plot", path)
    assert done.returncode == 0, done.stderr
    root = ET.fromstring(path.read_text())  # noqa: S314 - our own
    space = "{http://www.w3.org/2000/svg}"
    lines = [line.attrib["points"].split() for line in root.iter(f"{space}polyline")]
    assert len(lines) == 2
    assert all(len(points) > 4 for points in lines)
    texts = [text.text for text in root.iter(f"{space}text")]
    assert {"memory of one request", "requests at once"} <= {*texts}


def test_a_picture_of_a_model_with_one_length() -> None:
    ranks, options = (RankMemory({"full": FULL}, 10 * FULL.page_size_bytes),), PlanOptions(1)
    planned = PlannedModel(derive("llama-3.1-8b"), ranks, options, get_kv_cache_configs(ranks, options), 1)
    assert draw(planned).count("<polyline") == 2


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "plan.svg"
    done = kvpool("plan", MODEL_CONFIGS / "llama-3.1-8b.json", "--memory", "80GiB", "--plot", path)
    assert done.returncode == 2
    assert f"--plot: {path}: No such file or directory" in done.stderr.replace("\n", " ")
