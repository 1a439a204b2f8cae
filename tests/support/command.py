"""The `kvpool` command in this process, where a process of its own would show nothing more."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from click.testing import CliRunner

from kvpool.cli import main


@dataclass(frozen=True, slots=True)
class Done:
    """What a command returned and printed."""

    returncode: int
    stdout: str
    stderr: str


def kvpool(*arguments: object, **environment: str) -> Done:
    """Runs a command that starts no server and waits for no signal. A bug in it raises."""
    with _logging_restored():
        result = CliRunner(env=environment).invoke(
            main, [*map(str, arguments)], prog_name="kvpool", catch_exceptions=False
        )
    return Done(result.exit_code, result.stdout, result.stderr)


@contextmanager
def _logging_restored() -> Iterator[None]:
    root, grpc = logging.getLogger(), logging.getLogger("grpc")
    handlers, levels = root.handlers[:], (root.level, grpc.level)
    hooks = sys.excepthook, threading.excepthook
    try:
        yield
    finally:
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        grpc.setLevel(levels[1])
        sys.excepthook, threading.excepthook = hooks
        logging.captureWarnings(capture=False)
