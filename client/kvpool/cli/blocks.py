"""`kvpool blocks`."""

from itertools import islice
from typing import Any, Final

import click

from kvpool.cli.connection import connected, limit_option, server_options
from kvpool.cli.options import enum_option
from kvpool.cli.tables import Column, print_json, print_table
from kvpool.client.admin import BlockInfo, BlockState

COLUMNS: Final[tuple[Column[BlockInfo], ...]] = (
    Column("BLOCK", lambda info: str(info.block_id)),
    Column("STATE", lambda info: info.state.value, is_text=True),
    Column("REFS", lambda info: str(info.ref_cnt)),
    Column("GROUP", lambda info: str(info.group_id) if info.block_hash else "-"),
    Column("SESSION", lambda info: str(info.session_number) if info.block_hash else "-"),
    Column("PENDING", lambda info: "yes" if info.pending else "-"),
    Column("HASH", lambda info: info.block_hash.hex(), is_text=True),
)


@click.command()
@click.option("--pool", required=True, metavar="NAME", help="The pool.")
@enum_option("--state", BlockState, None, "Only blocks in this state.")
@limit_option
@server_options
def blocks(*, pool: str, state: BlockState | None, limit: int | None, address: str, as_json: bool) -> None:
    """List the blocks of a pool: their state, their references and their contents."""
    with connected(address) as client:
        found = list(islice(client.blocks(pool, state), limit))
    if as_json:
        print_json({"blocks": [block_json(info) for info in found]})
    else:
        print_table(COLUMNS, found)


def block_json(info: BlockInfo) -> dict[str, Any]:
    """Returns a block as JSON. A block without contents has no hash, group and session number."""
    named = {"block_id": info.block_id, "state": info.state, "ref_cnt": info.ref_cnt}
    if not info.block_hash:
        return named
    contents = {"block_hash": info.block_hash.hex(), "group_id": info.group_id, "session_number": info.session_number}
    return {**named, **contents, "pending": info.pending}
