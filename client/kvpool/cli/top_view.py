"""A screen of `kvpool top` as lines of text that fit the terminal. Pure functions of samples.

The server comes first, then the pools (those that are not ready before the others), then as many sessions as fit. A
pool has four lines, or three without host memory, or two or one: as many as fit for all pools.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.text import Text

from kvpool.cli.pools import cached_share, host_cached, host_share, usable_blocks, weights
from kvpool.cli.text import clean, counted, duration, fit, percent, short
from kvpool.cli.top_sample import MAX_SESSIONS, Sample
from kvpool.client import PoolInfo, PoolState, RankInfo, RankState
from kvpool.v1.admin_pb2 import SessionInfo
from kvpool.wire.log_fields import format_bytes
from kvpool.wire.readable import word, words

_STATE_STYLES: Final = {
    PoolState.POOL_STATE_READY: "green",
    PoolState.POOL_STATE_FORMING: "yellow",
    PoolState.POOL_STATE_DEGRADED: "bold red",
    PoolState.POOL_STATE_DRAINING: "yellow",
}
_NEARLY_FULL: Final = 0.95
_FILLING: Final = 0.8
_POOL_LINES: Final = 4
_MIN_NAME_CELLS: Final = 12
_MIN_BAR_CELLS: Final = 4
_EPOCH_DIGITS: Final = 8
"""Digits of an epoch that begins at the seconds since 2025, until 2028."""
_SESSION_FIGURES: Final = 48
"""Cells of a session's line without names."""

_KEPT_SESSION_LINES: Final = 4
"""Lines reserved for sessions, if there are any: a heading and three sessions."""


@dataclass(frozen=True, slots=True)
class Screen:
    """Size and options of the display.

    Attributes:
        width: Cells per line.
        height: Number of lines; None for no limit.
        ascii_only: Whether to use ASCII only.
        all_ranks: Whether to show ranks that are ready.
    """

    width: int = 80
    height: int | None = None
    ascii_only: bool = False
    all_ranks: bool = False

    def fit(self, text: str, width: int | None = None) -> str:
        """Pads or cuts a text to `width` cells; None for the width of a line."""
        cleaned = clean(text, ascii_only=self.ascii_only)
        return fit(cleaned, self.width if width is None else width, ascii_only=self.ascii_only)


def waiting_lines(screen: Screen, address: str, trouble: str) -> list[Text]:
    """Returns the lines to show before the first answer."""
    lines = [_line(screen, f"kvpool top, {address}", "bold")]
    return [*lines, _line(screen, trouble or "waiting for an answer", "reverse red" if trouble else "")]


def lines(screen: Screen, address: str, sample: Sample, trouble: str = "") -> list[Text]:
    """Returns the lines of a screen.

    Args:
        screen: Size and options of the display.
        address: Address of the server.
        sample: The newest sample.
        trouble: Why the sample is not current; empty if it is.
    """
    head = _head(screen, address, sample, trouble)
    height = sys.maxsize if screen.height is None else screen.height
    free = max(height - len(head), 0)
    reserved = min(len(sample.sessions) + 1, _KEPT_SESSION_LINES) if sample.sessions else 0
    pools = _pools(screen, sample, max(free - reserved, 1))
    sessions = _sessions(screen, sample, free - len(pools))
    return [*head, *pools, *sessions][:height]


def _head(screen: Screen, address: str, sample: Sample, trouble: str) -> list[Text]:
    server, pools = sample.overview.server, sample.overview.pools
    running = sum(info.running_requests for info in pools)
    waiting = sum(info.requests for info in pools) - running
    sessions = sum(info.sessions for info in pools)
    title = f"kvpool {server.version} at {address}, up {duration(server.uptime_seconds)}"
    if server.shard:
        title += f", primary of {server.shard} in term {server.term}"
    counts = (
        f"{counted(len(pools), 'pool')}, {counted(sessions, 'session')}, {counted(running, 'request')} running, "
        f"{waiting:,} waiting"
    )
    if server.draining:
        counts += "; draining: no new sessions"
    used, cached, empty = _glyphs(screen)
    legend = f"{used} used  {cached} cached and free  {empty} empty"
    return [
        _line(screen, title, "bold"),
        _line(screen, trouble, "reverse red") if trouble else _line(screen, counts),
        _line(screen, legend, "dim"),
    ]


