"""Processes of all kinds are killed and stopped at random: no change is lost, and no block has two owners."""

import secrets
from pathlib import Path

import pytest

from crash.run import run, table
from crash.site import Plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "journaled"),
    [(12, True), *(pytest.param(25, journaled, marks=pytest.mark.complete) for journaled in (False, True))],
)
def test_killed_processes_cause_no_violations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int, *, journaled: bool
) -> None:
    """Without a journal, forgotten sessions end with a clear error; with a journal, they continue."""
    plan = Plan(seed=secrets.randbelow(10**6), lends=True, journaled=journaled)
    verdict = run(tmp_path, plan, kills)
    with capsys.disabled():
        print(f"\nseed {plan.seed}\n{table(verdict)}")  # noqa: T201
    replay = f"tests/crash/run.py --lend --kills {kills} --seed {plan.seed}{' --journal' * journaled}"
    assert not verdict.violations, replay
    assert verdict.blocks["hit"], "prefixes were shared"
