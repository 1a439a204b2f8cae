"""Programs that start processes."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn


def children(process: int) -> Iterator[int]:
    """The children of a process, except those that end now."""
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            yield from map(int, thread.read_text().split())


def descendants(process: int) -> Iterator[int]:
    """The children of a process, and theirs."""
    for child in children(process):
        yield child
        yield from descendants(child)


def exit_on_sigterm() -> None:
    """Makes SIGTERM kill the descendants of this one, and raise SystemExit in the main thread."""

    def end(number: int, _: object) -> NoReturn:
        for process in list(descendants(os.getpid())):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process, signal.SIGKILL)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