def _pools(screen: Screen, sample: Sample, max_lines: int) -> list[Text]:
    if not sample.overview.pools:
        return [_line(screen, "no pools")]
    ordered = sorted(
        sample.overview.pools, key=lambda info: (info.state == PoolState.POOL_STATE_READY, info.config.name)
    )
    blocks = [_pool(screen, info, sample) for info in ordered]
    ranks = [_ranks(screen, info.ranks) for info in ordered]
    for num_lines in range(_POOL_LINES, 0, -1):
        shown = [line for block, rows in zip(blocks, ranks, strict=True) for line in block[:num_lines] + rows]
        if len(shown) <= max_lines:
            return shown
    if len(blocks) > max_lines:
        return _cut([block[0] for block in blocks], max_lines, screen, "pools")
    return _cut(shown, max_lines, screen, "lines")  # there are too many lines of ranks


def _pool(screen: Screen, info: PoolInfo, sample: Sample) -> list[Text]:
    name, cached, rates = info.config.name, cached_share(info), sample.rates.get(info.config.name, {})
    figures = f" {percent(info.usage):>5} used {percent(cached):>5} cached"
    middle = f" {word(PoolState, info.state):<8} e{info.epoch:<{_EPOCH_DIGITS}} "
    flexible = screen.width - len(figures) - len(middle)
    name_width = min(max(flexible * 11 // 20, _MIN_NAME_CELLS), 40)
    bar_width = flexible - name_width if flexible - name_width >= _MIN_BAR_CELLS else 0
    first = Text.assemble(
        (screen.fit(name, name_width), "bold"),
        (middle, _STATE_STYLES.get(info.state, "bold red")),
        _bar(screen, info.usage, cached, bar_width),
        figures,
    )
    second = (
        f"  hit {percent(info.recent_hit_rate):>5} now {percent(rates.get('hit_ratio')):>5}"
        f" {_rate(rates.get('steps'))} steps/s {_rate(rates.get('allocations'))} alloc/s"
        f" {_rate(rates.get('refusals'))} refused/s {_rate(rates.get('evictions'))} evict/s"
    )
    third = (
        f"  {usable_blocks(info):,} blocks, {counted(info.sessions, 'session')}, {info.running_requests:,} running, "
        f"{info.requests - info.running_requests:,} waiting"
    )
    if name in sample.epoch_began_seconds:
        third += f", new epoch since {duration(sample.taken_seconds - sample.epoch_began_seconds[name])}"
    if preemptions := rates.get("preemptions"):
        third += f", {short(preemptions)} preempted/s"
    if info.quarantined_blocks:
        third += f", {info.quarantined_blocks:,} in quarantine"
    if info.ranks:
        third += f", ranks {_rank_counts(info.ranks)}"
    if any(info.weights_versions):
        third += f", weights {weights(info.weights_versions)}"
    first.truncate(screen.width, overflow="crop")
    fourth = (
        f"  host memory: {host_cached(info)} blocks cached, {percent(host_share(info))} of hits,"
        f" {_rate(rates.get('copied_out'))} out/s {_rate(rates.get('copied_in'))} in/s"
    )
    lower = (third, fourth) if info.HasField("host_memory") else (third,)
    return [first, _line(screen, second), *(_line(screen, text, "dim") for text in lower)]


def _bar(screen: Screen, usage: float, cached: float, width: int) -> Text:
    """Makes a bar: used blocks, free cached blocks, empty blocks."""
    used_cells = round(usage * width) if usage < 1 else width
    if usage > 0:
        used_cells = min(max(used_cells, 1), width)
    cached_cells = round((usage + cached) * width) - used_cells
    cached_cells = min(max(cached_cells, 0), width - used_cells)
    used, reusable, empty = _glyphs(screen)
    style = "red" if usage >= _NEARLY_FULL else "yellow" if usage >= _FILLING else "green"
    return Text.assemble(
        (used * used_cells, style),
        (reusable * cached_cells, "cyan"),
        (empty * (width - used_cells - cached_cells), "dim"),
    )


def _ranks(screen: Screen, ranks: Sequence[RankInfo]) -> list[Text]:
    return [_rank(screen, rank) for rank in ranks if screen.all_ranks or rank.state != RankState.RANK_STATE_READY]


def _rank(screen: Screen, rank: RankInfo) -> Text:
    parts = [f"rank {rank.rank} {word(RankState, rank.state)}"]
    if rank.host or rank.device:
        parts.append(" ".join(filter(None, (rank.host, rank.device))))
    if rank.pid:
        parts.append(f"process {rank.pid}")
    if rank.num_blocks:
        parts.append(f"{rank.num_blocks:,} blocks, {format_bytes(rank.allocated_bytes)}")
    if rank.mapping_processes:
        parts.append("mapped by " + ", ".join(f"{each.client_name} ({each.pid})" for each in rank.mapping_processes))
    return _line(screen, f"    {', '.join(parts)}", "" if rank.state == RankState.RANK_STATE_READY else "yellow")


def _rank_counts(ranks: Sequence[RankInfo]) -> str:
    counts = [(name, sum(1 for rank in ranks if rank.state == state)) for state, name in words(RankState).items()]
    return " ".join(f"{count} {name}" for name, count in counts if count)


def _sessions(screen: Screen, sample: Sample, max_lines: int) -> list[Text]:
    total = sum(info.sessions for info in sample.overview.pools)
    if not sample.sessions or max_lines < 2:  # noqa: PLR2004 - a heading and a session
        return []
    names_width = max(screen.width - _SESSION_FIGURES, 16)
    longest = max(len(info.pool_name) for info in sample.sessions)
    pool_width = min(max(longest, len("POOL")), names_width * 2 // 5)
    client_width = names_width - pool_width
    heading = (
        f"{'NO.':>5} {'POOL':<{pool_width}} {'CLIENT':<{client_width}} {'RUN':>5} {'WAIT':>5} {'BLOCKS':>7}"
        f" {'STEP/S':>6} {'AGE':>6} {'IDLE':>6}"
    )
    rows = [_session(screen, info, sample, pool_width, client_width) for info in sample.sessions]
    more = total - len(sample.sessions) if total > MAX_SESSIONS else 0
    return [_line(screen, heading, "reverse"), *_cut(rows, max_lines - 1, screen, "sessions", more)]


def _session(screen: Screen, info: SessionInfo, sample: Sample, pool_width: int, client_width: int) -> Text:
    steps = sample.session_steps.get(info.session_number)
    idle = "now" if info.streaming else duration(info.idle_seconds)
    blocks = sum(info.held_blocks)
    return _line(
        screen,
        f"{info.session_number:>5} {screen.fit(info.pool_name, pool_width)}"
        f" {screen.fit(info.client_name, client_width)} {short(info.running_requests):>5}"
        f" {short(info.requests - info.running_requests):>5} {f'{blocks:,}' if blocks < 10**6 else short(blocks):>7}"
        f" {_rate(steps):>6} {duration(info.age_seconds):>6} {idle:>6}",
    )


def _cut(rows: list[Text], max_lines: int, screen: Screen, noun: str, more: int = 0) -> list[Text]:
    """Returns the rows that fit. If rows are left out, the last line gives their number."""
    if len(rows) <= max_lines and not more:
        return rows
    kept = rows[: max(max_lines - 1, 0)]
    return [*kept, _line(screen, f"and {len(rows) + more - len(kept):,} more {noun}", "dim")]


def _line(screen: Screen, text: str, style: str = "") -> Text:
    return Text(screen.fit(text).rstrip() if "reverse" not in style else screen.fit(text), style=style)


def _rate(value: float | None) -> str:
    return f"{'-' if value is None else short(value):>5}"


def _glyphs(screen: Screen) -> tuple[str, str, str]:
    return ("#", "+", ".") if screen.ascii_only else ("█", "▒", "·")
