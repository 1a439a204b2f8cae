"""The page on replication has the table of transitions of the code."""

from kvpool.server.cluster.transitions import TRANSITIONS, Transition
from support.paths import ROOT


def _row(transition: Transition) -> str:
    roles = ", ".join(role.value for role in transition.roles)
    condition, action = (
        each.__name__.strip("_").replace("_", " ") for each in (transition.condition, transition.action)
    )
    return f"| {roles} | {condition} | {transition.becomes.value} | {action} |"


def test_the_page_has_the_table() -> None:
    expected = ["| role | condition | becomes | action |", "|---|---|---|---|", *map(_row, TRANSITIONS)]
    assert "\n".join(expected) in (ROOT / "docs/explanation/replication.md").read_text()
