"""Runs schedulers on a server for a long time without kills: memory and response times must stay flat."""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from crash.records import read
from crash.rest import check_at_rest
from crash.site import Plan, Site
from support.programs import exit_on_sigterm

WARM_UP: Final = 0.25
"""Share of the time that is not judged: caches fill and memory allocators warm up."""
TOLERANCES: Final = {"rss_mib": 0.03, "cpu_ms": 0.20, "p50_ms": 0.30}
"""Maximum growth of each line, as a share of its mean."""
_TIMES: Final = ("cpu_ms", "p50_ms")
"""Measured relative to the yardstick, because the speed of a shared machine varies."""
_YARDSTICK_SECONDS: Final = 1.0
"""Time between two measurements of the machine's speed."""
_LEAST_PERIODS: Final = 12


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line through samples.

    Attributes:
        mean: Mean of the samples.
        growth: Rise of the line from its begin to its end, as a share of the mean.
    """

    mean: float
    growth: float

    @classmethod
    def through(cls, samples: list[tuple[float, float]]) -> "Line":
        """Fits a line to samples of time and value by least squares."""
        times, values = zip(*samples, strict=True)
        slope, _ = statistics.linear_regression(times, values)
        mean = statistics.fmean(values)
        return cls(mean, slope * (times[-1] - times[0]) / mean)


@dataclass(frozen=True, slots=True)
class Period:
    """A minute, or less in a short run.

    Attributes:
        at: End of the period, in seconds from the begin.
        rss_mib: Memory of the server at the end.
        cpu_ms: CPU time of the server per step.
        p50_ms: Median round trip of the steps, by the schedulers' clocks.
        p99_ms: 99th percentile of the round trips.
        steps: Number of steps.
        yardstick_ms: CPU time of a constant piece of work, mean of one measurement per second.
    """

    at: float
    rss_mib: float
    cpu_ms: float
    p50_ms: float
    p99_ms: float
    steps: int
    yardstick_ms: float


def judged(periods: list[Period]) -> dict[str, dict[str, float | bool]]:
    """Fits lines to the figures that must stay flat, by name. Times are relative to the yardstick."""
    warm = periods[int(len(periods) * WARM_UP) :]
    found = {}
    for name, tolerance in TOLERANCES.items():
        line = Line.through(
            [(each.at, getattr(each, name) / (each.yardstick_ms if name in _TIMES else 1.0)) for each in warm]
        )
        flat = line.growth <= tolerance
        found[name] = {"mean": round(line.mean, 3), "growth": round(line.growth, 4), "flat": flat}
    return found


def soak(folder: Path, plan: Plan, seconds: float) -> tuple[list[Period], list[str]]:
    """Runs the schedulers for some time.

    Args:
        folder: Empty folder for all files.
        plan: Settings of the run, with `is_brief`.
        seconds: Duration.

    Returns:
        The periods, and the violations.
    """
    count = max(_LEAST_PERIODS, math.ceil(seconds / 60))
    with closing(Site(folder, plan)) as site:
        site.start()
        site.wait_for_steps(list(range(plan.schedulers)), every=True)
        assert site.server
        began = time.monotonic()
        usage = [(began, *_usage(site.server.pid))]
        yardsticks = []
        for i in range(1, count + 1):
            yardsticks.append(_yardstick_ms(began + seconds * i / count))
            site.check_alive()
            usage.append((time.monotonic(), *_usage(site.server.pid)))
        site.stop_schedulers()
        check_at_rest(site)
    records = [record for path in folder.glob("*.jsonl") for record in read(path)]
    broken = [str(record) for record in records if record["kind"] in ("violation", "lost")]
    trips = [(record["at"], record["at"] - record["sent"]) for record in records if record["kind"] == "answered"]
    spans = zip(pairwise(usage), yardsticks, strict=True)
    return [_period(began, start, end, trips, yardstick_ms) for (start, end), yardstick_ms in spans], broken


def _usage(pid: int) -> tuple[float, float]:
    """Memory of a process in MiB, and its CPU time in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    rss_mib = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return rss_mib, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _yardstick_ms(until: float) -> float:
    """Waits until a time; returns the mean CPU time of a constant piece of work, done once per second."""
    measured = []
    while True:
        start = time.thread_time()
        dict.fromkeys(str(i) for i in range(20_000))
        measured.append((time.thread_time() - start) * 1e3)
        left_seconds = until - time.monotonic()
        if left_seconds <= 0:
            return statistics.fmean(measured)
        time.sleep(min(left_seconds, _YARDSTICK_SECONDS))


_Usage = tuple[float, float, float]


def _period(began: float, start: _Usage, end: _Usage, trips: list[tuple[float, float]], yardstick_ms: float) -> Period:
    seconds = [trip for at, trip in trips if start[0] <= at < end[0]]
    cuts = statistics.quantiles(seconds, n=100)
    cpu_ms = (end[2] - start[2]) / len(seconds) * 1e3
    return Period(end[0] - began, end[1], cpu_ms, cuts[49] * 1e3, cuts[98] * 1e3, len(seconds), yardstick_ms)


def main() -> int:
    """Runs from the command line; exits with 1 if a figure grows or there are violations."""
    exit_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--schedulers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--journal", action="store_true", help="the server keeps a journal")
    options = parser.parse_args()
    plan = Plan(
        options.seed,
        options.schedulers,
        0,
        journaled=options.journal,
        num_blocks=30 * options.schedulers,
        is_brief=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        periods, violations = soak(Path(folder), plan, options.minutes * 60)
    found = judged(periods)
    good = not violations and all(each["flat"] for each in found.values())
    rounded = [[round(value, 2) for value in astuple(period)] for period in periods]
    run = {"minutes": options.minutes, "schedulers": plan.schedulers, "journal": plan.journaled, "flat": good}
    print(json.dumps({**run, **found, "violations": violations, "periods": rounded}))  # noqa: T201
    print("flat" if good else f"not flat by {TOLERANCES}, or there are violations", file=sys.stderr)  # noqa: T201
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
