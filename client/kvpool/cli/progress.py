"""The progress of a command on stderr: a bar on a terminal, else lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from kvpool.cli.text import print_line

_LINE_SECONDS: Final = 10.0
"""The interval of lines where there is no terminal."""


@contextmanager
def progress(title: str, total: int, unit: str = "requests") -> Iterator[Callable[[int], None]]:
    """Shows how many units are done, in a bar on a terminal and else every 10 s. Yields what counts further units."""
    screen = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    done, printed_seconds = 0, time.monotonic()
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task(title, total=total)

        def advance(count: int) -> None:
            nonlocal done, printed_seconds
            done += count
            bar.advance(task, count)
            if not screen.is_terminal and time.monotonic() - printed_seconds >= _LINE_SECONDS:
                printed_seconds = time.monotonic()
                print_line(f"kvpool: {title}: {done:,} of {total:,} {unit}", err=True)

        yield advance
