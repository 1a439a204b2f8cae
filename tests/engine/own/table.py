"""The page of the documentation that says what vLLM's own tests show, from the outcomes of both runs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from engine.own.expected import OwnTests

Outcomes = Mapping[str, str]
"""What became of each test, by name: passed, failed, skipped or xfailed."""

_HEAD: Final = """\
# vLLM's own tests

`make test-vllm-own` fetches the unit tests of vLLM {version} from its source distribution and runs them twice:
with vLLM alone, and with kvpool's schedulers, manager and planner in place of vLLM's. It wrote this page.
Plans are made by both planners, and must be equal. Each test that does not pass is listed with its reason in
`tests/engine/own/own_tests.toml`. A run fails if another test fails, or one of these passes.

Tests do not pass with vLLM alone if they need what the environment of `make test-vllm` lacks: a GPU,
torchvision, a model.
"""


def page(own_tests: OwnTests, version: str, alone: Outcomes, on_kvpool: Outcomes) -> str:
    """Writes the page, in Markdown."""
    rows = [
        [f"`{file}`", str(len(names)), *(str(_count(run, names)) for run in (alone, on_kvpool))]
        for file, names in _by_file(own_tests, alone).items()
    ]
    rows.append(["all", str(len(alone)), *(str(_count(run, alone)) for run in (alone, on_kvpool))])
    reasons = Counter(
        own_tests.reason(name, on_kvpool=True)
        for name, outcome in alone.items()
        if outcome == "passed" and on_kvpool[name] != "passed"
    )
    parts = [
        _HEAD.format(version=version),
        _table(["file", "tests", "pass with vLLM alone", "pass on kvpool"], rows),
        "## Why tests pass with vLLM alone only\n",
        _table(["reason", "tests"], [[reason, str(count)] for reason, count in reasons.most_common()]),
    ]
    return "\n".join(parts)


def _by_file(own_tests: OwnTests, outcomes: Outcomes) -> dict[str, list[str]]:
    by_file: dict[str, list[str]] = {file: [] for file in own_tests.files}
    for name in outcomes:
        by_file[name.partition("::")[0]].append(name)
    return by_file


def _count(outcomes: Outcomes, names: Iterable[str]) -> int:
    return sum(outcomes[name] == "passed" for name in names)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
