"""`kvpool sessions`, and the columns of tables of sessions."""

from collections.abc import Sequence
from itertools import islice
from typing import Final

import click

from kvpool.cli.connection import connected, limit_option, server_options
from kvpool.cli.options import text_option
from kvpool.cli.tables import Column, print_json, print_table
from kvpool.cli.text import duration
from kvpool.v1.admin_pb2 import SessionInfo

COLUMNS: Final[tuple[Column[SessionInfo], ...]] = (
    Column("SESSION", lambda info: str(info.session_number)),
    Column("POOL", lambda info: info.pool_name, is_text=True),
    Column("CLIENT", lambda info: info.client_name or "-", is_text=True),
    Column("RUN", lambda info: f"{info.running_requests:,}"),
    Column("WAIT", lambda info: f"{info.requests - info.running_requests:,}"),
    Column("BLOCKS", lambda info: blocks_by_group(info.held_blocks)),
    Column("RESERVE", lambda info: f"{info.reserve_tokens:,}"),
    Column("STEPS", lambda info: f"{info.sequence:,}"),
    Column("AGE", lambda info: duration(info.age_seconds)),
    Column("IDLE", lambda info: "stream" if info.streaming else duration(info.idle_seconds)),
    Column("LEASE", lambda info: duration(info.lease_seconds)),
)
WEIGHTS: Final[Column[SessionInfo]] = Column("WEIGHTS", lambda info: info.weights_version or "-", is_text=True)
_MAX_GROUPS: Final = 4
"""The number of groups up to which blocks are listed per group."""


@click.command()
@text_option("--pool", "NAME", "Only sessions of this pool.")
@limit_option
@server_options
def sessions(*, pool: str, limit: int | None, address: str, as_json: bool) -> None:
    """List the sessions of schedulers, in the order in which they were opened."""
    with connected(address) as client:
        found = list(islice(client.sessions(pool), limit))
    if as_json:
        print_json({"sessions": found})
    else:
        print_table(session_columns(found), found)


def session_columns(infos: Sequence[SessionInfo]) -> tuple[Column[SessionInfo], ...]:
    """Returns the columns of a table of sessions: also of weights versions, if there are any."""
    return (*COLUMNS, WEIGHTS) if any(info.weights_version for info in infos) else COLUMNS


def blocks_by_group(held_blocks: Sequence[int]) -> str:
    """Returns the blocks of each group ("40+7"), or their sum if there are many groups."""
    if len(held_blocks) > _MAX_GROUPS:
        return f"{sum(held_blocks):,}"
    return "+".join(f"{count:,}" for count in held_blocks)
