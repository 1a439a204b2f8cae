"""`kvpool evict-session`."""

import click

from kvpool.cli.connection import connected, server_options
from kvpool.cli.tables import print_answer
from kvpool.cli.text import counted
from kvpool.v1.admin_pb2 import SessionInfo


@click.command("evict-session")
@click.argument("number", type=click.IntRange(1))
@click.option("--pool", required=True, metavar="NAME", help="The pool of the session.")
@click.option("--kill", is_flag=True, help="Kill its processes too. Needs ranks that lend their memory.")
@server_options
def evict_session(*, number: int, pool: str, kill: bool, address: str, as_json: bool) -> None:
    """End the session NUMBER of a pool and take its blocks back.

    For a scheduler that hangs but keeps its lease. A scheduler that works gets an error and opens a new session. With
    --kill also for an ended session whose blocks are in quarantine, because its process hangs.
    """
    with connected(address) as client:
        ended = client.evict_session(pool, number, kill=kill)
    print_answer({"evicted": ended}, _sentence(ended), as_json=as_json)


def _sentence(ended: SessionInfo) -> str:
    name = f" ({ended.client_name!r})" if ended.client_name else ""
    held = f"{counted(ended.requests, 'request')}, {counted(sum(ended.held_blocks), 'block')}"
    return f"session {ended.session_number}{name} of pool {ended.pool_name} ended: {held}"
