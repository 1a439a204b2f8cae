"""The page of the documentation that says what vLLM's own tests show, from the outcomes of both runs."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from engine.own.expected import OwnTests

_NUMBERS: Final = ("tests", "pass with vLLM alone", "pass on kvpool", "of these, use kvpool")
_HEAD: Final = """\
# vLLM's own tests

`make test-vllm-own` runs the unit tests of vLLM {version} twice: with vLLM alone, and with kvpool's schedulers, manager
and planner in place of vLLM's. It wrote this page. Plans are made by both planners, and must be equal.
`tests/engine/own/own_tests.toml` lists each test that does not pass, with its reason; a run fails if another test
fails, or one of these passes. The tests of vLLM 0.33.0 run in the same way.

The last column counts tests that used a scheduler, a manager or the planner of kvpool. The other tests of a file are
of parts of vLLM that kvpool does not replace. Tests that do not pass with vLLM alone need a GPU, torchvision or a
model.
"""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What a run showed.

    Attributes:
        outcomes: What became of each test, by name: passed, failed, skipped or xfailed.
        users: The tests that used a scheduler, a manager or the planner of kvpool.
    """

    outcomes: Mapping[str, str]
    users: Collection[str]


def page(own_tests: OwnTests, version: str, alone: Outcomes, on_kvpool: Outcomes) -> str:
    """Writes the page, in Markdown."""
    passed = _passed(alone), _passed(on_kvpool), _passed(on_kvpool).intersection(on_kvpool.users)

    def row(shown_name: str, names: Collection[str]) -> list[str]:
        return [shown_name, str(len(names)), *(str(len(each.intersection(names))) for each in passed)]

    rows = [row(shown(file), names) for file, names in _by_file(own_tests, alone).items()]
    rows.append(row("all", alone.outcomes))
    reasons = Counter(
        (_file_of(name), own_tests.reason(name, on_kvpool=True))
        for name in sorted(passed[0] - passed[1], key=lambda name: (own_tests.files.index(_file_of(name)), name))
    )
    parts = [
        _HEAD.format(version=version),
        _table(["file", *_NUMBERS], rows),
        "## Why tests pass with vLLM alone only\n",
        _table(["file", "tests", "reason"], [[shown(file), str(count), why] for (file, why), count in reasons.items()]),
    ]
    return "\n".join(parts)


def shown(file: str) -> str:
    """Returns how the page names a file."""
    return f"`{file.removeprefix('tests/').removesuffix('.py')}`"


def _file_of(name: str) -> str:
    return name.partition("::")[0]


def _by_file(own_tests: OwnTests, outcomes: Outcomes) -> dict[str, list[str]]:
    by_file: dict[str, list[str]] = {file: [] for file in own_tests.files}
    for name in outcomes.outcomes:
        by_file[_file_of(name)].append(name)
    return by_file


def _passed(run: Outcomes) -> set[str]:
    return {name for name, outcome in run.outcomes.items() if outcome == "passed"}


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---:" if name in _NUMBERS else "---" for name in head], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
