"""Programs that start processes."""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn


def exit_on_sigterm() -> None:
    """Makes SIGTERM kill the processes that this one has started, and raise SystemExit in the main thread."""

    def end(number: int, _: object) -> NoReturn:
        for children in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread or the process has just ended
                for child in children.read_text().split():
                    os.kill(int(child), signal.SIGKILL)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
