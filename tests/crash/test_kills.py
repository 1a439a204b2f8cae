"""Servers, schedulers and ranks are killed and stopped at random: nothing is lost, and nothing is given to two."""

import secrets
from pathlib import Path

import pytest

from crash.run import run, table
from crash.site import Plan

KILLS = 50


def test_a_server_that_forgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a journal: sessions that a server forgot end with a clear error, and all begins anew."""
    plan = Plan(seed=secrets.randbelow(10**6))
    verdict = run(tmp_path, plan, KILLS)
    with capsys.disabled():
        print(f"\nseed {plan.seed}\n{table(verdict)}")  # noqa: T201
    assert not verdict.violations, f"tests/crash/run.py --kills {KILLS} --seed {plan.seed}"
    assert verdict.blocks["hit"], "prefixes were shared"
