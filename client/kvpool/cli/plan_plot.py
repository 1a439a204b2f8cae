"""A plan as an SVG picture: memory of a request, and requests at once, against the length of requests."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from kvpool.cli.plan_limits import Load, load_of
from kvpool.cli.plan_report import PlannedModel
from kvpool.cli.svg import picture
from kvpool.wire.log_fields import format_bytes

_WIDTH: Final = 380
_HEIGHT: Final = 240
_LEFT: Final = 80
_TOP: Final = 56
_GAP: Final = 100
_POINTS_PER_DOUBLING: Final = 4
_MIN_TOKENS: Final = 16


def draw(planned: PlannedModel) -> str:
    """Returns the picture. Both axes of both panels are logarithmic.

    The memory of a request is that on the rank where a block is largest.
    """
    loads = [load_of(planned.plan, planned.options, tokens) for tokens in _lengths(planned.plan.max_model_len)]
    block_bytes = max(config.block_size_bytes for config in planned.plan.configs)
    panels = (
        _panel(0, "memory of one request", loads, lambda load: load.blocks_per_request * block_bytes, format_bytes),
        _panel(1, "requests at once", loads, lambda load: load.num_requests, lambda count: f"{count:,}"),
    )
    width, height = 2 * (_WIDTH + _GAP) + _LEFT - _GAP // 2, _HEIGHT + _TOP + 60
    title = f"{planned.model.architecture}: {planned.plan.num_blocks:,} blocks of {format_bytes(block_bytes)}"
    return picture(width, height, title, panels)


def _lengths(longest: int) -> list[int]:
    """Returns lengths from short to the longest one, evenly on a logarithmic axis."""
    first = min(_MIN_TOKENS, longest)
    steps = max(math.ceil(math.log2(longest / first) * _POINTS_PER_DOUBLING), 1)
    return sorted({round(first * (longest / first) ** (step / steps)) for step in range(steps + 1)})


def _panel(
    number: int,
    title: str,
    loads: Sequence[Load],
    value: Callable[[Load], int],
    label: Callable[[int], str],
) -> str:
    """Draws one panel: a line over the lengths of requests, and the values at its ends and in between."""
    left = _LEFT + number * (_WIDTH + _GAP)
    x = _scale([load.request_tokens for load in loads], left, left + _WIDTH)
    y = _scale([value(load) for load in loads], _TOP + _HEIGHT, _TOP + 12)
    points = " ".join(f"{x(load.request_tokens):.1f},{y(value(load)):.1f}" for load in loads)
    bottom = _TOP + _HEIGHT
    parts = [
        f'<text x="{left}" y="{_TOP - 8}" class="start">{title}</text>',
        f'<path d="M{left},{_TOP} V{bottom} H{left + _WIDTH}" class="axis"/>',
        f'<polyline points="{points}" class="curve"/>',
        f'<text x="{left + _WIDTH // 2}" y="{bottom + 40}">tokens of a request</text>',
    ]
    for load in {loads[0], loads[len(loads) // 2], loads[-1]}:
        at_x, at_y = x(load.request_tokens), y(value(load))
        parts += [
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3" class="point"/>',
            f'<text x="{at_x:.1f}" y="{bottom + 18}">{load.request_tokens:,}</text>',
            f'<text x="{left - 6}" y="{at_y + 4:.1f}" class="end">{escape(label(value(load)))}</text>',
        ]
    return "\n".join(parts)


def _scale(values: Sequence[int], low: float, high: float) -> Callable[[int], float]:
    """Returns the position of a value on a logarithmic axis; equal values are in its middle."""
    logs = [math.log(max(value, 1)) for value in values]
    span = max(logs) - min(logs)
    if not span:
        return lambda _: (low + high) / 2
    return lambda value: low + (high - low) * (math.log(max(value, 1)) - min(logs)) / span
