"""A step costs no more function calls than were accepted."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.step_calls import ACCEPTED, count_calls, excess, measure

PAGE = Path(__file__).parents[2] / "docs/explanation/life-of-a-request.md"


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


def test_the_page_about_one_allocation_names_functions_on_its_way() -> None:
    calls = count_calls("allocation")
    way = [name for side in (calls.client, calls.server) for name in side]
    hops = re.findall(r"^\| \d+ \| `(.*?)` \| (?:`(.*?)`|the same) \|", PAGE.read_text(), re.MULTILINE)
    file = ""
    for function, named in hops:
        file = named or file
        assert (file, function) in way
    assert len(hops) == 22
