"""`kvpool remove-pool`."""

import click

from kvpool.cli.connection import connected, server_options
from kvpool.cli.tables import print_answer


@click.command("remove-pool")
@click.argument("name")
@server_options
def remove_pool(*, name: str, address: str, as_json: bool) -> None:
    """Remove the pool NAME, so that the name is free again.

    Refused while the pool has sessions, or ranks that are connected or may still return.
    """
    with connected(address) as client:
        client.remove_pool(name)
    print_answer({"removed": name}, f"pool {name} removed", as_json=as_json)
