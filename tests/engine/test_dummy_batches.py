"""Dummy batches in lent memory, which engines of MoE models run while another data-parallel engine has a step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.forks import run_program
from engine.lending import PoolLender
from engine.models import LFM2, MIXTRAL, write_model
from engine.pairs import Engine

pytestmark = pytest.mark.complete


def run(folder: Path, name: str, attached: Mapping[str, Any], *, has_dummies: bool) -> dict[str, Any]:
    """Runs an engine; see dummy_program.py."""
    llm = {**Engine({}, 97, ()).specification(folder / "model")["llm"], **attached}
    found: dict[str, Any] = run_program("engine.dummy_program", {"llm": llm, "has_dummies": has_dummies}, folder / name)
    return found


@pytest.mark.parametrize("model", [MIXTRAL, LFM2], ids=["experts", "states"])
def test_dummy_batches_write_to_no_block(
    model: Mapping[str, object], folder: Path, address: str, request: pytest.FixtureRequest
) -> None:
    folder /= request.node.callspec.id
    folder.mkdir()
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
