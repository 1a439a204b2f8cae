"""Runs schedules of the simulation until one finds a violation or all are done; prints a JSON summary.

`run.py --schedules 100000 --jobs 2` is the long run; `run.py --seed S --trace` replays one schedule, event by event.
"""

import contextlib
import gc
import json
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[1]))
from simulation.gpu import Violation
from simulation.schedule import Schedule

_TOLD = 50
"""Maximum number of printed violations."""
_BATCH = 50
"""Schedules between two garbage collections, which would otherwise take a tenth of the time."""


@dataclass(slots=True)
class Summary:
    """Sums over many schedules."""

    schedules: int = 0
    events: int = 0
    answers: int = 0
    retries: int = 0
    faults: int = 0
    shards: int = 0
    takeovers: int = 0
    copies_out: int = 0
    copies_in: int = 0
    virtual_seconds: float = 0.0
    violations: int = 0


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Disables the log and the garbage collector, and restores both."""
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


@_undisturbed()
def run_batch(seeds: Iterable[int]) -> tuple[Summary, list[tuple[int, str]]]:
    """Runs some schedules; returns their sums, and the violations by seed."""
    summary, found = Summary(), []
    for seed in seeds:
        summary.schedules += 1
        try:
            report = Schedule(seed).run()
        except Violation as violation:
            summary.violations += 1
            found.append((seed, str(violation)))
            continue
        summary.events += report.num_events
        summary.answers += report.num_answers
        summary.retries += report.num_retries
        summary.faults += report.num_faults
        summary.shards += report.num_terms > 0
        summary.takeovers += max(report.num_terms - 1, 0)
        summary.copies_out += report.num_copies_out
        summary.copies_in += report.num_copies_in
        summary.virtual_seconds += report.virtual_seconds
    gc.collect()
    return summary, found


def _batches(first: int, count: int) -> Iterator[range]:
    for start in range(first, first + count, _BATCH):
        yield range(start, min(start + _BATCH, first + count))


@click.command()
@click.option("--schedules", default=1000, show_default=True, help="How many schedules to run.")
@click.option("--seed", default=0, show_default=True, help="Seed of the first; each next one is one more.")
@click.option("--jobs", default=1, show_default=True, help="Processes to run them in.")
@click.option("--trace", is_flag=True, help="Run the schedule of --seed alone, and tell all that happens in it.")
def main(schedules: int, seed: int, jobs: int, trace: bool) -> None:  # noqa: FBT001 - click passes a flag
    """Runs schedules of the simulation."""
    if trace:
        logging.disable(logging.CRITICAL)
        print(Schedule(seed, print).run())  # noqa: T201 - a command
        return
    began_seconds = time.monotonic()
    total = Summary()
    console = Console(stderr=True)
    with multiprocessing.Pool(jobs) as pool, Progress(console=console) as progress:
        task = progress.add_task("schedules", total=schedules)
        for summary, found in pool.imap_unordered(run_batch, _batches(seed, schedules)):
            for failed, what in found[: max(0, _TOLD - total.violations)]:
                console.print(f"seed {failed}: {what}", markup=False, highlight=False, soft_wrap=True)
                console.print(f"  python tests/simulation/run.py --seed {failed} --trace", markup=False)
            for name in asdict(summary):
                setattr(total, name, getattr(total, name) + getattr(summary, name))
            progress.advance(task, summary.schedules)
    seconds = time.monotonic() - began_seconds
    figures = {**asdict(total), "seconds": round(seconds, 1), "schedules_per_second": round(schedules / seconds, 1)}
    print(json.dumps(figures, indent=1))  # noqa: T201 - a command
    sys.exit(1 if total.violations else 0)


if __name__ == "__main__":
    main()
