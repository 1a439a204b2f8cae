"""The long run: `python tests/fuzz/run.py --inputs 1000000 --seed 1 --jobs 2`, with a summary as JSON.

A seed repeats its findings until the code changes.
"""

import argparse
import asyncio
import json
import logging
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    sys.path[0] = str(Path(__file__).parents[1])

from fuzz.campaign import Campaign, Report

_PROGRESS_EVERY = 20_000


def run_one(seed: int, num_inputs: int) -> Report:
    """Runs a campaign in this process."""
    logging.getLogger("kvpool").setLevel(logging.ERROR)

    def tell(done: int) -> None:
        if done and done % _PROGRESS_EVERY == 0:
            sys.stderr.write(f"seed {seed}: {done:,} of {num_inputs:,}\n")

    async def run() -> Report:
        campaign = Campaign(seed)
        await campaign.run(num_inputs, tell)
        await campaign.close()
        return campaign.report

    return asyncio.run(run())


def _nested(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (outer, inner), count in sorted(counts.items()):
        nested.setdefault(outer, {})[inner] = count
    return nested


def _totals(counts: Counter[tuple[str, str]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for (_, inner), count in counts.items():
        totals[inner] += count
    return dict(totals.most_common())


def summary(reports: list[Report], seconds: float) -> dict[str, Any]:
    """Summary of campaigns, to be printed."""
    inputs = sum((report.inputs for report in reports), Counter[tuple[str, str]]())
    codes = sum((report.codes for report in reports), Counter[tuple[str, str]]())
    return {
        "inputs": inputs.total(),
        "seconds": round(seconds, 1),
        "inputs_by_kind": _totals(inputs),
        "codes": _totals(codes),
        "integrity_checks": sum(report.integrity_checks for report in reports),
        "deep_comparisons": sum(report.deep_comparisons for report in reports),
        "peak_rss_bytes_per_job": max(report.peak_rss_bytes for report in reports),
        "rss_growth_bytes_per_job": max(report.grown_bytes for report in reports),
        "inputs_by_call": _nested(inputs),
        "codes_by_call": _nested(codes),
    }


def main() -> None:
    """Parses the arguments, runs the jobs, and prints the summary."""
    parser = argparse.ArgumentParser(description="Sends a kvpool server's objects hostile messages.")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="messages, all jobs together")
    parser.add_argument("--seed", type=int, default=1, help="what all is drawn from")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    started = time.monotonic()
    share = partial(run_one, num_inputs=arguments.inputs // arguments.jobs)
    with ProcessPoolExecutor(arguments.jobs) as jobs:
        reports = list(jobs.map(share, range(arguments.seed * 1000, arguments.seed * 1000 + arguments.jobs)))
    sys.stdout.write(json.dumps(summary(reports, time.monotonic() - started), indent=2) + "\n")


if __name__ == "__main__":
    main()
