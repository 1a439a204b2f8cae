"""A report as SVG pictures. Imports matplotlib, the dependency group `bench`."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator, StrMethodFormatter

from benchmarks.report import Report

_CALLS: Final = {
    "lookup_miss_256": "look up, miss",
    "lookup_hit_256": "look up, hit",
    "allocate_cold_256": "allocate, cold",
    "allocate_hit_256": "allocate after a hit",
    "allocate_evict_256": "allocate, evicting",
    "free_256": "free",
    "prompt_256_end_to_end": "prompt, hash to blocks",
    "decode_step_256_requests": "decode step,\n256 requests",
    "gemma3_allocate_256": "6 groups: allocate",
}
_COLORS: Final = {"core": "#1b6ca8", "grpc": "#3aa6a1", "tcp": "#9bd1c4", "vllm": "#d1495b"}
_NAMES: Final = {"core": "kvpool in process", "grpc": "kvpool, unix socket", "tcp": "kvpool, TCP", "vllm": "vLLM"}
_MIN_SPAN: Final = 30
"""Minimum ratio of a panel's axis, so that small differences look small."""

_AXES: Final = {
    "requests": "running requests in the step",
    "prompt_blocks": "blocks per request, 64 requests",
    "groups": "groups (one full, the others windows)",
}


def plot(report: Report, folder: Path) -> list[Path]:
    """Draws the report into an existing folder.

    Returns:
        The files. Pictures without figures are left out.
    """
    pictures = {"bench-calls.svg": _calls(report), "bench-growth.svg": _growth(report)}
    drawn = []
    for name, figure in pictures.items():
        if figure is not None:
            path = folder / name
            with _style():
                figure.savefig(path, format="svg", metadata={"Date": None})
            drawn.append(path)
    return drawn


def _style() -> AbstractContextManager[None]:
    """Makes pictures reproducible, with searchable text."""
    style: AbstractContextManager[None] = rc_context({"svg.hashsalt": "kvpool", "svg.fonttype": "none", "font.size": 9})
    return style


def _calls(report: Report) -> Figure | None:
    """Draws the cost of calls: a group of bars per call."""
    sides = {name: report.side(name) for name in _COLORS}
    names = [name for name in _CALLS if any(name in figures for figures in sides.values())]
    if not names:
        return None
    shown = [side for side, figures in sides.items() if any(name in figures for name in names)]
    with _style():
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(shown)
        for i, side in enumerate(shown):
            figures = sides[side]
            places = [j + i * width for j, name in enumerate(names) if name in figures]
            heights = [figures[name] for name in names if name in figures]
            axes.bar(places, heights, width, label=_label(report, side), color=_COLORS[side])
        middle = 0.4 - width / 2
        axes.set_xticks([j + middle for j in range(len(names))], [_CALLS[name] for name in names])
        axes.tick_params(axis="x", rotation=30)
        axes.set_yscale("log")
        axes.set_ylabel("microseconds")
        axes.set_title("Cost of calls (256 blocks of 16 tokens)")
        _finish(axes)
    return figure


def _growth(report: Report) -> Figure | None:
    """Draws the cost of a decode step: a panel per growing parameter."""
    panels = [axis for axis in _AXES if axis in report.growth]
    panels += [name for name in ("sessions", "pool_sizes") if getattr(report, name)]
    if not panels:
        return None
    with _style():
        columns = min(len(panels), 3)
        figure = Figure(figsize=(3.4 * columns, 3 * -(-len(panels) // columns)), layout="constrained")
        figure.suptitle("Cost of a decode step")
        for i, panel in enumerate(panels, 1):
            axes = figure.add_subplot(-(-len(panels) // columns), columns, i)
            if panel == "sessions":
                _sessions(axes, report)
            elif panel == "pool_sizes":
                _pool_sizes(axes, report)
            else:
                for side in ("grpc", "vllm"):
                    _line(axes, report.growth[panel], side, _label(report, side), _COLORS[side])
                axes.set_xlabel(_AXES[panel])
            axes.set_ylabel("microseconds")
            _finish(axes)
    return figure


def _sessions(axes: Axes, report: Report) -> None:
    _line(axes, report.sessions, "step_p50_us", "step, median", _COLORS["grpc"])
    _line(axes, report.sessions, "step_p99_us", "step, 99th percentile", _COLORS["tcp"])
    _line(axes, report.sessions, "server_cpu_us_per_step", "server CPU per step", _COLORS["core"])
    axes.set_xlabel("concurrent sessions")


def _pool_sizes(axes: Axes, report: Report) -> None:
    _line(axes, report.pool_sizes, "grpc_decode_step_64_requests", "decode step", _COLORS["grpc"])
    _line(axes, report.pool_sizes, "core_allocate_evict_32", "allocate 32 blocks, in process", _COLORS["core"])
    axes.set_xlabel("blocks of the pool")


def _line(axes: Axes, by_size: Mapping[str, Mapping[str, float]], name: str, label: str, color: str) -> None:
    points = [(int(size), figures[name]) for size, figures in by_size.items() if name in figures]
    if points:
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label, color=color)
        axes.set_xscale("log", base=10 if points[-1][0] > 10_000 else 2)  # noqa: PLR2004 - pool sizes grow by powers of ten
        axes.set_yscale("log")
        axes.set_xticks([x for x, _ in points], [f"{x:,}" for x, _ in points])


def _label(report: Report, side: str) -> str:
    return f"vLLM {report.vllm_version}, in process" if side == "vllm" else _NAMES[side]


def _finish(axes: Axes) -> None:
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom / 1.5, max(top * 1.5, bottom * _MIN_SPAN))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
