"""The checked-in diagrams are those that `make diagrams` draws."""

import importlib.util

from support.paths import DOCS

FOLDER = DOCS / "images"


def test_diagrams_are_current() -> None:
    spec = importlib.util.spec_from_file_location("diagrams", FOLDER / "diagrams.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, draw in module.DIAGRAMS.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == draw(), f"{name} is out of date: run make diagrams"
