"""A run against a server with a bug built in must find it; against one without, nothing."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from crash.rest import check_at_rest
from crash.sabotage import BUGS
from crash.site import KVPOOL, Plan, Site
from crash.verdict import judge

SCHEDULERS, STEPS = 3, 300
FINDS = {
    "give_held_blocks": {"TWO_OWNERS", "WRONG_CONTENT"},
    "mix_up_hits": {"WRONG_CONTENT"},
    "publish_at_once": {"WRONG_CONTENT"},
    "forget_answers": {"ANSWERED_DIFFERENTLY"},
    "leak_blocks": {"AT_REST"},
}


def found(folder: Path, *command: str) -> set[str]:
    """The kinds of violations in a run without kills."""
    plan = Plan(seed=1, schedulers=SCHEDULERS, ranks=0, num_blocks=90, command=command)
    with closing(Site(folder, plan)) as site:
        site.start()
        site.wait_for_steps(list(range(SCHEDULERS)), every=True, count=STEPS)
        site.stop_schedulers()
        check_at_rest(site)
    return {line.partition(":")[0] for line in judge(folder, journaled=False).violations}


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    assert not found(tmp_path, *KVPOOL)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(tmp_path: Path, bug: str) -> None:
    assert FINDS[bug] <= found(tmp_path, sys.executable, "-m", "crash.sabotage", bug)
