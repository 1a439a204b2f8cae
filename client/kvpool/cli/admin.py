"""The operator's commands: `kvpool pools`, `sessions`, `requests`, `blocks`, `drain`, `reset` and the like.

Each ends with 0 when done, 1 when the server refuses or cannot be reached, 2 when it was called wrongly.
"""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Final

import click

from kvpool.cli import admin_output as output
from kvpool.cli.access import access_options, current_access
from kvpool.cli.options import together
from kvpool.cli.text import counted
from kvpool.client.admin import DEFAULT_DEADLINE_SECONDS, AdminClient, BlockState, SessionInfo
from kvpool.client.errors import UnavailableError
from kvpool.wire.address import DEFAULT_ADDRESS

_POLL_SECONDS: Final = 0.25
"""How often a drain looks whether sessions are left."""

address_option: Final = together(
    click.option(
        "--address",
        default=DEFAULT_ADDRESS,
        show_default=True,
        envvar="KVPOOL_ADDRESS",
        show_envvar=True,
        metavar="ADDRESS",
        help="The server: host:port or unix:/path.",
    ),
    access_options(),
)
"""Adds the options that say where the server is, and what it is shown."""

_server_options: Final = together(
    address_option, click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
)
_limit_option: Final = click.option("--limit", type=click.IntRange(1), help="Only the first so many.")


@contextmanager
def connected(address: str, deadline_seconds: float | None = None) -> Iterator[AdminClient]:
    """Yields a connection to a server; an address of no known form is the caller's mistake."""
    access = current_access()
    try:
        client = AdminClient(
            address,
            deadline_seconds=deadline_seconds or DEFAULT_DEADLINE_SECONDS,
            tls=access.tls,
            token=access.token,
            allow_plaintext=access.allow_plaintext,
        )
    except ValueError as error:
        raise click.UsageError(f"--address: {error}") from error
    with client:
        yield client


@click.command()
@_server_options
def pools(*, address: str, as_json: bool) -> None:
    """List the pools, those that still form included."""
    with connected(address) as client:
        overview = client.overview()
    if as_json:
        server = output.server_json(overview.server)
        _print_json({"server": server, "pools": [output.pool_json(info) for info in overview.pools]})
        return
    output.print_table(*output.pool_table(overview.pools))
    if overview.server.draining:
        click.echo("the server takes no new sessions: it is drained, or stops", err=True)


@click.command()
@click.option("--pool", default="", metavar="NAME", help="Only of this pool.")
@_limit_option
@_server_options
def sessions(*, pool: str, limit: int | None, address: str, as_json: bool) -> None:
    """List the sessions of schedulers, in the order they were opened."""
    with connected(address) as client:
        found = list(islice(client.sessions(pool), limit))
    if as_json:
        _print_json({"sessions": [output.session_json(info) for info in found]})
    else:
        output.print_table(output.SESSION_COLUMNS, map(output.session_row, found))


@click.command()
@click.option("--pool", metavar="NAME", help="Only of this pool.")
@click.option("--session", "session_number", type=click.IntRange(1), help="Only of this session of the pool.")
@_limit_option
@_server_options
def requests(*, pool: str | None, session_number: int | None, limit: int | None, address: str, as_json: bool) -> None:
    """List the requests, session by session, by id."""
    if session_number is not None and pool is None:
        raise click.UsageError("--session needs --pool")
    with connected(address) as client:
        names = [info.config.name for info in client.overview().pools] if pool is None else [pool]
        every = ((name, info) for name in names for info in client.requests(name, session_number or 0))
        found = list(islice(every, limit))
    if as_json:
        _print_json({"requests": [output.request_json(name, info) for name, info in found]})
    else:
        output.print_table(output.REQUEST_COLUMNS, (output.request_row(name, info) for name, info in found))


@click.command()
@click.option("--pool", required=True, metavar="NAME", help="The pool.")
@click.option("--state", type=click.Choice([state.value for state in BlockState]), help="Only blocks in this state.")
@_limit_option
@_server_options
def blocks(*, pool: str, state: str | None, limit: int | None, address: str, as_json: bool) -> None:
    """List the blocks of a pool: who holds them, and what they hold."""
    with connected(address) as client:
        found = list(islice(client.blocks(pool, BlockState(state) if state else None), limit))
    if as_json:
        _print_json({"blocks": [output.block_json(info) for info in found]})
    else:
        output.print_table(output.BLOCK_COLUMNS, map(output.block_row, found))


