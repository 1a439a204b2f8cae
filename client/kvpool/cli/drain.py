"""`kvpool drain`."""

import time
from contextlib import suppress
from typing import Final

import click

from kvpool.cli.connection import connected, server_options
from kvpool.cli.options import text_option
from kvpool.cli.tables import print_answer
from kvpool.cli.text import counted, print_line
from kvpool.client.admin import AdminClient
from kvpool.core.errors import UnavailableError

_POLL_SECONDS: Final = 0.25
"""The interval between checks for open sessions."""


@click.command()
@text_option("--pool", "NAME", "Only this pool; default: the server with all its pools.")
@click.option("--undo", is_flag=True, help="Accept new sessions again.")
@click.option("--stop", is_flag=True, help="Stop the server when no session is open or the timeout ends.")
@click.option("--wait", is_flag=True, help="Wait until no session is open; with --stop, until the server has stopped.")
@click.option(
    "--timeout-seconds",
    type=click.FloatRange(0, 86_400),
    default=300.0,
    help="Maximum time to wait; with --stop, how long open sessions may continue.",
)
@server_options
@click.pass_context
def drain(  # noqa: PLR0913 - one parameter per option
    ctx: click.Context,
    *,
    pool: str,
    undo: bool,
    stop: bool,
    wait: bool,
    timeout_seconds: float,
    address: str,
    as_json: bool,
) -> None:
    """Accept no new sessions, while open sessions continue until their schedulers close them.

    Exits with 1 if sessions are still open when --wait times out; the pool stays drained. With --stop the server
    itself waits, and stops when all sessions are closed or the timeout ends. Use it for rolling upgrades.
    """
    if undo and (wait or stop):
        raise click.UsageError("--undo: cannot be combined with --wait or --stop")
    if stop and pool:
        raise click.UsageError("--stop: stops the whole server, leave out --pool")
    subject = f"pool {pool}" if pool else "the server"
    with connected(address) as client:
        if undo:
            still = list(client.undrain(pool))
            print_answer({"still_drained": still}, _undone(subject, still), as_json=as_json)
            return
        if stop:
            uptime_seconds, server = client.overview().server.uptime_seconds, client.server
            left = client.stop(timeout_seconds)
            if wait:
                _wait_until_stopped(client, uptime_seconds, server)
            sentence = f"the server {'has stopped' if wait else 'stops'}; {counted(left, 'session')} were open"
            print_answer({"stopped": wait, "sessions": left}, sentence, as_json=as_json)
            return
        left = client.drain(pool)
        if wait:
            left = _wait_until_empty(client, pool, left, time.monotonic() + timeout_seconds)
    sentence = f"{subject} takes no new sessions; {counted(left, 'session')} still open"
    print_answer({"drained": True, "sessions": left}, sentence, as_json=as_json)
    ctx.exit(1 if wait and left else 0)


def _wait_until_empty(client: AdminClient, pool: str, left: int, due_seconds: float) -> int:
    """Waits until no session is open, and prints how many are; returns the number of open sessions at the end."""
    while left and time.monotonic() < due_seconds:
        time.sleep(min(_POLL_SECONDS, max(due_seconds - time.monotonic(), 0.0)))
        infos = client.overview().pools
        before, left = left, sum(info.sessions for info in infos if pool in ("", info.config.name))
        if left and left != before:
            print_line(f"{counted(left, 'session')} left", err=True)
    return left


def _wait_until_stopped(client: AdminClient, uptime_seconds: float, server: str) -> None:
    """Waits until a server with this uptime cannot be reached, or has been replaced by another."""
    with suppress(UnavailableError):
        while client.overview().server.uptime_seconds >= uptime_seconds and client.server == server:
            time.sleep(_POLL_SECONDS)


def _undone(subject: str, still: list[str]) -> str:
    if still:
        return f"{subject}: undone; still drained, by name or with the whole server: {', '.join(still)}"
    return f"{subject} takes new sessions again"
