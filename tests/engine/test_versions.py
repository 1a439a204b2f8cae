"""What the documentation says of this version of vLLM is what is served, compared with vLLM, or refused.

It runs first: where vLLM has changed, it shows within a minute.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.features import FEATURES
from kvpool.client.vllm.versions import SUPPORTED_VERSIONS, VERSION
from support.paths import DOCS

_PAGE = DOCS / "reference" / "vllm-versions.md"
_HEAD = """\
# Versions of vLLM

Features of an engine on kvpool, by version of vLLM. `tests/engine/test_versions.py` writes this table and fails if it
differs.

- **served**: random schedules on kvpool are those of vLLM's own scheduler, step by step and block by block.
- **accepted**: the engine starts. This test compares nothing; the tests in [vLLM adapter](vllm.md#tests) may.
- **refused**: the engine does not start. The message names the feature, with the remedy or reason given here.
- **-**: this version does not have it.

"""

Table = dict[str, dict[str, str]]
"""By feature and version, what becomes of the feature."""


def _read() -> Table:
    lines = [line.strip("|").split("|") for line in _PAGE.read_text().splitlines() if line.startswith("|")]
    (_, *versions), _, *rows = [[cell.strip() for cell in line] for line in lines]
    return {feature: dict(zip(versions, cells, strict=True)) for feature, *cells in rows}


def _write(table: Table) -> None:
    rows = [["feature", *SUPPORTED_VERSIONS], ["---"] * (1 + len(SUPPORTED_VERSIONS))]
    rows += [[name, *(table.get(name, {}).get(each, "not run") for each in SUPPORTED_VERSIONS)] for name in FEATURES]
    _PAGE.write_text(_HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows))


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, str]]:
    """What becomes of features in this version; the page is written again if it says something else."""
    found: dict[str, str] = {}
    yield found
    table = _read()
    changed = {name: {**table.get(name, {}), _column(): cell} for name, cell in found.items()}
    if table != table | changed:
        _write(table | changed)


def _column() -> str:
    return next(each for each in SUPPORTED_VERSIONS if VERSION.startswith(each))


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_served_or_refused_as_documented(
    name: str, address: str, tmp_path: Path, seen: dict[str, str]
) -> None:
    seen[name] = FEATURES[name].seen(address, tmp_path)
    assert _read().get(name, {}).get(_column()) == seen[name]


def test_the_page_lists_these_features() -> None:
    assert list(_read()) == list(FEATURES)
