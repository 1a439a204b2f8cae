"""The checks find an injected bug, and nothing in a correct server."""

import signal
import sys
from pathlib import Path

import pytest

from crash.run import run
from crash.site import Plan, Site
from support.server import KVPOOL

SCHEDULERS, STEPS = 5, 250
FINDS = {
    "give_held_blocks": {"TWO_OWNERS", "WRONG_CONTENT"},
    "mix_up_hits": {"WRONG_CONTENT"},
    "forget_answers": {"ANSWERED_DIFFERENTLY"},
    "leak_blocks": {"AT_REST"},
    "lose_records": {"LOST"},
}


def wait(site: Site) -> None:
    """Kills nothing; with a journal the server once."""
    site.wait_for_steps(list(range(SCHEDULERS)), every=True, count=STEPS)
    if site.plan.journaled:
        site.log.write("kill", target="server", how="SIGKILL")
        site.signal_server(signal.SIGKILL)
        site.start_server()


def found(folder: Path, *command: str, journaled: bool = False) -> set[str]:
    """Kinds of violations in a run."""
    plan = Plan(1, SCHEDULERS, 0, num_blocks=130, step_seconds=0.03, journaled=journaled, command=command)
    return run(folder, plan, wait).kinds


@pytest.mark.slow
@pytest.mark.parametrize("journaled", [pytest.param(False, marks=pytest.mark.complete), True])
def test_a_correct_server_has_no_violations(tmp_path: Path, *, journaled: bool) -> None:
    assert not found(tmp_path, *KVPOOL, journaled=journaled)


@pytest.mark.slow
@pytest.mark.parametrize("bug", FINDS)
def test_an_injected_bug_is_found(tmp_path: Path, bug: str) -> None:
    command = (sys.executable, "-m", "crash.sabotage", bug)
    assert FINDS[bug] <= found(tmp_path, *command, journaled=bug == "lose_records")
