"""`kvpool pools`, and pools as columns of a table."""

from collections.abc import Sequence
from typing import Final

import click

from kvpool.cli.connection import connected, server_options
from kvpool.cli.tables import Column, print_json, print_table
from kvpool.cli.text import percent, print_line
from kvpool.client import PoolInfo, PoolState, RankInfo, RankState
from kvpool.wire.pools import config_from_proto
from kvpool.wire.readable import word

COLUMNS: Final[tuple[Column[PoolInfo], ...]] = (
    Column("POOL", lambda info: info.config.name, is_text=True),
    Column("STATE", lambda info: word(PoolState, info.state), is_text=True),
    Column("EPOCH", lambda info: str(info.epoch)),
    Column("BLOCKS", lambda info: f"{usable_blocks(info):,}"),
    Column("USED", lambda info: percent(info.usage)),
    Column("CACHED", lambda info: percent(cached_share(info))),
    Column("EMPTY", lambda info: percent(empty_share(info))),
    Column("HIT", lambda info: percent(info.recent_hit_rate)),
    Column("SESSIONS", lambda info: f"{info.sessions:,}"),
    Column("RUN", lambda info: f"{info.running_requests:,}"),
    Column("WAIT", lambda info: f"{info.requests - info.running_requests:,}"),
    Column("RANKS", lambda info: _ready_ranks(info.ranks)),
)
HOST: Final[tuple[Column[PoolInfo], ...]] = (
    Column("HOST CACHED", lambda info: host_cached(info) if info.HasField("host_memory") else "-"),
    Column("OF HITS", lambda info: percent(host_share(info)) if info.HasField("host_memory") else "-"),
)
QUARANTINED: Final[Column[PoolInfo]] = Column("QUARANTINED", lambda info: f"{info.quarantined_blocks:,}")
WEIGHTS: Final[Column[PoolInfo]] = Column("WEIGHTS", lambda info: weights(info.weights_versions), is_text=True)


@click.command()
@server_options
def pools(*, address: str, as_json: bool) -> None:
    """List the pools, including those that still form."""
    with connected(address) as client:
        overview = client.overview()
    if as_json:
        print_json({"server": overview.server, "pools": list(overview.pools)})
        return
    print_table(pool_columns(overview.pools), overview.pools)
    for info in overview.pools:
        if info.config.groups and (rare_hits := config_from_proto(info.config).rare_hits):
            print_line(f"warning: pool {info.config.name}: {rare_hits}", err=True)
    if overview.server.draining:
        print_line("the server takes no new sessions: it is drained, or stops", err=True)
    if overview.server.journal_error:
        print_line(f"the journal is down: {overview.server.journal_error}", err=True)


def pool_columns(infos: Sequence[PoolInfo]) -> tuple[Column[PoolInfo], ...]:
    """Returns the columns of a table of pools: those of host memory and the like if there is some."""
    columns = COLUMNS
    if any(info.HasField("host_memory") for info in infos):
        columns += HOST
    if any(info.quarantined_blocks for info in infos):
        columns = (*columns, QUARANTINED)
    if any(any(info.weights_versions) for info in infos):
        columns = (*columns, WEIGHTS)
    return columns


def weights(versions: Sequence[str]) -> str:
    """Returns the weights versions of sessions as text; a dash for none."""
    return ", ".join(version or "-" for version in versions)


def usable_blocks(info: PoolInfo) -> int:
    """Returns the blocks of a pool without the null block; 0 while the pool forms."""
    return max(info.config.num_blocks - 1, 0)


def cached_share(info: PoolInfo) -> float:
    """Returns the share of a pool's blocks that are free and can be found by hash, if all used blocks are cached.

    The actual share is larger by that of the used blocks that are not cached: the last blocks of running requests, most
    often.
    """
    usable = usable_blocks(info)
    return max(info.cached_blocks - (usable - info.free_blocks), 0) / (usable or 1)


def empty_share(info: PoolInfo) -> float:
    """Returns the share of a pool's blocks that are neither used nor counted in `cached_share`."""
    return info.free_blocks / (usable_blocks(info) or 1) - cached_share(info)


def host_cached(info: PoolInfo) -> str:
    """Returns how many blocks of a pool's host memory can be found by hash, and how many it has."""
    return f"{info.host_memory.cached_blocks:,} of {info.config.num_host_blocks:,}"


def host_share(info: PoolInfo) -> float | None:
    """Returns the share of the tokens of all hits that were in host memory; None without hits."""
    hits_tokens = info.prefix_cache.hits_tokens + info.prefix_cache.preempted_hits_tokens
    return info.prefix_cache.host_hits_tokens / hits_tokens if hits_tokens else None


def _ready_ranks(ranks: Sequence[RankInfo]) -> str:
    ready = sum(rank.state == RankState.RANK_STATE_READY for rank in ranks)
    return f"{ready}/{len(ranks)}" if ranks else "-"
