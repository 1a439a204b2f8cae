"""`kvpool reset`."""

import click

from kvpool.cli.connection import connected, server_options
from kvpool.cli.sessions import session_columns
from kvpool.cli.tables import print_json, print_table
from kvpool.cli.text import print_line


@click.command()
@click.option("--pool", required=True, metavar="NAME", help="The pool.")
@server_options
@click.pass_context
def reset(ctx: click.Context, *, pool: str, address: str, as_json: bool) -> None:
    """Drop the cached prefixes of a pool in which no request holds blocks.

    If requests hold blocks, drops nothing, lists their sessions and exits with 1.
    """
    with connected(address) as client:
        holders = client.reset_prefix_cache(pool)
    if as_json:
        print_json({"reset": not holders, "holders": list(holders)})
    elif holders:
        print_line(f"pool {pool} is in use, nothing was dropped; these hold blocks:", err=True)
        print_table(session_columns(holders), holders)
    else:
        print_line(f"pool {pool}: prefix cache reset")
    ctx.exit(1 if holders else 0)
