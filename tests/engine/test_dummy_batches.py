"""Dummy batches in lent memory, which engines of MoE models run while another data-parallel engine has a step."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from engine.forks import DEADLINE_SECONDS, start
from engine.lending import PoolLender
from engine.models import LFM2, MIXTRAL, write_model
from engine.pairs import Engine

pytestmark = pytest.mark.complete


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as path:  # shorter than tmp_path: the address of a socket is limited
        yield Path(path)


def run(folder: Path, name: str, attached: Mapping[str, Any], *, has_dummies: bool) -> dict[str, Any]:
    """Runs an engine; see dummy_program.py."""
    llm = {**Engine({}, 97, frozenset(), ()).specification(folder / "model")["llm"], **attached}
    specification, results, log = (folder / f"{name}.{kind}" for kind in ("json", "results", "log"))
    specification.write_text(json.dumps({"llm": llm, "has_dummies": has_dummies}))
    process = start("engine.dummy_program", str(specification), str(results), log=log)
    try:
        assert process.wait(DEADLINE_SECONDS) == 0, log.read_text()
    finally:
        process.kill()
    found: dict[str, Any] = json.loads(results.read_text())
    return found


@pytest.mark.parametrize("model", [MIXTRAL, LFM2], ids=["experts", "states"])
def test_dummy_batches_write_to_no_block(
    model: Mapping[str, object], folder: Path, address: str, request: pytest.FixtureRequest
) -> None:
    write_model(model, folder / "model")
    alone = run(folder, "alone", {}, has_dummies=False)
    lender = PoolLender(folder, address)
    try:
        settings = lender.settings(f"dummies-{request.node.callspec.id}")
        lent = run(folder, "lent", settings, has_dummies=True)
    finally:
        lender.stop()
    *dummies, step = lent["changed"]
    assert dummies == [0, 0, 0]
    assert step
    assert lent["tokens"] == alone["tokens"]
