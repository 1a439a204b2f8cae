"""Runs vLLM's own unit tests on kvpool. At full depth also on vLLM alone, and writes the page of the documentation.

.venv-vllm-engine/bin/python tests/engine/own/run.py FOLDER --depth change     FOLDER: see fetch.py

The page is of the version that `sdist.txt` locks. For another one set PYTHONPATH as in fetch_package.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[2]))
from engine.environment import VLLM_ENVIRONMENT
from engine.own.expected import OwnTests
from engine.own.fetch import locked_version
from engine.own.made_up_models import write_models
from engine.own.table import Outcomes, page
from kvpool.client.vllm.versions import VERSION
from support.paths import DOCS, TESTS

_PAGE: Final = DOCS / "reference" / "vllm-own-tests.md"
_PROCESSES: Final = "2"


def run(folder: Path, files: Iterable[str], on: str, outcomes: Path, more: Iterable[str]) -> None:
    """Runs files of tests; exits if not all tests did as expected."""
    path = os.pathsep.join(filter(None, (str(folder), str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **VLLM_ENVIRONMENT, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
    settings = ("-c", str(Path(__file__).with_name("pytest.ini")), "--rootdir", str(folder), "-p", "engine.own.plugin")
    command = (sys.executable, "-m", "pytest", *settings, "-n", _PROCESSES, "--dist", "worksteal")
    options = ("--on", on, "--outcomes", str(outcomes), *more)
    done = subprocess.run([*command, *options, *files], cwd=folder, env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--depth", choices=("change", "all"), default="change")
    arguments, more = parser.parse_known_args()
    folder, own_tests = arguments.folder.resolve(), OwnTests.read(VERSION)
    write_models(folder)
    with tempfile.TemporaryDirectory() as results:
        paths = {on: Path(results, f"{on}.json") for on in ("vllm", "kvpool")}
        if arguments.depth == "change":
            run(folder, own_tests.in_change, "kvpool", paths["kvpool"], more)
            return
        for on, path in paths.items():
            run(folder, own_tests.files, on, path, more)
        alone, on_kvpool = (Outcomes(**json.loads(path.read_text())) for path in paths.values())
    if locked_version() == VERSION:
        _PAGE.write_text(page(own_tests, VERSION, alone, on_kvpool))


if __name__ == "__main__":
    main()
