"""Runs programs in forks of a process that has imported vLLM: the import takes longer than the start of an engine.

A fork differs from a process of its own in how it exits: what is left is not finalized. Tests of how engines end start
processes of their own.
"""

import atexit
import multiprocessing
import os
import runpy
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

DEADLINE_SECONDS = 840
"""Time that a program may take: engines share the machine with others."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["engine.tiny_engine"])


def start(program: str, *arguments: Path, log: Path) -> BaseProcess:
    """Starts `python -m PROGRAM ARGUMENTS`, which writes stdout and stderr to a file."""
    process = _CONTEXT.Process(target=_run, args=(program, [str(each) for each in arguments], log))
    process.start()
    return process


def _run(program: str, arguments: list[str], log: Path) -> None:
    with log.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    assert "vllm" in sys.modules, "it was not imported before the fork"
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)  # a worker of the engine imports it again
    atexit._run_exitfuncs()
