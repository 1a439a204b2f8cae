"""Starts programs of these tests in forks of a process that has imported vLLM.

The import takes longer than the start of an engine. A fork differs from a process of its own in how it exits: what is
left is not finalized. Tests of how engines end start processes of their own.
"""

from pathlib import Path
from typing import Any

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
