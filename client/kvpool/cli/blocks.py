"""`kvpool blocks`."""

from itertools import islice
from typing import Any, Final

import click

from kvpool.cli.connection import connected, limit_option, server_options
from kvpool.cli.tables import Column, print_json, print_table
from kvpool.client.admin import BlockInfo, BlockState

COLUMNS: Final = (
    Column("BLOCK"), Column("STATE", is_text=True), Column("REFS"), Column("GROUP"), Column("SESSION"),
    Column("PENDING"), Column("HASH", is_text=True),
)  # fmt: skip


@click.command()
@click.option("--pool", required=True, metavar="NAME", help="The pool.")
@click.option("--state", type=click.Choice([state.value for state in BlockState]), help="Only blocks in this state.")
@limit_option
@server_options
def blocks(*, pool: str, state: str | None, limit: int | None, address: str, as_json: bool) -> None:
    """List the blocks of a pool: their state, their references and their contents."""
    with connected(address) as client:
        found = list(islice(client.blocks(pool, BlockState(state) if state else None), limit))
    if as_json:
        print_json({"blocks": [block_json(info) for info in found]})
    else:
        print_table(COLUMNS, map(block_row, found))


def block_row(info: BlockInfo) -> tuple[str, ...]:
    """Returns the table row of a block."""
    has_contents = bool(info.block_hash)
    return (
        str(info.block_id),
        info.state.value,
        str(info.ref_cnt),
        str(info.group_id) if has_contents else "-",
        str(info.session_number) if has_contents else "-",
        "yes" if info.pending else "-",
        info.block_hash.hex(),
    )


def block_json(info: BlockInfo) -> dict[str, Any]:
    """Returns a block as JSON. A block without contents has no hash, group and session number."""
    named = {"block_id": info.block_id, "state": info.state.value, "ref_cnt": info.ref_cnt}
    if not info.block_hash:
        return named
    contents = {"block_hash": info.block_hash.hex(), "group_id": info.group_id, "session_number": info.session_number}
    return {**named, **contents, "pending": info.pending}
