"""What `kvpool replay --sweep` prints and draws: the hits of pools of all sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import log
from pathlib import Path
from typing import Final

from kvpool.cli.svg import picture, write_plot
from kvpool.cli.tables import Column, print_json, print_table
from kvpool.client import ReuseOrder
from kvpool.core.hit_curve import MULTIPLES
from kvpool.replay.sweep import Curve

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 360, 56, 40, 20, 48
_PLOT_POINTS: Final = 300


@dataclass(slots=True)
class SweepReport:
    """The curve of a trace, with the options that led to it.

    Attributes:
        curve: The curve.
        block_size: Tokens per block.
        reuse_order: The order in which freed blocks are used again.
        num_blocks: The pool to compare with others; None for none.
        with_host: By number of blocks of host memory: the hit tokens at each of `sizes`, which the caller adds.
        seconds: Duration of the sweep.
    """

    curve: Curve
    block_size: int
    reuse_order: ReuseOrder
    num_blocks: int | None
    with_host: dict[int, list[int]]
    seconds: float = 0.0

    def show(self, *, as_json: bool, plot: Path | None) -> None:
        """Prints the table, or one JSON object.

        Args:
            as_json: Whether to print JSON.
            plot: A file to which the curve is drawn as SVG; None for none.

        Raises:
            click.UsageError: The file cannot be written.
        """
        if plot:
            write_plot(plot, self._svg())
        curve = self.curve
        sizes = self.sizes
        if as_json:
            print_json(
                {
                    "requests": curve.requests,
                    "input_tokens": curve.input_tokens,
                    "block_size": self.block_size,
                    "reuse_order": self.reuse_order,
                    "min_blocks": curve.min_blocks,
                    "max_blocks": curve.max_blocks,
                    "sizes": [
                        {"num_blocks": n, "hit_tokens": curve.hit_tokens_at(n), "hit_rate": curve.hit_rate_at(n)}
                        | self._host_json(sizes.index(n))
                        for n in sizes
                    ],
                    "seconds": self.seconds,
                }
            )
            return
        most = curve.hit_tokens_at(curve.max_blocks) or 1
        columns: list[Column[int]] = [
            Column("blocks", lambda n: f"{n:,}"),
            Column("tokens", lambda n: f"{(n - 1) * self.block_size:,}"),
            Column("hit tokens", lambda n: f"{curve.hit_tokens_at(n):,}"),
            Column("hit rate", lambda n: f"{curve.hit_rate_at(n):.2%}"),
            Column("of all hits", lambda n: f"{curve.hit_tokens_at(n) / most:.1%}"),
        ]
        for host, hits in self.with_host.items():
            rates = {n: f"{hit_tokens / curve.input_tokens:.2%}" for n, hit_tokens in zip(sizes, hits, strict=True)}
            columns.append(Column(f"+ {host:,} host", rates.__getitem__))
        if self.num_blocks:
            columns.insert(0, Column("", self._multiple, is_text=True))
        print_table(columns, sizes)

    def _host_json(self, row: int) -> dict[str, object]:
        total = self.curve.input_tokens
        cells = [(host, hits[row]) for host, hits in self.with_host.items()]
        host = [{"num_host_blocks": n, "hit_tokens": hits, "hit_rate": hits / total} for n, hits in cells]
        return {"host": host} if host else {}

    @property
    def sizes(self) -> list[int]:
        """The numbers of blocks to show: 1, 2 and 5 times powers of ten, both ends, and multiples of the pool.

        With host memory the multiples alone, if there are any, as each cell takes a replay.
        """
        low, high = self.curve.min_blocks, self.curve.max_blocks
        sizes = {size for share in MULTIPLES if (size := int(share * (self.num_blocks or 0))) >= low}
        return sorted(sizes if sizes and self.with_host else {low, high, *_round_sizes(low, high), *sizes})

    def _multiple(self, num_blocks: int) -> str:
        found = (share for share in MULTIPLES if int(share * (self.num_blocks or 0)) == num_blocks)
        return next((f"x {share:g}" for share in found), "")

    def _svg(self) -> str:
        curve = self.curve
        low, high = curve.min_blocks, max(curve.max_blocks, (self.num_blocks or 0), curve.min_blocks + 1)
        top_rate = max(curve.hit_rate_at(curve.max_blocks), 0.01)
        step = next(step for step in (0.02, 0.05, 0.1, 0.2) if top_rate <= 6 * step)
        lines = -int(-top_rate // step)

        def at(num_blocks: float, rate: float) -> tuple[float, float]:
            x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * log(num_blocks / low) / log(high / low)
            return x, _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * rate / (lines * step)

        parts = []
        for i in range(lines + 1):
            x, y = at(low, i * step)
            parts.append(f'<path d="M{x:.1f} {y:.1f}H{_WIDTH - _RIGHT}" class="grid"/>')
            parts.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" class="end">{i * step:.0%}</text>')
        for size in _round_sizes(low, high):
            x, y = at(size, 0)
            parts.append(f'<path d="M{x:.1f} {y:.1f}v4" class="axis"/>')
            if str(size)[0] == "1" or high < 100 * low:  # two decades have room for all
                parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}">{size:,}</text>')
        sizes = sorted({round(low * (high / low) ** (i / _PLOT_POINTS)) for i in range(_PLOT_POINTS + 1)})
        points = " ".join("{:.1f},{:.1f}".format(*at(size, curve.hit_rate_at(size))) for size in sizes)
        parts.append(f'<polyline points="{points}" class="curve"/>')
        if self.num_blocks and self.num_blocks >= low:
            x, y = at(self.num_blocks, curve.hit_rate_at(self.num_blocks))
            label = f"{self.num_blocks:,} blocks: {curve.hit_rate_at(self.num_blocks):.1%}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="pool"/>')
            parts.append(f'<text x="{x + 8:.1f}" y="{y + 16:.1f}" class="start">{escape(label)}</text>')
        title = f"Prompt tokens found in the cache: {curve.requests:,} requests, {self.reuse_order.value}"
        axis = f"blocks of {self.block_size} tokens"
        parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) // 2}" y="{_HEIGHT - 10}">{axis}</text>')
        return picture(_WIDTH, _HEIGHT, title, parts)


def _round_sizes(low: int, high: int) -> Iterator[int]:
    """Yields 1, 2 and 5 times powers of ten in [low, high]."""
    power = 1
    while power <= high:
        yield from (size for size in (power, 2 * power, 5 * power) if low <= size <= high)
        power *= 10
