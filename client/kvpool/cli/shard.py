"""`kvpool shard`."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final

import click
import grpc

from kvpool.cli.access import current_access
from kvpool.cli.connection import connected, server_options
from kvpool.cli.health import SERVING, status_of
from kvpool.cli.shard_moves import moves_to_balance
from kvpool.cli.tables import Column, print_answer, print_json, print_table
from kvpool.cli.text import counted
from kvpool.client.admin import AdminClient, Shard
from kvpool.core.errors import NotFoundError, WrongStateError
from kvpool.v1 import allocator_pb2
from kvpool.wire.channels import ClientCredentials


@dataclass(frozen=True, slots=True)
class _Listed:
    """A shard of the directory, and whether its primary serves: the directory names it after it stopped, too."""

    shard: Shard
    is_serving: bool

    @property
    def primary(self) -> str:
        addresses = ", ".join(self.shard.primary)
        return addresses if self.is_serving or not addresses else f"{addresses} (does not serve)"


_COLUMNS: Final[tuple[Column[_Listed], ...]] = (
    Column("SHARD", lambda row: row.shard.name or "-", is_text=True),
    Column("TERM", lambda row: str(row.shard.term)),
    Column("POOLS", lambda row: str(row.shard.num_pools)),
    Column("PRIMARY", lambda row: row.primary or "-", is_text=True),
    Column("STANDBYS IN SYNC", lambda row: "; ".join(map(", ".join, row.shard.standbys)) or "-", is_text=True),
)
_POLL_SECONDS: Final = 0.5
_wait_seconds: Final = click.option(
    "--wait-seconds",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="How long to wait until the servers are in sync.",
)
_CHECK_SECONDS: Final = 2.0
"""Time limit of a primary to answer a health check."""
_MAX_CHECKS: Final = 32
"""Most primaries that are checked at the same time."""
_PRIMARY_SERVICE: Final = allocator_pb2.DESCRIPTOR.services_by_name["AllocatorService"].full_name
"""A service that a standby does not serve."""


@click.group()
def shard() -> None:
    """Show the shards of a cluster, change which servers are their primaries, and remove lost shards."""


@shard.command("list")
@server_options
def list_shards(*, address: str, as_json: bool) -> None:
    """List the shards of the cluster and their servers.

    A standby answers, too. Asks each primary whether it serves: the cluster's directory names a primary that stopped
    until another takes over.
    """
    with connected(address) as client:
        shards = client.shards()
    access = current_access()
    with ThreadPoolExecutor(_MAX_CHECKS) as threads:
        rows = list(threads.map(lambda shard: _Listed(shard, _is_serving(access, shard.primary)), shards))
    if as_json:
        print_json({"shards": [{**asdict(row.shard), "primary_serves": row.is_serving} for row in rows]})
    else:
        print_table(_COLUMNS, rows)


@shard.command("hand-over")
@server_options
def hand_over(*, address: str, as_json: bool) -> None:
    """Make an in-sync standby the primary. Sessions continue there; the server starts again as a standby."""
    with connected(address) as client:
        answer = client.hand_over()
    _print_primary(answer, as_json=as_json)


@shard.command("wait-in-sync")
@click.argument("name", metavar="SHARD")
@click.option("--standbys", type=click.IntRange(1), default=1, show_default=True, help="How many must be in sync.")
@_wait_seconds
@server_options
def wait_in_sync(*, name: str, standbys: int, wait_seconds: float, address: str, as_json: bool) -> None:
    """Wait until standbys of SHARD are in sync.

    For example between the steps of an upgrade. Fails if they are not in time. A shard that has no server yet may start
    meanwhile.
    """
    due_seconds = time.monotonic() + wait_seconds
    with connected(address) as client:
        while True:
            found = _named(client, name)
            num_in_sync = len(found.standbys) if found else 0
            text = f"shard {name} has {counted(num_in_sync, 'standby')} in sync"
            if found and num_in_sync >= standbys:
                break
            if not _pause(due_seconds):
                raise WrongStateError("NO_STANDBY", text, field="SHARD")
    print_answer({"shard": name, "primary": found.primary, "standbys": found.standbys}, text, as_json=as_json)


@shard.command("move")
@click.argument("name", metavar="SHARD")
@click.argument("to", metavar="HOST:PORT")
@_wait_seconds
@server_options
def move(*, name: str, to: str, wait_seconds: float, address: str, as_json: bool) -> None:
    """Make the server at HOST:PORT the primary of SHARD.

    Pools, sessions and cached prefixes move with it. The server must have been started for the shard. If it has another
    version, it gets the state now. The primary until then continues as a standby.
    """
    due_seconds = time.monotonic() + wait_seconds
    has_tried = False
    with connected(address) as client:
        while True:
            found = _find(client, name)
            if to in found.primary:
                answer = found.term, found.primary
                break
            if any(to in standby for standby in found.standbys):
                answer = _hand_over(found, to)
                break
            if found.primary and not has_tried:
                has_tried = True
                if tried := _try_hand_over(found, to):
                    answer = tried
                    break
            if not _pause(due_seconds):
                message = f"no server of shard {name} at {to} is in sync, or it did not take over in time"
                raise WrongStateError("NO_STANDBY", message, field="HOST:PORT")
    _print_primary(answer, as_json=as_json)


@shard.command("balance")
@click.option("--dry-run", is_flag=True, help="Print the moves only.")
@server_options
def balance(*, dry_run: bool, address: str, as_json: bool) -> None:
    """Balance the pools: move primaries to standbys.

    All hosts then serve about the same number of pools.
    """
    with connected(address) as client:
        moves = moves_to_balance(client.shards())
    for each in moves:
        if not dry_run:
            _hand_over(each.shard, each.to)
        if not as_json:
            click.echo(f"{each.shard.name}: {', '.join(each.shard.primary)} -> {each.to}")
    if as_json:
        print_json({"moves": [{"shard": each.shard.name, "to": each.to} for each in moves], "dry_run": dry_run})
    elif not moves:
        click.echo("nothing to move")


@shard.command("remove")
@click.argument("name", metavar="SHARD")
@server_options
def remove(*, name: str, address: str, as_json: bool) -> None:
    """Remove a shard whose servers are permanently lost.

    The names of its pools are free again. Refused while one of its servers can be reached. Servers that come back
    refuse calls.
    """
    with connected(address) as client:
        num_pools = client.remove_shard(name)
    text = f"shard {name} removed, with {num_pools} pools"
    print_answer({"removed": name, "pools": num_pools}, text, as_json=as_json)


def _pause(due_seconds: float) -> bool:
    """Pauses before the shards are read again; returns False at once if the time has passed."""
    left_seconds = due_seconds - time.monotonic()
    time.sleep(max(0.0, min(_POLL_SECONDS, left_seconds)))
    return left_seconds > 0


def _is_serving(access: ClientCredentials, addresses: Sequence[str]) -> bool:
    """Whether a server at one of these addresses serves as a primary."""
    for address in addresses:
        with suppress(grpc.RpcError, ValueError):
            if status_of(access, address, _PRIMARY_SERVICE, _CHECK_SECONDS) == SERVING:
                return True
    return False


def _named(client: AdminClient, name: str) -> Shard | None:
    return next((each for each in client.shards() if each.name == name), None)


def _find(client: AdminClient, name: str) -> Shard:
    found = _named(client, name)
    if found:
        return found
    raise NotFoundError("SHARD_NOT_FOUND", f"the cluster has no shard {name!r}", field="SHARD")


def _hand_over(found: Shard, to: str) -> tuple[int, tuple[str, ...]]:
    """Makes a standby the primary, whichever server of the shard is the primary now."""
    with connected(",".join((*found.primary, *(each for standby in found.standbys for each in standby)))) as client:
        return client.hand_over(to)


def _try_hand_over(found: Shard, to: str) -> tuple[int, tuple[str, ...]] | None:
    """Makes a server that is not in sync the primary, which only one of another version can become. None if not."""
    try:
        return _hand_over(found, to)
    except WrongStateError as error:
        if error.reason != "NO_STANDBY":
            raise
        return None


def _print_primary(answer: tuple[int, tuple[str, ...]], *, as_json: bool) -> None:
    term, primary = answer
    text = f"the primary of term {term} is at {', '.join(primary)}"
    print_answer({"term": term, "primary": primary}, text, as_json=as_json)
