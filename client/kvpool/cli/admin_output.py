"""What the operator's commands print: tables for people, JSON for scripts."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpool.cli.text import clean, duration, fit, percent
from kvpool.client import PoolInfo, RankInfo
from kvpool.client.admin import BlockInfo, RequestInfo, ServerInfo, SessionInfo

_GAP: Final = 1
_UNCUT: Final = 10_000
"""Cells that no row needs: the longest names have 256."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: What stands above it.
        is_text: Whether it holds names, which may be cut where the table is too wide, on the left.
    """

    title: str
    is_text: bool = False


POOL_COLUMNS = (
    Column("POOL", is_text=True), Column("STATE", is_text=True), Column("EPOCH"), Column("BLOCKS"), Column("USED"),
    Column("CACHED"), Column("HIT"), Column("SESSIONS"), Column("RUN"), Column("WAIT"), Column("RANKS"),
)  # fmt: skip
SESSION_COLUMNS = (
    Column("SESSION"), Column("POOL", is_text=True), Column("CLIENT", is_text=True), Column("RUN"), Column("WAIT"),
    Column("BLOCKS"), Column("STEPS"), Column("AGE"), Column("HEARD"), Column("LEASE"),
)  # fmt: skip
REQUEST_COLUMNS = (
    Column("SESSION"), Column("POOL", is_text=True), Column("REQUEST", is_text=True), Column("TOKENS"),
    Column("COMPUTED"), Column("BLOCKS"), Column("PREEMPTED"), Column("LORA", is_text=True),
)  # fmt: skip
BLOCK_COLUMNS = (
    Column("BLOCK"), Column("STATE", is_text=True), Column("REFS"), Column("GROUP"), Column("SESSION_NUMBER"),
    Column("PENDING"), Column("HASH", is_text=True),
)  # fmt: skip


def pool_row(info: PoolInfo) -> tuple[str, ...]:
    """A pool's row of its table."""
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


def pool_table(pools: Sequence[PoolInfo]) -> tuple[Sequence[Column], list[Sequence[str]]]:
    """The table of pools; with a column of its own for what is in quarantine, if anything is."""
    rows = [pool_row(info) for info in pools]
    if not any(info.quarantined_blocks for info in pools):
        return POOL_COLUMNS, [*rows]
    kept = (f"{info.quarantined_blocks:,}" for info in pools)
    return (*POOL_COLUMNS, Column("QUARANTINED")), [(*row, cell) for row, cell in zip(rows, kept, strict=True)]


def session_row(info: SessionInfo) -> tuple[str, ...]:
    """A session's row of its table."""
    return (
        str(info.session_number),
        info.pool_name,
        info.client_name,
        f"{info.running_requests:,}",
        f"{info.requests - info.running_requests:,}",
        _by_group(info.held_blocks),
        f"{info.sequence:,}",
        duration(info.age_seconds),
        "stream" if info.streaming else duration(info.idle_seconds),
        duration(info.lease_seconds),
    )


def request_row(pool: str, info: RequestInfo) -> tuple[str, ...]:
    """A request's row of its table."""
    return (
        str(info.session_number),
        pool,
        info.request_id,
        f"{info.num_tokens:,}",
        f"{info.num_computed_tokens:,}",
        _by_group(info.held_blocks),
        f"{info.num_preemptions:,}",
        info.lora_name,
    )


def block_row(info: BlockInfo) -> tuple[str, ...]:
    """A block's row of its table."""
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


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table no wider than the terminal; into a pipe or a file nothing is cut."""
    console = Console()
    table = make_table(columns, rows, console.width if console.is_terminal else None, ascii_only=_is_ascii(console))
    if not console.is_terminal:
        console.width = _UNCUT
    console.print(table, highlight=False)


def make_table(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int | None, *, ascii_only: bool = False
) -> Table:
    """Makes a table whose names are cut where it would be wider than `width` cells; None for any width."""
    cells = [[clean(cell, ascii_only=ascii_only) for cell in row] for row in rows]
    wanted = [max(map(cell_len, (column.title, *(row[i] for row in cells)))) for i, column in enumerate(columns)]
    texts = [i for i, column in enumerate(columns) if column.is_text]
    if width is not None:
        figures = sum(wanted) - sum(wanted[i] for i in texts) + _GAP * (len(columns) - 1)
        _shrink(wanted, texts, max(width - figures, 3 * len(texts)))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(
            Text(fit(column.title, wanted[i], ascii_only=ascii_only) if column.is_text else column.title),
            justify="left" if column.is_text else "right",
            no_wrap=True,
        )
    for row in cells:
        table.add_row(
            *(
                Text(fit(cell, wanted[i], ascii_only=ascii_only) if columns[i].is_text else cell)
                for i, cell in enumerate(row)
            )
        )
    return table


def usable_blocks(info: PoolInfo) -> int:
    """Blocks of a pool, the null block apart; 0 while it forms."""
    return max(info.config.num_blocks - 1, 0)


def server_json(info: ServerInfo) -> dict[str, Any]:
    """A server as JSON has it."""
    return asdict(info)


def pool_json(info: PoolInfo) -> dict[str, Any]:
    """A pool as JSON has it: names and counts as the metrics have them."""
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


def session_json(info: SessionInfo) -> dict[str, Any]:
    """A session as JSON has it."""
    return {**asdict(info), "held_blocks": list(info.held_blocks)}


def request_json(pool: str, info: RequestInfo) -> dict[str, Any]:
    """A request as JSON has it."""
    return {"pool_name": pool, **asdict(info), "held_blocks": list(info.held_blocks)}


def block_json(info: BlockInfo) -> dict[str, Any]:
    """A block as JSON has it; what has no contents has no hash, group and writer."""
    named = {"block_id": info.block_id, "state": info.state.value, "ref_cnt": info.ref_cnt}
    if not info.block_hash:
        return named
    contents = {"block_hash": info.block_hash.hex(), "group_id": info.group_id, "session_number": info.session_number}
    return {**named, **contents, "pending": info.pending}


def _rank_json(info: RankInfo) -> dict[str, Any]:
    return {**asdict(info), "state": info.state.value}


def _by_group(held_blocks: Sequence[int]) -> str:
    return "+".join(f"{count:,}" for count in held_blocks) if len(held_blocks) <= 4 else f"{sum(held_blocks):,}"  # noqa: PLR2004 - a column's worth


def _is_ascii(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def _shrink(wanted: list[int], texts: Sequence[int], room: int) -> None:
    """Takes what is too much from the widest of the columns that hold names."""
    while sum(wanted[i] for i in texts) > room:
        widest = max(texts, key=lambda i: wanted[i])
        wanted[widest] -= 1
