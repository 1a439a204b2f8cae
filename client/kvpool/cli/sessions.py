"""`kvpool sessions`, and sessions as table rows and JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, Final

import click

from kvpool.cli.connection import connected, limit_option, server_options
from kvpool.cli.tables import Column, print_json, print_table
from kvpool.cli.text import duration
from kvpool.client.admin import SessionInfo

COLUMNS: Final = (
    Column("SESSION"), Column("POOL", is_text=True), Column("CLIENT", is_text=True), Column("RUN"), Column("WAIT"),
    Column("BLOCKS"), Column("STEPS"), Column("AGE"), Column("IDLE"), Column("LEASE"),
)  # fmt: skip
_MAX_GROUPS: Final = 4
"""The number of groups up to which blocks are listed per group."""


@click.command()
@click.option("--pool", default="", show_default=False, metavar="NAME", help="Only sessions of this pool.")
@limit_option
@server_options
def sessions(*, pool: str, limit: int | None, address: str, as_json: bool) -> None:
    """List the sessions of schedulers, in the order in which they were opened."""
    with connected(address) as client:
        found = list(islice(client.sessions(pool), limit))
    if as_json:
        print_json({"sessions": [session_json(info) for info in found]})
    else:
        print_table(COLUMNS, map(session_row, found))


def session_row(info: SessionInfo) -> tuple[str, ...]:
    """Returns the table row of a session."""
    return (
        str(info.session_number),
        info.pool_name,
        info.client_name,
        f"{info.running_requests:,}",
        f"{info.requests - info.running_requests:,}",
        blocks_by_group(info.held_blocks),
        f"{info.sequence:,}",
        duration(info.age_seconds),
        "stream" if info.streaming else duration(info.idle_seconds),
        duration(info.lease_seconds),
    )


def session_json(info: SessionInfo) -> dict[str, Any]:
    """Returns a session as JSON."""
    return {**asdict(info), "held_blocks": list(info.held_blocks)}


def blocks_by_group(held_blocks: Sequence[int]) -> str:
    """Returns the blocks of each group ("40+7"), or their sum if there are many groups."""
    if len(held_blocks) > _MAX_GROUPS:
        return f"{sum(held_blocks):,}"
    return "+".join(f"{count:,}" for count in held_blocks)
