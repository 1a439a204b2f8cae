"""`kvpool requests`."""

from itertools import islice
from typing import Final

import click

from kvpool.cli.connection import connected, limit_option, server_options
from kvpool.cli.sessions import blocks_by_group
from kvpool.cli.tables import Column, print_json, print_table
from kvpool.v1.admin_pb2 import RequestInfo
from kvpool.wire.readable import message_json

COLUMNS: Final[tuple[Column[tuple[str, RequestInfo]], ...]] = (
    Column("SESSION", lambda row: str(row[1].session_number)),
    Column("POOL", lambda row: row[0], is_text=True),
    Column("REQUEST", lambda row: row[1].request_id, is_text=True),
    Column("TOKENS", lambda row: f"{row[1].num_tokens:,}"),
    Column("COMPUTED", lambda row: f"{row[1].num_computed_tokens:,}"),
    Column("BLOCKS", lambda row: blocks_by_group(row[1].held_blocks)),
    Column("RESERVE", lambda row: f"{row[1].reserve_blocks:,}"),
    Column("PREEMPTED", lambda row: f"{row[1].num_preemptions:,}"),
    Column("LORA", lambda row: row[1].lora_name, is_text=True),
)
"""Columns of pairs: the name of a pool and a request."""


@click.command()
@click.option("--pool", metavar="NAME", help="Only requests of this pool.")
@click.option("--session", "session_number", type=click.IntRange(1), help="Only requests of this session of the pool.")
@limit_option
@server_options
def requests(*, pool: str | None, session_number: int | None, limit: int | None, address: str, as_json: bool) -> None:
    """List the requests by session and id."""
    if session_number is not None and pool is None:
        raise click.UsageError("--session needs --pool")
    with connected(address) as client:
        names = [info.config.name for info in client.overview().pools] if pool is None else [pool]
        every = ((name, info) for name in names for info in client.requests(name, session_number or 0))
        found = list(islice(every, limit))
    if as_json:
        print_json({"requests": [{"pool_name": name, **message_json(info)} for name, info in found]})
    else:
        print_table(COLUMNS, found)
