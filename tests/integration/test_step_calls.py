"""A step costs no more function calls than were accepted."""

import json

import pytest

from benchmarks.step_calls import ACCEPTED, excess, measure


@pytest.mark.slow
def test_a_step_has_no_more_calls_than_were_accepted() -> None:
    """If a change is worth its calls: `python -m benchmarks.step_calls --accept`, with a line in CHANGELOG.md."""
    found = measure()
    print(json.dumps(found))  # noqa: T201 - shown if it fails
    assert not excess(found, json.loads(ACCEPTED.read_text()))


def test_one_more_call_in_sixteen_is_noticed() -> None:
    accepted = json.loads(ACCEPTED.read_text())
    for step, figures in accepted.items():
        assert not excess({step: figures}, accepted)
        for figure in ("client_calls", "server_calls"):
            more = {**figures, figure: figures[figure] * 17 / 16 + 1}
            (line,) = excess({step: more}, accepted)
            assert line.startswith(f"{step}: {figure} ")
