"""`kvpool shard`."""

from typing import Final

import click

from kvpool.cli.connection import connected, server_options
from kvpool.cli.tables import Column, print_answer, print_json, print_table
from kvpool.client.admin import Shard

_COLUMNS: Final[tuple[Column[Shard], ...]] = (
    Column("SHARD", lambda shard: shard.name or "-", is_text=True),
    Column("TERM", lambda shard: str(shard.term)),
    Column("PRIMARY", lambda shard: ", ".join(shard.primary) or "-", is_text=True),
    Column("STANDBYS IN SYNC", lambda shard: "; ".join(map(", ".join, shard.standbys)) or "-", is_text=True),
)


@click.group()
def shard() -> None:
    """Show and change which server of a shard is the primary."""


@shard.command("list")
@server_options
def list_shards(*, address: str, as_json: bool) -> None:
    """List the shards that the server knows, with their primaries and standbys. A standby answers, too."""
    with connected(address) as client:
        shards = client.shards()
    if as_json:
        print_json({"shards": shards})
    else:
        print_table(_COLUMNS, shards)


@shard.command("hand-over")
@server_options
def hand_over(*, address: str, as_json: bool) -> None:
    """Make an in-sync standby the primary. Sessions continue there; the server starts again as a standby."""
    with connected(address) as client:
        term, primary = client.hand_over()
    text = f"the primary of term {term} is at {', '.join(primary)}"
    print_answer({"term": term, "primary": primary}, text, as_json=as_json)
