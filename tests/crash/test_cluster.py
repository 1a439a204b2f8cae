"""The servers of a shard are killed, stopped and cut off at random: no acknowledged change and no session is lost."""

import secrets
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from crash.cluster import ClusterSite
from crash.rest import check_at_rest
from crash.run import run, table
from crash.site import Plan
from crash.verdict import judge
from support.etcd import needs_etcd
from support.hosts import needs_hosts
from support.server import KVPOOL

pytestmark = [needs_etcd, pytest.mark.slow]

ISOLATIONS = 12
CUTS = 3
TAKEOVER_SECONDS = 120.0


@pytest.mark.parametrize("kills", [8, pytest.param(25, marks=pytest.mark.complete)])
def test_servers_of_a_shard_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int) -> None:
    plan = Plan(seed=secrets.randbelow(10**6), journaled=True, is_cluster=True)
    verdict = run(tmp_path, plan, kills)
    with capsys.disabled():
        print(f"\nseed {plan.seed}\n{table(verdict)}")  # noqa: T201
    assert not verdict.violations, f"tests/crash/run.py --cluster --kills {kills} --seed {plan.seed}"
    assert verdict.blocks["hit"], "prefixes were shared"


@needs_hosts
@pytest.mark.complete
def test_servers_on_hosts_that_are_cut_off_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(seed=secrets.randbelow(10**6), journaled=True, is_cluster=True, has_hosts=True)
    verdict = run(tmp_path, plan, ISOLATIONS)
    with capsys.disabled():
        print(f"\nseed {plan.seed}\n{table(verdict)}")  # noqa: T201
    assert not verdict.violations, f"tests/crash/run.py --cluster --hosts --kills {ISOLATIONS} --seed {plan.seed}"


def found(folder: Path, *command: str) -> set[str]:
    """Kinds of violations in a run in which the primary is cut off from its standby, but not from its clients."""
    plan = Plan(1, 5, 0, num_blocks=130, step_seconds=0.03, journaled=True, is_cluster=True, command=command)
    everyone = list(range(plan.schedulers))
    # The primary must not be faster than its standby, and go on alone.
    with closing(ClusterSite(folder, plan, ("--standby-timeout-seconds", "60"))) as site:
        site.start()
        for _ in range(CUTS):
            site.wait_for_steps(everyone, every=True, count=20)
            site.wait_in_sync()
            primary = site.pair.primary()
            assert primary.link
            site.log.write("stop", target="server", how="cut both ways", servers=[primary.address])
            primary.link.cut()
            due_seconds = time.monotonic() + TAKEOVER_SECONDS
            while site.pair.primary() is primary:
                assert time.monotonic() < due_seconds, "the standby does not take over"
                site.check_alive()
            primary.link.heal()
            site.wait_in_sync()
        site.wait_for_steps(everyone, every=True)
        site.stop_schedulers()
        check_at_rest(site)
    return {line.partition(":")[0] for line in judge(folder, journaled=True, is_cluster=True).violations}


@pytest.mark.complete
def test_a_primary_that_is_cut_off_answers_nothing_more(tmp_path: Path) -> None:
    assert not found(tmp_path, *KVPOOL)


def test_a_gate_that_lets_everything_out_is_found(tmp_path: Path) -> None:
    assert found(tmp_path, sys.executable, "-m", "crash.sabotage", "open_gate") & {"LOST", "REFUSED", "TWO_OWNERS"}
