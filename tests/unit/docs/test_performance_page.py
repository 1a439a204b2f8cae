"""The performance page quotes the figures of the benchmark tables."""

import json
import re
from typing import Any, Final

from support.paths import DOCS

RATIOS: Final = {
    "in process: hash a block": ("core", "hash_us_per_block"),
    "in process: look up 256 blocks, hit": ("core", "lookup_hit_256"),
    "in process: allocate 256 blocks, cold": ("core", "allocate_cold_256"),
    "in process: the same, evicting": ("core", "allocate_evict_256"),
    "in process: allocate after a full hit": ("core", "allocate_hit_256"),
    "in process: free 256 blocks": ("core", "free_256"),
    "in process: decode step of 256 requests": ("core", "decode_step_256_requests"),
    "in process: 6 groups, allocate a 256-block prompt": ("core", "gemma3_allocate_256"),
    "in process: 6 groups, free it": ("core", "gemma3_free_256"),
    "through the service: decode step of 256 requests": ("grpc", "decode_step_256_requests"),
    "the same, sent ahead: the scheduler's own time": ("grpc", "decode_step_ahead_256_requests"),
    "through the service: a 256-block prompt, hash to blocks": ("grpc", "prompt_256_end_to_end"),
}


def quotes(bench: dict[str, Any]) -> dict[str, str]:
    """The first figure of each row of the page."""
    sessions, core, ratios = bench["sessions"], bench["core"], bench["ratios"]
    spent = bench["server_time"]
    step_us = spent["decode_step_64_requests"]
    growth = ratios["pool_size_largest_to_smallest"]["grpc_decode_step_64_requests"]
    found = {row: f"{bench[where][key] / bench['vllm'][key]:.2f}" for row, (where, key) in RATIOS.items()}
    return found | {
        "an empty step, relative to an echo": f"{ratios['empty_step_to_echo']['grpc']:.2f}",
        "the server's processor time of a step of 64 requests, relative to an echo": f"{step_us / spent['echo']:.2f}",
        "the same with a journal, relative to none": f"{spent['decode_step_64_requests_journal'] / step_us:.2f}",
        "server CPU per step of 64 requests, 8 sessions, us": f"{sessions['8']['server_cpu_us_per_step']:.0f}",
        "the same, 1 session": f"{sessions['1']['server_cpu_us_per_step']:.0f}",
        "server CPU per request, 8 sessions to 1": f"{sessions['8']['server_cpu_ratio_to_1_session']:.2f}",
        "32 sessions at once: 99th percentile of a step, relative to the median": (
            f"{sessions['32']['step_p99_us'] / sessions['32']['step_p50_us']:.2f}"
        ),
        "1,000,000 unused blocks: memory per block, bytes": f"{core['bytes_per_block']:.1f}",
        "1,000,000 unused blocks: start, ms": f"{core['construct_1M_ms']:.1f}",
        "a decode step at 1,000,000 blocks, relative to 1,000": f"{growth:.2f}",
    }


def test_quoted_figures_are_those_of_the_benchmark() -> None:
    expected = quotes(json.loads((DOCS / "bench" / "bench.json").read_text()))
    page = (DOCS / "explanation" / "performance.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([\d.,]+) \|", page, re.MULTILINE))
    assert {row: rows.get(row) for row in expected} == expected
