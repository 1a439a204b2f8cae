"""Starts programs of these tests in forks of a process that has imported vLLM.

The import takes longer than the start of an engine. A fork differs from a process of its own in how it exits: what is
left is not finalized. Tests of how engines end start processes of their own.
"""

import json
from pathlib import Path
from typing import Any, Self

from engine.environment import ENGINE_ENVIRONMENT
from support import processes

DEADLINE_SECONDS = 840
"""Time that a program may take: engines share the machine with others."""
_IMPORTS = ("engine.tiny_engine", "kvpool.client.vllm")


def start(program: str, *arguments: str, log: Path, **options: Any) -> processes.Running:
    """Starts `python -m PROGRAM ARGUMENTS`, which writes stdout and stderr to a file.

    Args:
        program: A module.
        arguments: Its arguments.
        log: The file.
        options: As for `subprocess.Popen`; a `stdout` among them gets what the program writes there.
    """
    command = (processes.PYTHON, "-m", program, *arguments)
    environment = processes.environment(**ENGINE_ENVIRONMENT)
    with log.open("w") as file:
        options = {"stdout": file, "stderr": file, **options}
        return processes.start(command, imports=_IMPORTS, env=environment, **options)


class Program:
    """A program at work that reads a specification from a file and writes results to another one, both as JSON.

    What it says goes to a third file. At the end of a context it is killed if it still runs.
    """

    def __init__(self, program: str, specification: object, folder: Path) -> None:
        """Starts it, with its files in a folder to make."""
        folder.mkdir()
        self._results, self._log = folder / "results.json", folder / "log"
        given = folder / "specification.json"
        given.write_text(json.dumps(specification))
        self._process = start(program, str(given), str(self._results), log=self._log)

    def results(self) -> Any:
        """Waits until it has ended; returns its results."""
        assert self._process.wait(DEADLINE_SECONDS) == 0, self._log.read_text()
        return json.loads(self._results.read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def run_program(program: str, specification: object, folder: Path) -> Any:
    """Runs a program to its end; returns its results."""
    with Program(program, specification, folder) as started:
        return started.results()
