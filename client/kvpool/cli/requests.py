"""`kvpool requests`."""

from dataclasses import asdict
from itertools import islice
from typing import Any, Final

import click

from kvpool.cli.connection import connected, limit_option, server_options
from kvpool.cli.sessions import blocks_by_group
from kvpool.cli.tables import Column, print_json, print_table
from kvpool.client.admin import RequestInfo

COLUMNS: Final = (
    Column("SESSION"), Column("POOL", is_text=True), Column("REQUEST", is_text=True), Column("TOKENS"),
    Column("COMPUTED"), Column("BLOCKS"), Column("PREEMPTED"), Column("LORA", is_text=True),
)  # fmt: skip


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
        print_json({"requests": [_json(name, info) for name, info in found]})
    else:
        print_table(COLUMNS, (_row(name, info) for name, info in found))


def _row(pool: str, info: RequestInfo) -> tuple[str, ...]:
    return (
        str(info.session_number),
        pool,
        info.request_id,
        f"{info.num_tokens:,}",
        f"{info.num_computed_tokens:,}",
        blocks_by_group(info.held_blocks),
        f"{info.num_preemptions:,}",
        info.lora_name,
    )


def _json(pool: str, info: RequestInfo) -> dict[str, Any]:
    return {"pool_name": pool, **asdict(info), "held_blocks": list(info.held_blocks)}
