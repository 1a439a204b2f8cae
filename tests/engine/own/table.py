"""The page of the documentation that says what vLLM's own tests show, from the outcomes of both runs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from engine.own.expected import OwnTests

Outcomes = Mapping[str, str]
"""What became of each test, by name: passed, failed, skipped or xfailed."""

_NUMBERS: Final = ("tests", "pass with vLLM alone", "pass on kvpool")
_HEAD: Final = """\
# vLLM's own tests

`make test-vllm-own` fetches the unit tests of vLLM {version} from its source distribution and runs them twice:
with vLLM alone, and with kvpool's schedulers, manager and planner in place of vLLM's. It wrote this page.
Plans are made by both planners, and must be equal. Each test that does not pass is listed with its reason in
`tests/engine/own/own_tests.toml`. A run fails if another test fails, or one of these passes. Files are named by their
path in vLLM's folder of tests.

Tests do not pass with vLLM alone if they need what the environment of `make test-vllm` lacks: a GPU,
torchvision, a model.
"""


def page(own_tests: OwnTests, version: str, alone: Outcomes, on_kvpool: Outcomes) -> str:
    """Writes the page, in Markdown."""
    rows = [
        [shown(file), str(len(names)), *(str(_count(run, names)) for run in (alone, on_kvpool))]
        for file, names in _by_file(own_tests, alone).items()
    ]
    rows.append(["all", str(len(alone)), *(str(_count(run, alone)) for run in (alone, on_kvpool))])
    reasons = Counter(
        (_file_of(name), own_tests.reason(name, on_kvpool=True))
        for name in sorted(alone, key=lambda name: own_tests.files.index(_file_of(name)))
        if alone[name] == "passed" and on_kvpool[name] != "passed"
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
    for name in outcomes:
        by_file[_file_of(name)].append(name)
    return by_file


def _count(outcomes: Outcomes, names: Iterable[str]) -> int:
    return sum(outcomes[name] == "passed" for name in names)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---:" if name in _NUMBERS else "---" for name in head], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
