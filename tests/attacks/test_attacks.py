"""Each attack for a few seconds: no session is lost, no revoked token accepted, and the server continues."""

import os
import shutil
from pathlib import Path

import pytest

from attacks.attack import Assault, Attack
from attacks.kinds import ATTACKS
from attacks.run import Verdict, judge_speed, run
from attacks.shards import ShardTarget
from attacks.target import TENANTS, Target

SECONDS = 5.0


@pytest.mark.complete
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_no_session(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if ATTACKS[name].is_on_small_disk and os.geteuid():
        pytest.skip("only root can mount a file system")
    if ATTACKS[name].target is ShardTarget and not shutil.which("etcd"):
        pytest.skip("etcd is not installed")
    verdict = run(ATTACKS[name], tmp_path, SECONDS)
    with capsys.disabled():
        print(f"\n{name}: {verdict}")  # noqa: T201
    assert not verdict.violations
    assert verdict.rounds
    assert verdict.pool_changes
    assert verdict.meanwhile or not ATTACKS[name].meanwhile


@pytest.mark.slow
def test_a_lost_session_is_a_violation(tmp_path: Path) -> None:
    def evict(assault: Assault) -> None:
        with assault.target.admin() as admin:
            admin.evict_session(TENANTS[0], next(admin.sessions(TENANTS[0])).session_number)
        assault.is_over.wait()

    verdict = run(Attack(evict), tmp_path, 1.0)
    assert [violation.partition(":")[0] for violation in verdict.violations] == ["AbortedError"]


@pytest.mark.slow
def test_what_an_attack_finds_and_what_others_cannot_do_are_violations(tmp_path: Path) -> None:
    def find(assault: Assault) -> None:
        assault.is_over.wait()
        raise AssertionError("found")

    def refuse(_: Target) -> None:
        raise AssertionError("refused")

    verdict = run(Attack(find, meanwhile=refuse), tmp_path, 1.0)
    assert verdict.violations == ["AssertionError: refused", "AssertionError: found"]
    assert (verdict.meanwhile, verdict.pool_changes > 0) == (0, True)


@pytest.mark.parametrize(
    ("seconds", "attacked_p99_ms", "num_violations"), [(60.0, 35.0, 0), (60.0, 35.1, 1), (59.9, 35.1, 0)]
)
def test_slow_rounds_are_a_violation_of_a_long_attack(
    seconds: float, attacked_p99_ms: float, num_violations: int
) -> None:
    verdict = Verdict(calm_p99_ms=10.0, attacked_p99_ms=attacked_p99_ms)
    judge_speed(verdict, seconds)
    assert len(verdict.violations) == num_violations
