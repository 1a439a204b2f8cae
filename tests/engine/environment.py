"""The environment of processes that tests of engines start."""

import os
from pathlib import Path

_TESTS = Path(__file__).parents[1]


def child_environment(**more: str) -> dict[str, str]:
    """This process's, with the tests to import from before what it imports from itself, and more variables."""
    path = os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}
