"""Plays schedulers on a server for a long time, without kills: its memory and its answers' times must stay flat."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from crash.records import read
from crash.rest import check_at_rest
from crash.site import Plan, Site

WARM_UP: Final = 0.25
"""Share of the time that counts for nothing: caches fill, allocators take what they will need."""
MEMORY_TOLERANCE: Final = 0.03
LATENCY_TOLERANCE: Final = 0.30
_SAMPLES: Final = 60
_BUCKETS: Final = 12

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line through samples.

    Attributes:
        mean: Of the samples.
        growth: How much higher the line ends than it began, as a share of the mean.
    """

    mean: float
    growth: float

    @classmethod
    def through(cls, samples: list[tuple[float, float]]) -> "Line":
        """The line with the least squares, by time and value."""
        times, values = zip(*samples, strict=True)
        slope, _ = statistics.linear_regression(times, values)
        mean = statistics.fmean(values)
        return cls(mean, slope * (times[-1] - times[0]) / mean)


@dataclass(frozen=True, slots=True)
class Soaked:
    """What came of it.

    Attributes:
        rss_bytes: Samples of the server's memory, by second.
        latencies: By second: p50 and p99 of the steps' round trips, in seconds, and how many there were.
        violations: Promises that were broken.
    """

    rss_bytes: list[tuple[float, int]]
    latencies: list[tuple[float, float, float, int]]
    violations: list[str]

    def as_json(self) -> dict[str, object]:
        """For machines, verdict included."""
        memory = Line.through([(at, float(value)) for at, value in _warm(self.rss_bytes)])
        p50, p99 = (Line.through([(row[0], row[i]) for row in _warm(self.latencies)]) for i in (1, 2))
        return {
            "rss_mean_mib": round(memory.mean / 2**20, 1),
            "rss_growth": round(memory.growth, 4),
            "rss_tolerance": MEMORY_TOLERANCE,
            "p50_mean_ms": round(p50.mean * 1e3, 3),
            "p50_growth": round(p50.growth, 3),
            "p99_mean_ms": round(p99.mean * 1e3, 3),
            "p99_growth": round(p99.growth, 3),
            "latency_tolerance": LATENCY_TOLERANCE,
            "steps": sum(row[3] for row in self.latencies),
            "rss_mib": [[round(at), round(value / 2**20, 1)] for at, value in self.rss_bytes[:: _SAMPLES // _BUCKETS]],
            "latency_ms": [[round(at), round(a * 1e3, 2), round(b * 1e3, 2), n] for at, a, b, n in self.latencies],
            "violations": self.violations,
            "memory_flat": memory.growth <= MEMORY_TOLERANCE,
            "latency_flat": p50.growth <= LATENCY_TOLERANCE,
        }


def soak(folder: Path, plan: Plan, seconds: float) -> Soaked:
    """Plays for so long; the folder must be empty."""
    with closing(Site(folder, plan)) as site:
        site.start()
        site.wait_for_steps(list(range(plan.schedulers)), every=True)
        began, rss_bytes = time.monotonic(), []
        for i in range(1, _SAMPLES + 1):
            time.sleep(max(began + seconds * i / _SAMPLES - time.monotonic(), 0.0))
            site.check_alive()
            rss_bytes.append((time.monotonic() - began, _rss_bytes(site)))
        ended = time.monotonic()
        site.stop_schedulers()
        check_at_rest(site)
    said = [
        record for path in folder.glob("*.jsonl") for record in read(path) if record["kind"] in ("violation", "lost")
    ]
    return Soaked(rss_bytes, _latencies(folder, began, ended), [str(record) for record in said])


def _warm(samples: list[_T]) -> list[_T]:
    return samples[int(len(samples) * WARM_UP) :]


def _rss_bytes(site: Site) -> int:
    assert site.server
    status = Path(f"/proc/{site.server.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def _latencies(folder: Path, began: float, ended: float) -> list[tuple[float, float, float, int]]:
    width = (ended - began) / _BUCKETS
    buckets: list[list[float]] = [[] for _ in range(_BUCKETS)]
    for path in folder.glob("scheduler-*.jsonl"):
        for record in read(path):
            if record["kind"] == "told" and began <= record["at"] < ended:
                buckets[int((record["at"] - began) / width)].append(record["at"] - record["sent"])
    rows = []
    for i, bucket in enumerate(buckets):
        cuts = statistics.quantiles(bucket, n=100)
        rows.append(((i + 0.5) * width, cuts[49], cuts[98], len(bucket)))
    return rows


def main() -> int:
    """Runs from the command line; exits with 1 if something is not flat or was broken."""
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
        result = soak(Path(folder), plan, options.minutes * 60).as_json()
    print(json.dumps({"minutes": options.minutes, "schedulers": plan.schedulers, "journal": plan.journaled, **result}))  # noqa: T201
    good = result["memory_flat"] and result["latency_flat"] and not result["violations"]
    print("flat" if good else "NOT flat, or broken", file=sys.stderr)  # noqa: T201
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
