"""`kvpool top`."""

import json
import time
from typing import Any, Final

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvpool.cli import top_sample, top_view
from kvpool.cli.admin import address_option, connected
from kvpool.cli.terminal import Terminal
from kvpool.cli.top_sample import Feed, Heard, Interval
from kvpool.cli.top_view import Screen

_CLOCK_SECONDS: Final = 1.0
"""How often the time since the last answer is written anew."""

_PATIENCE_SECONDS: Final = 2.0
"""How late an answer may be before it is said."""

_MIN_DEADLINE_SECONDS: Final = 5.0


@click.command()
@address_option
@click.option(
    "--interval",
    "interval_seconds",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="From one look to the next.",
)
@click.option("--once", is_flag=True, help="Look twice, an interval apart, print one view, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a look, one on a line.")
@click.option("--ranks", "all_ranks", is_flag=True, help="Show every rank, not only those that are not ready.")
def top(*, address: str, interval_seconds: float, once: bool, as_json: bool, all_ranks: bool) -> None:
    """Watch pools, ranks and sessions live; q or Ctrl-C ends it.

    A pool's lines: its state, its epoch (e1) and how full it is; the share of prompt tokens found in the cache over the
    last 1,000 look-ups and over the last interval (now), and what it did a second; what it has. Sessions come busiest
    first. While the server does not answer, the last view stays, and says since when.

    Where the output is no terminal, or a dumb one, a view is printed an interval. The JSON object holds address,
    server, interval_seconds, pools (as `kvpool pools --json`, with per_second) and sessions (as `kvpool sessions
    --json`, with steps_per_second); or address and error.
    """
    with connected(address, max(_MIN_DEADLINE_SECONDS, interval_seconds)) as client:
        if once:
            before = top_sample.take(client)
            time.sleep(interval_seconds)
            now = top_sample.take(client)
            happened = top_sample.between(before, now)
            _print(address, now, happened, as_json=as_json, all_ranks=all_ranks)
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
    """Shows a screen until it is time to end."""
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while not terminal.wait(_CLOCK_SECONDS):
            size = Screen(console.width, console.height, _is_ascii(console), all_ranks)
            shown = _lines(size, feed, address)
            screen.update(Text("\n", no_wrap=True, overflow="crop").join(shown), refresh=True)


def _lines(screen: Screen, feed: Feed, address: str) -> list[Text]:
    heard = feed.heard
    trouble = _trouble(heard, feed.interval_seconds)
    if heard.now is None:
        return top_view.waiting_lines(screen, address, trouble)
    return top_view.lines(screen, address, heard.now, heard.interval, trouble)


def _trouble(heard: Heard, interval_seconds: float) -> str:
    """Why it is not known how the server is now; empty if it is."""
    silent_seconds = time.monotonic() - heard.answered_seconds
    if heard.error is None and silent_seconds < interval_seconds + _PATIENCE_SECONDS:
        return ""
    why = f"{heard.error.reason}: {heard.error}" if heard.error else "it was asked and has not answered"
    return f"no answer since {silent_seconds:.0f} s: {why}"


def _print_on(terminal: Terminal, feed: Feed, address: str, *, as_json: bool, all_ranks: bool) -> None:
    """Prints a view for each look until it is time to end."""
    shown = feed.heard
    while not terminal.wait(_CLOCK_SECONDS):
        heard = feed.heard
        if heard is shown:
            continue
        shown = heard
        if heard.now is not None and heard.error is None:
            _print(address, heard.now, heard.interval, as_json=as_json, all_ranks=all_ranks)
        elif as_json:
            _print_json({"address": address, "error": str(heard.error)})
        else:
            click.echo(_trouble(heard, feed.interval_seconds))


def _print(address: str, sample: top_sample.Sample, interval: Interval, *, as_json: bool, all_ranks: bool) -> None:
    if as_json:
        _print_json(top_sample.as_json(address, sample, interval))
        return
    console = Console()
    screen = Screen(console.width, None, _is_ascii(console), all_ranks)
    for line in top_view.lines(screen, address, sample, interval):
        console.print(line, no_wrap=True, overflow="crop", highlight=False)
    console.print()


def _print_json(answer: dict[str, Any]) -> None:
    click.echo(json.dumps(answer))


def _is_ascii(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")
