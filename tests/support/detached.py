"""Processes that a process under test starts and detaches, so that it has no handle of them."""

import contextlib
from pathlib import Path


def detached_pids(program: str, variable: str, value: str) -> list[int]:
    """Returns the processes that run a program with a value of an environment variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            runs_it = program.encode() in (process / "cmdline").read_bytes()
            if runs_it and f"{variable}={value}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def detached_pid(program: str, variable: str, value: str) -> int:
    """Returns the one process that runs a program with a value of an environment variable."""
    (pid,) = detached_pids(program, variable, value)
    return pid
