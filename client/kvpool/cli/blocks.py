"""`kvpool blocks`."""

from itertools import islice
from typing import Final

import click

from kvpool.cli.connection import connected, limit_option, server_options
from kvpool.cli.tables import Column, print_json, print_table
from kvpool.v1.admin_pb2 import BLOCK_STATE_UNSPECIFIED, BlockInfo, BlockState

_STATES: Final = {
    "used": BlockState.BLOCK_STATE_USED,
    "cached": BlockState.BLOCK_STATE_CACHED,
    "empty": BlockState.BLOCK_STATE_FREE,  # as people read it: counts of free blocks include cached ones
}
_WORDS: Final = {state: word for word, state in _STATES.items()}
COLUMNS: Final[tuple[Column[BlockInfo], ...]] = (
    Column("BLOCK", lambda info: str(info.block_id)),
    Column("STATE", lambda info: _WORDS.get(info.state, "unknown"), is_text=True),
    Column("REFS", lambda info: str(info.ref_cnt)),
    Column("GROUP", lambda info: str(info.group_id) if info.block_hash else "-"),
    Column("SESSION", lambda info: str(info.session_number) if info.block_hash else "-"),
    Column("PENDING", lambda info: "yes" if info.pending else "-"),
    Column("HASH", lambda info: info.block_hash.hex(), is_text=True),
)
TIER: Final[Column[BlockInfo]] = Column("TIER", lambda info: "host" if info.in_host_memory else "device", is_text=True)


@click.command()
@click.option("--pool", required=True, metavar="NAME", help="The pool.")
@click.option("--state", type=click.Choice(list(_STATES)), help="Only blocks in this state.")
@limit_option
@server_options
def blocks(*, pool: str, state: str | None, limit: int | None, address: str, as_json: bool) -> None:
    """List the blocks of a pool: their state, their references and their contents.

    Blocks of host memory follow the others. Their references are copies that may use them.
    """
    with connected(address) as client:
        found = list(islice(client.blocks(pool, _STATES[state] if state else BLOCK_STATE_UNSPECIFIED), limit))
    if as_json:
        print_json({"blocks": found})
    else:
        has_host = any(info.in_host_memory for info in found)
        print_table((*COLUMNS[:1], TIER, *COLUMNS[1:]) if has_host else COLUMNS, found)
