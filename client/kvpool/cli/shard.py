"""`kvpool shard`."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import click
import grpc

from kvpool.cli.access import current_access
from kvpool.cli.connection import connected, server_options
from kvpool.cli.health import SERVING, status_of
from kvpool.cli.tables import print_answer, print_json
from kvpool.cli.text import counted, print_line
from kvpool.core.errors import WrongStateError
from kvpool.v1 import allocator_pb2
from kvpool.wire.channels import ClientCredentials

_POLL_SECONDS: Final = 0.5
_CHECK_SECONDS: Final = 2.0
"""Time limit of a primary to answer a health check."""
_PRIMARY_SERVICE: Final = allocator_pb2.DESCRIPTOR.services_by_name["AllocatorService"].full_name
"""A service that a standby does not serve."""


@click.group()
def shard() -> None:
    """Show the primary and its standbys, and change which server is the primary."""


@shard.command("status")
@server_options
def status(*, address: str, as_json: bool) -> None:
    """Show the primary and the standbys.

    A standby answers, too. Asks the primary whether it serves: etcd names a primary that stopped until another takes
    over.
    """
    with connected(address) as client:
        found = client.shard()
    is_serving = _is_serving(current_access(), found.primary_addresses)
    if as_json:
        print_json({"shard": found, "primary_serves": is_serving})
        return
    primary = ", ".join(found.primary_addresses) or "-"
    print_line(f"shard: {found.name or '-'}, term {found.term}")
    print_line(f"primary: {primary}" + ("" if is_serving or primary == "-" else " (does not serve)"))
    standbys = [", ".join(member.addresses) for member in found.members if not member.is_primary]
    print_line("standbys in sync: " + ("; ".join(standbys) or "-"))


@shard.command("hand-over")
@server_options
def hand_over(*, address: str, as_json: bool) -> None:
    """Make an in-sync standby the primary. Sessions continue there; the server starts again as a standby."""
    with connected(address) as client:
        term, primary = client.hand_over()
    text = f"the primary of term {term} is at {', '.join(primary)}"
    print_answer({"term": term, "primary": primary}, text, as_json=as_json)


@shard.command("wait-in-sync")
@click.option("--standbys", type=click.IntRange(1), default=1, help="How many must be in sync.")
@click.option(
    "--wait-seconds",
    type=click.FloatRange(0),
    default=60.0,
    help="How long to wait until the servers are in sync.",
)
@server_options
def wait_in_sync(*, standbys: int, wait_seconds: float, address: str, as_json: bool) -> None:
    """Wait until standbys are in sync.

    For example between the steps of an upgrade. Fails if they are not in time.
    """
    due_seconds = time.monotonic() + wait_seconds
    with connected(address) as client:
        while True:
            found = client.shard()
            count = sum(not member.is_primary for member in found.members)
            text = f"shard {found.name} has {counted(count, 'standby')} in sync"
            if count >= standbys:
                break
            left_seconds = due_seconds - time.monotonic()
            if left_seconds <= 0:
                raise WrongStateError("NO_STANDBY", text)
            time.sleep(min(_POLL_SECONDS, left_seconds))
    print_answer({"shard": found}, text, as_json=as_json)


def _is_serving(access: ClientCredentials, addresses: Sequence[str]) -> bool:
    """Whether a server at one of these addresses serves as a primary."""
    for address in addresses:
        with suppress(grpc.RpcError, ValueError):
            if status_of(access, address, _PRIMARY_SERVICE, _CHECK_SECONDS) == SERVING:
                return True
    return False
