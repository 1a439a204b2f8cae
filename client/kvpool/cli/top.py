"""`kvpool top`."""

import time
from typing import Final

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvpool.cli import top_sample, top_view
from kvpool.cli.connection import address_option, connected
from kvpool.cli.tables import is_ascii, print_json
from kvpool.cli.terminal import Terminal
from kvpool.cli.text import print_line
from kvpool.cli.top_sample import Feed, Latest
from kvpool.cli.top_view import Screen

_CLOCK_SECONDS: Final = 1.0
"""The interval at which the time since the last answer is updated."""

_PATIENCE_SECONDS: Final = 2.0
"""The delay after which a missing answer is reported."""

_MIN_DEADLINE_SECONDS: Final = 5.0


@click.command()
@address_option
@click.option(
    "--interval",
    "interval_seconds",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    metavar="SECONDS",
    help="Interval between samples.",
)
@click.option("--once", is_flag=True, help="Take two samples, print one view, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per sample and line.")
@click.option("--ranks", "all_ranks", is_flag=True, help="Show all ranks; default: ranks that are not ready.")
def top(*, address: str, interval_seconds: float, once: bool, as_json: bool, all_ranks: bool) -> None:
    """Watch pools, ranks and sessions live; q or Ctrl-C exits.

    Each pool has three lines: state, epoch (e1) and usage; hit rate of prompt tokens over the last 1,000 look-ups and
    over the last interval (now), and rates per second; blocks, sessions, requests, and when the epoch changed. Pools
    with host memory have a fourth: its cached blocks, its share of all tokens hit, and blocks copied there (out) and
    back (in). Used blocks are held by requests; cached blocks are free, but can still be hit; the rest is empty. The
    busiest sessions come first. While the server does not answer, the last view stays, with the time since the last
    answer.

    If the output is not a terminal, or a dumb one, one view is printed per interval. The JSON object holds address,
    server, interval_seconds, pools (as `kvpool pools --json`), per_second (rates by pool), sessions (as `kvpool
    sessions --json`) and session_steps_per_second (by number); or address and error.
    """
    with connected(address, max(_MIN_DEADLINE_SECONDS, interval_seconds)) as client:
        if once:
            before = top_sample.take(client)
            time.sleep(interval_seconds)
            _print(address, top_sample.take(client, before), as_json=as_json, all_ranks=all_ranks)
            return
        console = Console()
        live = console.is_terminal and not console.is_dumb_terminal and not as_json
        with Terminal(keys=live) as terminal:
            feed = Feed(client, interval_seconds, terminal.wake)
            try:
                if live:
                    _show(console, terminal, feed, address, all_ranks=all_ranks)
                else:
                    _print_on(terminal, feed, address, as_json=as_json, all_ranks=all_ranks)
            finally:
                feed.stop()


def _show(console: Console, terminal: Terminal, feed: Feed, address: str, *, all_ranks: bool) -> None:
    """Shows a screen until a key or signal ends it."""
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while not terminal.wait_for_end(_CLOCK_SECONDS):
            size = Screen(console.width, console.height, is_ascii(console), all_ranks)
            shown = _lines(size, feed, address)
            screen.update(Text("\n", no_wrap=True, overflow="crop").join(shown), refresh=True)


def _lines(screen: Screen, feed: Feed, address: str) -> list[Text]:
    latest = feed.latest
    trouble = _trouble(latest, feed.interval_seconds)
    if latest.now is None:
        return top_view.waiting_lines(screen, address, trouble)
    return top_view.lines(screen, address, latest.now, trouble)


def _trouble(latest: Latest, interval_seconds: float) -> str:
    """Returns why the last sample is not current; empty if it is."""
    silent_seconds = time.monotonic() - latest.answered_seconds
    if latest.error is None and silent_seconds < interval_seconds + _PATIENCE_SECONDS:
        return ""
    why = f"{latest.error.reason}: {latest.error}" if latest.error else "the last call has not returned"
    return f"no answer since {silent_seconds:.0f} s: {why}"


def _print_on(terminal: Terminal, feed: Feed, address: str, *, as_json: bool, all_ranks: bool) -> None:
    """Prints a view per sample until a signal ends it."""
    shown = feed.latest
    while not terminal.wait_for_end(_CLOCK_SECONDS):
        latest = feed.latest
        if latest is shown:
            continue
        shown = latest
        if latest.now is not None and latest.error is None:
            _print(address, latest.now, as_json=as_json, all_ranks=all_ranks)
        elif as_json:
            print_json({"address": address, "error": str(latest.error)})
        else:
            print_line(_trouble(latest, feed.interval_seconds))


def _print(address: str, sample: top_sample.Sample, *, as_json: bool, all_ranks: bool) -> None:
    if as_json:
        print_json(top_sample.as_json(address, sample))
        return
    console = Console()
    screen = Screen(console.width, None, is_ascii(console), all_ranks)
    for line in top_view.lines(screen, address, sample):
        console.print(line, no_wrap=True, overflow="crop", highlight=False)
    console.print()
