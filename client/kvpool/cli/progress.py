"""A progress bar on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from kvpool.replay.processes import Reporter


@contextmanager
def progress(title: str, total: int) -> Iterator[Reporter]:
    """Shows a bar on stderr if that is a terminal; failures are always printed to stderr."""
    screen = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task(title, total=total)

        def complain(sentence: str) -> None:
            bar.console.print(f"kvpool: {sentence}", markup=False, highlight=False, soft_wrap=True)

        yield Reporter(lambda count: bar.advance(task, count), complain)
