"""A primary that is cut off from its standby, but not from its clients, answers nothing more."""

import sys
import time
from pathlib import Path

import pytest

from crash.cluster import ClusterSite
from crash.run import run
from crash.site import Plan, Site
from support.etcd import needs_etcd
from support.server import KVPOOL

pytestmark = [needs_etcd, pytest.mark.slow]

CUTS = 3
TAKEOVER_SECONDS = 120.0
PATIENT = ("--standby-timeout-seconds", "60")
"""The primary must not be faster than its standby, and go on alone."""


def cut_off(site: Site) -> None:
    """Cuts the primary off from its standby until there is another one, again and again."""
    assert isinstance(site, ClusterSite)
    for _ in range(CUTS):
        site.wait_for_steps(list(range(site.plan.schedulers)), every=True, count=20)
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


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        pytest.param(KVPOOL, set(), marks=pytest.mark.complete, id="correct"),
        pytest.param(
            (sys.executable, "-m", "crash.sabotage", "open_gate"), {"LOST", "REFUSED", "TWO_OWNERS"}, id="open_gate"
        ),
    ],
)
def test_only_a_gate_that_lets_everything_out_is_found(
    tmp_path: Path, command: tuple[str, ...], kinds: set[str]
) -> None:
    plan = Plan(
        1, 5, 0, num_blocks=130, step_seconds=0.03, journaled=True, is_cluster=True, command=command, options=PATIENT
    )
    found = run(tmp_path, plan, cut_off).kinds
    assert found & kinds if kinds else not found
