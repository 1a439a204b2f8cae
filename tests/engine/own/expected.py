"""Which of vLLM's own tests run, and which of them are expected to fail, each with a reason: own_tests.toml.

An entry that names a version of vLLM applies to that version, all others to every version.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

_PATH: Final = Path(__file__).with_name("own_tests.toml")


@dataclass(frozen=True, slots=True)
class OwnTests:
    """The tests to run.

    Attributes:
        files: Their files, below vLLM's folder of tests.
        in_change: Those of the files that a change must pass.
        fails_alone: By test, why it fails here with vLLM alone. It fails on kvpool for the same reason.
        fails_on_kvpool: By test, why it fails on kvpool only.
    """

    files: tuple[str, ...]
    in_change: tuple[str, ...]
    fails_alone: Mapping[str, str] = field(repr=False)
    fails_on_kvpool: Mapping[str, str] = field(repr=False)

    @classmethod
    def read(cls, version: str, path: Path = _PATH) -> Self:
        """Reads what the file says of a version of vLLM.

        Raises:
            ValueError: A test is listed twice, or is not one of a listed file.
        """
        document = tomllib.loads(path.read_text())
        files = tuple(file for group in _of(version, document["files"]) for file in group["files"])
        alone = _by_test(_of(version, document["fails_alone"]), files)
        on_kvpool = _by_test(_of(version, document["fails_on_kvpool"]), files)
        if twice := alone.keys() & on_kvpool.keys():
            raise ValueError(f"listed for vLLM alone and for kvpool: {', '.join(sorted(twice))}")
        return cls(files, tuple(document["in_change"]), alone, on_kvpool)

    def reason(self, test: str, *, on_kvpool: bool) -> str:
        """Returns why a test is expected to fail; empty if it is not."""
        names = (test, test.partition("[")[0])  # a name without parameters stands for all of them
        expected = (self.fails_alone, self.fails_on_kvpool) if on_kvpool else (self.fails_alone,)
        return next((reasons[name] for reasons in expected for name in names if name in reasons), "")

    def unknown(self, tests: Iterable[str]) -> list[str]:
        """Returns the listed tests that are none of those of their files, of which at least one is given."""
        known = {name for test in tests for name in (test, test.partition("[")[0])}
        files = {_file(name) for name in known}
        listed = (*self.fails_alone, *self.fails_on_kvpool)
        return [name for name in listed if _file(name) in files and name not in known]


def _of(version: str, groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (group for group in groups if version.startswith(group.get("version", "")))


def _by_test(groups: Iterable[dict[str, Any]], files: tuple[str, ...]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for group in groups:
        for test in group["tests"]:
            if test in reasons or _file(test) not in files:
                raise ValueError(f"{test} is listed twice, or is not in a listed file")
            reasons[test] = group["reason"]
    return reasons


def _file(test: str) -> str:
    return test.partition("::")[0]