@click.command()
@click.option("--pool", default="", metavar="NAME", help="Only this pool; default: the server, all its pools.")
@click.option("--undo", is_flag=True, help="Take new sessions again.")
@click.option("--stop", is_flag=True, help="Stop the server when no session is left, or the time is up.")
@click.option("--wait", is_flag=True, help="Wait until no session is left; with --stop, until the server has stopped.")
@click.option(
    "--timeout-seconds",
    type=click.FloatRange(0, 86_400),
    default=300.0,
    show_default=True,
    help="How long to wait for that, or the sessions to be let go on before the stop.",
)
@_server_options
@click.pass_context
def drain(  # noqa: PLR0913 - one parameter an option
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
    """Take no new sessions, while open ones go on until their schedulers close them.

    Ends with 1 if sessions are left when the time to wait is over; the pool stays drained. With --stop the server
    itself waits, and stops when they are closed or the time is up: for rolling upgrades.
    """
    if undo and (wait or stop):
        raise click.UsageError("--undo: goes with neither --wait nor --stop")
    if stop and pool:
        raise click.UsageError("--stop: the whole server stops, leave out --pool")
    what = f"pool {pool}" if pool else "the server"
    with connected(address) as client:
        if undo:
            still = client.undrain(pool)
            _say({"still_drained": list(still)}, _undone(what, still), as_json=as_json)
            return
        if stop:
            uptime_seconds = client.overview().server.uptime_seconds
            left = client.stop(timeout_seconds)
            if wait:
                _wait_until_gone(client, uptime_seconds)
            sentence = f"the server {'has stopped' if wait else 'stops'}; {counted(left, 'session')} were open"
            _say({"stopped": wait, "sessions": left}, sentence, as_json=as_json)
            return
        left = client.drain(pool)
        if wait:
            left = _wait_until_empty(client, pool, left, time.monotonic() + timeout_seconds)
    sentence = f"{what} takes no new sessions; {counted(left, 'session')} still open"
    _say({"drained": True, "sessions": left}, sentence, as_json=as_json)
    ctx.exit(1 if wait and left else 0)


@click.command()
@click.option("--pool", required=True, metavar="NAME", help="The pool.")
@_server_options
@click.pass_context
def reset(ctx: click.Context, *, pool: str, address: str, as_json: bool) -> None:
    """Drop a pool's cached prefixes, if no request holds a block.

    Ends with 1 if some do, and says whose: nothing was dropped then.
    """
    with connected(address) as client:
        holders = client.reset_prefix_cache(pool)
    if as_json:
        _print_json({"reset": not holders, "holders": [output.session_json(info) for info in holders]})
    elif holders:
        click.echo(f"pool {pool} is in use, nothing was dropped; these hold blocks:", err=True)
        output.print_table(output.SESSION_COLUMNS, map(output.session_row, holders))
    else:
        click.echo(f"pool {pool}: prefix cache reset")
    ctx.exit(1 if holders else 0)


@click.command("evict-session")
@click.argument("number", type=click.IntRange(1))
@click.option("--pool", required=True, metavar="NAME", help="The pool that the session is attached to.")
@_server_options
def evict_session(*, number: int, pool: str, address: str, as_json: bool) -> None:
    """End the session NUMBER of a pool and take its blocks back.

    For a scheduler that hangs and keeps its lease. One that is well is told, and opens a new session.
    """
    with connected(address) as client:
        was = client.evict_session(pool, number)
    _say({"evicted": output.session_json(was)}, _evicted(was), as_json=as_json)


@click.command("remove-pool")
@click.argument("name")
@_server_options
def remove_pool(*, name: str, address: str, as_json: bool) -> None:
    """Forget the pool NAME, and free its name.

    Refused while it has sessions, or ranks that are there or waited for.
    """
    with connected(address) as client:
        client.remove_pool(name)
    _say({"removed": name}, f"pool {name} removed", as_json=as_json)


def _wait_until_empty(client: AdminClient, pool: str, left: int, due_seconds: float) -> int:
    """Waits until no session is left, and says on the way how many are; returns how many are when the time is up."""
    while left and time.monotonic() < due_seconds:
        time.sleep(min(_POLL_SECONDS, max(due_seconds - time.monotonic(), 0.0)))
        infos = client.overview().pools
        before, left = left, sum(info.sessions for info in infos if pool in ("", info.config.name))
        if left and left != before:
            click.echo(f"{counted(left, 'session')} left", err=True)
    return left


def _wait_until_gone(client: AdminClient, uptime_seconds: float) -> None:
    """Waits until a server that was up for so long is not there any more, or another is there instead."""
    with suppress(UnavailableError):
        while client.overview().server.uptime_seconds >= uptime_seconds:
            time.sleep(_POLL_SECONDS)


def _undone(what: str, still: Iterable[str]) -> str:
    listed = ", ".join(still)
    if listed:
        return f"{what}: undone; still drained, by name or with the whole server: {listed}"
    return f"{what} takes new sessions again"


def _evicted(was: SessionInfo) -> str:
    name = f" ({was.client_name!r})" if was.client_name else ""
    had = f"{counted(was.requests, 'request')}, {counted(sum(was.held_blocks), 'block')}"
    return f"session {was.session_number}{name} of pool {was.pool_name} ended: {had}"


def _say(answer: dict[str, Any], sentence: str, *, as_json: bool) -> None:
    if as_json:
        _print_json(answer)
    else:
        click.echo(sentence)


def _print_json(answer: dict[str, Any]) -> None:
    click.echo(json.dumps(answer))
