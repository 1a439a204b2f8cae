"""`kvpool pools`, and pools as table rows and JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import click

from kvpool.cli.connection import connected, server_options
from kvpool.cli.tables import Column, print_json, print_table
from kvpool.cli.text import percent
from kvpool.client import PoolInfo, RankInfo
from kvpool.client.admin import ServerInfo

COLUMNS: Final = (
    Column("POOL", is_text=True), Column("STATE", is_text=True), Column("EPOCH"), Column("BLOCKS"), Column("USED"),
    Column("CACHED"), Column("HIT"), Column("SESSIONS"), Column("RUN"), Column("WAIT"), Column("RANKS"),
)  # fmt: skip


@click.command()
@server_options
def pools(*, address: str, as_json: bool) -> None:
    """List the pools, including those that still form."""
    with connected(address) as client:
        overview = client.overview()
    if as_json:
        print_json({"server": server_json(overview.server), "pools": [pool_json(info) for info in overview.pools]})
        return
    print_table(*pool_table(overview.pools))
    if overview.server.draining:
        click.echo("the server takes no new sessions: it is drained, or stops", err=True)


def pool_row(info: PoolInfo) -> tuple[str, ...]:
    """Returns the table row of a pool."""
    usable = usable_blocks(info)
    ready = sum(rank.state.value == "ready" for rank in info.ranks)
    return (
        info.config.name,
        info.state.value,
        str(info.epoch),
        f"{usable:,}",
        percent(info.usage),
        percent(info.cached_blocks / usable if usable else 0.0),
        percent(info.recent_hit_rate),
        f"{info.sessions:,}",
        f"{info.running_requests:,}",
        f"{info.requests - info.running_requests:,}",
        f"{ready}/{len(info.ranks)}" if info.ranks else "-",
    )


def pool_table(infos: Sequence[PoolInfo]) -> tuple[Sequence[Column], list[Sequence[str]]]:
    """Returns columns and rows. A column of quarantined blocks is added if there are any."""
    rows = [pool_row(info) for info in infos]
    if not any(info.quarantined_blocks for info in infos):
        return COLUMNS, [*rows]
    quarantined = (f"{info.quarantined_blocks:,}" for info in infos)
    return (*COLUMNS, Column("QUARANTINED")), [(*row, cell) for row, cell in zip(rows, quarantined, strict=True)]


def usable_blocks(info: PoolInfo) -> int:
    """Returns the blocks of a pool without the null block; 0 while the pool forms."""
    return max(info.config.num_blocks - 1, 0)


def server_json(info: ServerInfo) -> dict[str, Any]:
    """Returns a server as JSON."""
    return asdict(info)


def pool_json(info: PoolInfo) -> dict[str, Any]:
    """Returns a pool as JSON. Names and counts are those of the metrics."""
    usable = usable_blocks(info)
    return {
        "name": info.config.name,
        "state": info.state.value,
        "epoch": info.epoch,
        "memory_id": info.memory_id,
        "blocks": usable,
        "free_blocks": info.free_blocks,
        "used_blocks": usable - info.free_blocks,
        "cached_blocks": info.cached_blocks,
        "quarantined_blocks": info.quarantined_blocks,
        "quarantined_sessions": info.quarantined_sessions,
        "usage_ratio": info.usage,
        "max_model_len": info.config.max_model_len,
        "sessions": info.sessions,
        "running_requests": info.running_requests,
        "waiting_requests": info.requests - info.running_requests,
        "recent_hit_ratio": info.recent_hit_rate,
        "evicted_blocks": info.evicted_blocks,
        "preemptions": info.preemptions,
        "prefix_cache": asdict(info.prefix_cache),
        "activity": asdict(info.activity),
        "groups": [asdict(group) for group in info.groups],
        "ranks": [_rank_json(rank) for rank in info.ranks],
    }


def _rank_json(info: RankInfo) -> dict[str, Any]:
    return {**asdict(info), "state": info.state.value}
