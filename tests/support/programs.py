"""Programs that start processes."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn


def exit_on_sigterm() -> None:
    """Makes SIGTERM kill the processes that this one has started, and raise SystemExit in the main thread."""

    def end(number: int, _: object) -> NoReturn:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, or that these have."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread or the process has just ended
            for child in children.read_text().split():
                yield from descendants(int(child))
                yield int(child)
