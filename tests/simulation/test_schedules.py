"""Many schedules of faults cause no violations, and a seed determines its schedule in every process."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.run import run_batch
from simulation.schedule import Schedule
from support import processes

RUN = Path(__file__).with_name("run.py")
SLOW = [pytest.param(first, 40, marks=pytest.mark.slow) for first in (20, 60)]
COMPLETE = [pytest.param(first, 100, marks=pytest.mark.complete) for first in range(100, 2000, 100)]


@pytest.mark.parametrize(("first", "count"), [(0, 20), *SLOW, *COMPLETE])
def test_schedules_of_faults_cause_no_violations(first: int, count: int) -> None:
    summary, found = run_batch(range(first, first + count))

    assert found == []
    assert summary.faults > count
    assert summary.retries > 0, "no answer was ever lost: the faults are too tame"
    assert summary.copies_out > 0, "no pool had host memory"


def test_blocks_return_from_host_memory() -> None:
    summary, found = run_batch((153, 192, 207))

    assert found == []
    assert summary.copies_in > 10


def digest(seed: int) -> str:
    traced: list[str] = []
    Schedule(seed, traced.append).run()
    return hashlib.sha256("\n".join(traced).encode()).hexdigest()


@pytest.mark.parametrize(
    "seed", [pytest.param(7, id="one server"), pytest.param(389, id="a shard", marks=pytest.mark.slow)]
)
def test_a_seed_determines_a_schedule(seed: int) -> None:
    """The order of sets differs between processes and must not influence a schedule."""
    traces = [
        subprocess.run(  # of an interpreter that reads the variable when it starts
            [sys.executable, str(RUN), "--seed", str(seed), "--trace"],
            env={"PYTHONHASHSEED": str(salt), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for salt in (1, 2)
    ]

    assert traces[0] == traces[1]
    assert traces[0].count("\n") > 50


def test_a_seed_determines_a_schedule_after_another_one() -> None:
    before = digest(3)
    digest(4)

    assert digest(3) == before


def test_the_long_run_prints_a_summary() -> None:
    done = processes.run(
        [sys.executable, str(RUN), "--schedules", "4", "--seed", "1000", "--jobs", "2"],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
        text=True,
    )

    summary = json.loads(done.stdout)
    assert (summary["schedules"], summary["violations"]) == (4, 0)
