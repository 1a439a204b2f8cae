"""A report as tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks import many_pools
from benchmarks.race import Figures
from benchmarks.report import DEFAULT_HASH_SUFFIX, SIDES, Report

_LABELS: Final = {
    "hash_us_per_block": "hash one block",
    "lookup_miss_256": "look up 256 blocks, miss",
    "lookup_hit_256": "look up 256 blocks, hit",
    "allocate_cold_256": "allocate 256 blocks, cold",
    "allocate_hit_256": "allocate after a full hit",
    "allocate_evict_256": "allocate 256 blocks, evicting",
    "free_256": "free 256 blocks",
    "free_evict_256": "free 256 blocks, pool full",
    "prompt_256_end_to_end": "256-block prompt, hash to blocks",
    "decode_step_256_requests": "decode step, 256 requests",
    "decode_step_ahead_256_requests": "... sent ahead: the scheduler's own time",
    f"hash_us_per_block{DEFAULT_HASH_SUFFIX}": "hash one block, vLLM's default hash",
    f"prompt_256_end_to_end{DEFAULT_HASH_SUFFIX}": "256-block prompt, vLLM's default hash",
    f"decode_step_256_requests{DEFAULT_HASH_SUFFIX}": "decode step, vLLM's default hash",
    "gemma3_lookup_miss_256": "6 groups: look up, miss",
    "gemma3_allocate_256": "6 groups: allocate",
    "gemma3_free_256": "6 groups: free",
    "empty_step": "empty step",
    "echo_stream": "echo of an empty frame",
    "construct_1M_ms": "make a pool of 1M blocks, ms",
    "bytes_per_block": "memory, bytes per block",
    "traced_bytes_per_block": "... reported by tracemalloc",
}
_STAGE_LABELS: Final = {
    "client": "client: calls, hashes and columns; then the tables",
    "encode_step": "client: encode the message",
    "decode_step": "server: decode the message",
    "core": "server: validate and apply",
    "encode_result": "server: encode the result",
    "decode_result": "client: decode the result",
    "transport": "link, kernel, event loop, fair turns",
}
_SERVER_TIME_LABELS: Final = {
    "echo": "echo of an empty frame",
    "empty_step": "empty step",
    "decode_step_64_requests": "decode step of 64 requests",
    "empty_step_journal": "with a journal: empty step",
    "decode_step_64_requests_journal": "with a journal: decode step of 64 requests",
}
_HEADINGS: Final = {"core": "in process", "grpc": "unix socket", "tcp": "TCP"}
_GROWTH_LABELS: Final = {"requests": "requests", "prompt_blocks": "blocks per request", "groups": "groups"}
_DASH: Final = "-"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. The first column names the row; the other columns are figures.

    Attributes:
        title: Title of the table.
        columns: Headings.
        rows: Cells.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def grids(report: Report) -> list[Grid]:
    """Returns the tables of a report, without empty ones."""
    made = [
        _main(report),
        _stages(report),
        _server_time(report),
        _sessions(report),
        _pools(report),
        _pool_sizes(report),
        *_growth(report),
        *_compared(report),
    ]
    return [grid for grid in made if grid.rows]


def markdown(report: Report) -> str:
    """Returns the tables of a report in Markdown."""
    on = report.machine
    versions = f"kvpool {report.version}, {on['python']}, grpcio {on['grpcio']}, protobuf {on['protobuf']}"
    lines = [
        f"{versions}; {on['cores']} cores of {on['cpu']}.",
        "Medians, in microseconds unless stated otherwise. Compare within one run: machines are noisy.",
    ]
    for grid in grids(report):
        lines += ["", f"### {grid.title}", "", _line(grid.columns), _line(["---", *["---:"] * (len(grid.columns) - 1)])]
        lines += map(_line, grid.rows)
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _main(report: Report) -> Grid:
    sides = {heading: report.side(name) for name, heading in _HEADINGS.items()}
    ratios: dict[str, Figures] = {}
    if report.vllm is not None:
        sides[f"vLLM {report.vllm_version}"] = report.vllm
        ratios = {f"{_HEADINGS[name]} / vLLM": report.ratios.get(f"{name}_to_vllm", {}) for name in SIDES}
    rows = []
    for name, label in _LABELS.items():
        if any(name in figures for figures in sides.values()):
            cells = [_figure(figures, name) for figures in sides.values()]
            rows.append((label, *cells, *(_ratio(figures, name) for figures in ratios.values())))
    return Grid("Cost of calls, microseconds", ("", *sides, *ratios), tuple(rows))


def _stages(report: Report) -> Grid:
    rows = tuple((_STAGE_LABELS[name], _figure(report.stages, name)) for name in report.stages)
    return Grid("Stages of a decode step of 256 requests, microseconds", ("stage", "unix socket"), rows)


def _server_time(report: Report) -> Grid:
    ratios = report.ratios.get("server_time_to_echo", {})
    rows = tuple(
        (_SERVER_TIME_LABELS[name], _figure(report.server_time, name), _ratio(ratios, name))
        for name in report.server_time
    )
    return Grid("Processor time of a server, microseconds", ("message", "processor time", "/ echo"), rows)


def _sessions(report: Report) -> Grid:
    columns = {
        "steps_per_second": "steps per second",
        "step_p50_us": "p50",
        "step_p99_us": "p99",
        "server_cpu_us_per_step": "server CPU per step",
        "server_cpu_us_per_request": "per request",
        "server_cpu_ratio_to_1_session": "ratio to 1 session",
    }
    rows = []
    for count, figures in report.sessions.items():
        cells = [_ratio(figures, name) if "ratio" in name else _figure(figures, name) for name in columns]
        rows.append((count, *cells))
    title = f"Concurrent sessions, each decoding {report.settings.session_requests} requests, microseconds"
    return Grid(title, ("sessions", *columns.values()), tuple(rows))


def _pools(report: Report) -> Grid:
    figures = {
        "steps_per_second": "steps per second",
        "step_p50_us": "p50",
        "server_cpu_us_per_step": "server CPU per step",
    }
    ways = {many_pools.ONE_PROCESS: "one process", many_pools.A_PROCESS_EACH: "one process per pool"}
    rows = tuple(
        (count, of_way, *(_figure(found, f"{way}_{name}") for name in figures))
        for count, found in report.pools.items()
        for way, of_way in ways.items()
    )
    title = f"Concurrent pools, one session each, decoding {report.settings.session_requests} requests, microseconds"
    return Grid(title, ("pools", "servers", *figures.values()), rows)


def _pool_sizes(report: Report) -> Grid:
    columns = {
        "grpc_decode_step_64_requests": "decode step, 64 requests, unix socket",
        "core_allocate_evict_32": "allocate 32 blocks, evicting, in process",
        "core_free_evict_32": "free 32 blocks",
    }
    rows = tuple(
        (f"{int(size):,}", *(_figure(figures, name) for name in columns)) for size, figures in report.pool_sizes.items()
    )
    return Grid("Growing pool, microseconds", ("blocks", *columns.values()), rows)


def _growth(report: Report) -> Iterator[Grid]:
    for axis, by_size in report.growth.items():
        sides = [name for name in ("grpc", "vllm") if any(name in figures for figures in by_size.values())]
        headings = ["unix socket" if name == "grpc" else f"vLLM {report.vllm_version}" for name in sides]
        rows = tuple((size, *(_figure(figures, name) for name in sides)) for size, figures in by_size.items())
        label = _GROWTH_LABELS[axis]
        yield Grid(f"Decode step with growing {label}, microseconds", (label, *headings), rows)


def _compared(report: Report) -> Iterator[Grid]:
    """Yields the tables of `--compare`: calls with a column per side, then all other figures."""
    left = dict(report.compare or {})
    by_side = {name: _take(left, f"{name}.") for name in (*SIDES, "vllm")}
    shown = {name: figures for name, figures in by_side.items() if figures}
    rows = [
        (label, *(_ratio(figures, name) for figures in shown.values()))
        for name, label in _LABELS.items()
        if any(name in figures for figures in shown.values())
    ]
    headings = [_HEADINGS.get(name, "vLLM") for name in shown]
    yield Grid("Cost of calls: this run / the earlier run", ("", *headings), tuple(rows))
    rows = [(path.replace(".", " ").replace("_", " "), _ratio(left, path)) for path in left]
    yield Grid("Other figures: this run / the earlier run", ("", "ratio"), tuple(rows))


def _take(figures: Figures, prefix: str) -> Figures:
    """Removes and returns the figures whose paths begin with a prefix."""
    return {path.removeprefix(prefix): figures.pop(path) for path in list(figures) if path.startswith(prefix)}


def _figure(figures: Mapping[str, float], name: str) -> str:
    value = figures.get(name)
    if value is None:
        return _DASH
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"  # noqa: PLR2004 - smaller figures get a decimal


def _ratio(figures: Mapping[str, float], name: str) -> str:
    return f"{figures[name]:.2f}" if name in figures else _DASH
