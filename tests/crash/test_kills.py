"""Servers, schedulers and ranks are killed and stopped at random: nothing is lost, and nothing is given to two."""

import secrets
from pathlib import Path

import pytest

from crash.run import run, table
from crash.site import Plan

KILLS = 25


@pytest.mark.parametrize("journaled", [False, True], ids=["forgetful", "journaled"])
def test_killed_processes_cause_no_violations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, journaled: bool
) -> None:
    """Without a journal sessions that the server forgot end with a clear error; with one they go on."""
    plan = Plan(seed=secrets.randbelow(10**6), journaled=journaled)
    verdict = run(tmp_path, plan, KILLS)
    with capsys.disabled():
        print(f"\nseed {plan.seed}\n{table(verdict)}")  # noqa: T201
    replay = f"tests/crash/run.py --kills {KILLS} --seed {plan.seed}{' --journal' * journaled}"
    assert not verdict.violations, replay
    assert verdict.blocks["hit"], "prefixes were shared"
