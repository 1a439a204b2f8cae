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
        for pid in _leaves("self"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _leaves(pid: str) -> Iterator[int]:
    """The processes at the ends of the tree under a process; the zygote above them ends by itself."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread or the process has just ended
            for child in children.read_text().split():
                leaves = [*_leaves(child)]
                yield from leaves or [int(child)]
