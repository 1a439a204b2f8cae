"""`kvpool remove-pool`."""

import click

from kvpool.cli.connection import connected, server_options
from kvpool.cli.tables import print_answer


@click.command("remove-pool")
@click.option("--pool", required=True, metavar="NAME", help="The pool.")
@server_options
def remove_pool(*, pool: str, address: str, as_json: bool) -> None:
    """Remove a pool, so that its name is free again.

    Refused while the pool has sessions, or ranks that are connected or may still return.
    """
    with connected(address) as client:
        client.remove_pool(pool)
    print_answer({"removed": pool}, f"pool {pool} removed", as_json=as_json)
