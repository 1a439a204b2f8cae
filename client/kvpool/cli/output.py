"""Progress bars and tables."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvpool.replay.play import Console
from kvpool.replay.result import Counts, Result

if TYPE_CHECKING:  # clients have no torch
    from examples.reference_engine.generate import Generation


@contextmanager
def progress(title: str, total: int) -> Iterator[Console]:
    """Shows a bar on stderr, if that is a terminal; complaints go to stderr in any case."""
    screen = RichConsole(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task(title, total=total)

        def complain(sentence: str) -> None:
            bar.console.print(f"kvpool: {sentence}", markup=False, highlight=False, soft_wrap=True)

        yield Console(lambda count: bar.advance(task, count), complain)


def result_table(result: Result) -> None:
    """Prints what a replay counted."""
    counts = result.counts
    rows = [
        ("requests", f"{counts.requests:,}"),
        ("prompt tokens", f"{counts.input_tokens:,}"),
        ("hit tokens", f"{counts.hit_tokens:,}"),
        ("hit rate", f"{result.hit_rate:.2%}"),
        ("evictions", f"{result.evicted_blocks:,} blocks"),
    ]
    if counts.output_tokens:
        rows += [
            ("generated tokens", f"{counts.output_tokens:,}"),
            ("preemptions", f"{counts.preemptions:,}"),
            ("reused from other sessions", f"{counts.shared_hit_tokens:,} tokens"),
        ]
    if counts.rejected_requests:
        rows.append(("requests that do not fit the pool", f"{counts.rejected_requests:,}"))
    rows += [("steps a second", f"{counts.steps / result.seconds:,.0f}"), ("seconds", f"{result.seconds:.1f}")]
    RichConsole().print(two_columns("replay", rows))


def demo_table(result: Result) -> None:
    """Prints what the demo counted."""
    counts, second = result.counts, result.by_session[1] or Counts()
    share = second.shared_hit_tokens / second.input_tokens if second.input_tokens else 0.0
    rows = [
        ("requests", f"{counts.requests:,}"),
        ("hit rate", f"{result.hit_rate:.1%} of {counts.input_tokens:,} prompt tokens"),
        ("evictions", f"{result.evicted_blocks:,} blocks"),
        ("preemptions", f"{counts.preemptions:,}"),
        ("steps a second", f"{counts.steps / result.seconds:,.0f}"),
        (
            "second scheduler's reuse of the first's blocks",
            f"{second.shared_hit_tokens:,} tokens ({share:.1%} of its prompts)",
        ),
    ]
    RichConsole().print(two_columns("two schedulers, one pool", rows))


def generation_table(done: "Generation") -> None:
    """Prints what ranks generated, and whether it is right."""
    counts, pool = done.counts, done.pool
    rows = [
        ("ranks", f"{len(pool.ranks)}, {pool.config.num_blocks} blocks, {pool.state.value}, epoch {pool.epoch}"),
        ("requests", f"{counts.requests:,}"),
        ("generated tokens", f"{counts.output_tokens:,}"),
        ("preemptions", f"{counts.preemptions:,}"),
        ("prompt tokens found in the cache", f"{counts.hit_tokens:,}"),
        ("of these, computed for the other scheduler", f"{counts.shared_hit_tokens:,}"),
        ("requests with the tokens of the same model without a cache", f"{done.equal_requests} of {counts.requests}"),
    ]
    RichConsole().print(two_columns("two ranks, two schedulers, one model", rows))


def two_columns(title: str, rows: list[tuple[str, str]]) -> Table:
    """Makes a table of names and figures."""
    table = Table(title=Text(title), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table
