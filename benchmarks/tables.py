"""A report as tables, for whatever prints them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks import many_pools
from benchmarks.race import Figures
from benchmarks.report import DEFAULT_HASH_SUFFIX, SIDES, Report

_LABELS: Final = {
    "hash_us_per_block": "hash a block",
    "lookup_miss_256": "look up 256 blocks, miss",
    "lookup_hit_256": "look up 256 blocks, hit",
    "allocate_cold_256": "allocate 256 blocks, cold",
    "allocate_hit_256": "allocate after a full hit",
    "allocate_evict_256": "allocate 256 blocks, evicting",
    "free_256": "free 256 blocks",
    "free_evict_256": "free 256 blocks, pool full",
    "prompt_256_end_to_end": "256-block prompt, hash to blocks",
    "decode_step_256_requests": "decode step, 256 requests",
    "decode_step_ahead_256_requests": "sent ahead: the scheduler's time",
    f"hash_us_per_block{DEFAULT_HASH_SUFFIX}": "hash a block, vLLM's default",
    f"prompt_256_end_to_end{DEFAULT_HASH_SUFFIX}": "256-block prompt, with that",
    f"decode_step_256_requests{DEFAULT_HASH_SUFFIX}": "decode step, with that",
    "gemma3_lookup_miss_256": "6 groups: look up, miss",
    "gemma3_allocate_256": "6 groups: allocate",
    "gemma3_free_256": "6 groups: free",
    "empty_step": "empty step",
    "echo_stream": "echo on such a stream",
    "construct_1M_ms": "make a pool of 1M blocks, ms",
    "bytes_per_block": "memory, bytes a block",
    "traced_bytes_per_block": "of these, seen by tracemalloc",
}
_STAGE_LABELS: Final = {
    "client": "client: what needs no message, columns, hashes; then the tables",
    "encode_step": "client: encode the message",
    "decode_step": "server: decode it",
    "core": "server: check and apply",
    "encode_result": "server: encode the result",
    "decode_result": "client: decode it",
    "transport": "gRPC, kernel, event loop, turns",
}
_HEADINGS: Final = {"core": "in process", "grpc": "unix socket", "tcp": "TCP"}
_GROWTH_LABELS: Final = {"requests": "requests", "prompt_blocks": "blocks a request", "groups": "groups"}
_DASH: Final = "-"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table. The first column names what a row is about; the others are figures.

    Attributes:
        title: What it tells.
        columns: Headings.
        rows: Cells.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def grids(report: Report) -> list[Grid]:
    """Makes a report's tables; those without figures are left out."""
    made = [
        _main(report),
        _stages(report),
        _sessions(report),
        _pools(report),
        _pool_sizes(report),
        *_growth(report),
        *_compared(report),
    ]
    return [grid for grid in made if grid.rows]


def markdown(report: Report) -> str:
    """Writes a report's tables in Markdown."""
    on = report.machine
    versions = f"kvpool {report.version}, {on['python']}, grpcio {on['grpcio']}, protobuf {on['protobuf']}"
    lines = [
        f"{versions}; {on['cores']} cores of {on['cpu']}.",
        "Medians, in microseconds where nothing else is said. Compare within one run: machines are noisy.",
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
    return Grid("What calls cost, microseconds", ("", *sides, *ratios), tuple(rows))


def _stages(report: Report) -> Grid:
    rows = tuple((_STAGE_LABELS[name], _figure(report.stages, name)) for name in report.stages)
    return Grid("Where a decode step of 256 requests goes, microseconds", ("stage", "unix socket"), rows)


def _sessions(report: Report) -> Grid:
    columns = {
        "steps_per_second": "steps a second",
        "step_p50_us": "p50",
        "step_p99_us": "p99",
        "server_cpu_us_per_step": "server CPU a step",
        "server_cpu_us_per_request": "a request",
        "server_cpu_ratio_to_1_session": "to 1 session",
    }
    rows = []
    for count, figures in report.sessions.items():
        cells = [_ratio(figures, name) if "ratio" in name else _figure(figures, name) for name in columns]
        rows.append((count, *cells))
    title = f"Sessions at once, each decoding {report.settings.session_requests} requests, microseconds"
    return Grid(title, ("sessions", *columns.values()), tuple(rows))


def _pools(report: Report) -> Grid:
    figures = {
        "steps_per_second": "steps a second",
        "step_p50_us": "p50",
        "server_cpu_us_per_step": "server CPU a step",
    }
    ways = {many_pools.ONE_PROCESS: "one process", many_pools.A_PROCESS_EACH: "a process each"}
    rows = tuple(
        (count, of_way, *(_figure(found, f"{way}_{name}") for name in figures))
        for count, found in report.pools.items()
        for way, of_way in ways.items()
    )
    title = f"Pools at once, a session each that decodes {report.settings.session_requests} requests, microseconds"
    return Grid(title, ("pools", "servers", *figures.values()), rows)


def _pool_sizes(report: Report) -> Grid:
    columns = {
        "grpc_decode_step_64_requests": "decode step, 64 requests, unix socket",
        "core_allocate_evict_32": "allocate 32 blocks, evicting, in process",
        "core_free_evict_32": "free them",
    }
    rows = tuple(
        (f"{int(size):,}", *(_figure(figures, name) for name in columns)) for size, figures in report.pool_sizes.items()
    )
    return Grid("As the pool grows, microseconds", ("blocks", *columns.values()), rows)


def _growth(report: Report) -> Iterator[Grid]:
    for axis, by_size in report.growth.items():
        sides = [name for name in ("grpc", "vllm") if any(name in figures for figures in by_size.values())]
        headings = ["unix socket" if name == "grpc" else f"vLLM {report.vllm_version}" for name in sides]
        rows = tuple((size, *(_figure(figures, name) for name in sides)) for size, figures in by_size.items())
        label = _GROWTH_LABELS[axis]
        yield Grid(f"A decode step as {label} grow, microseconds", (label, *headings), rows)


def _compared(report: Report) -> Iterator[Grid]:
    """What `--compare` found: a column a side for what calls cost, a row each for all else."""
    left = dict(report.compare or {})
    by_side = {name: _take(left, f"{name}.") for name in (*SIDES, "vllm")}
    shown = {name: figures for name, figures in by_side.items() if figures}
    rows = [
        (label, *(_ratio(figures, name) for figures in shown.values()))
        for name, label in _LABELS.items()
        if any(name in figures for figures in shown.values())
    ]
    headings = [_HEADINGS.get(name, "vLLM") for name in shown]
    yield Grid("What calls cost: this run / the earlier one", ("", *headings), tuple(rows))
    rows = [(path.replace(".", " ").replace("_", " "), _ratio(left, path)) for path in left]
    yield Grid("All else: this run / the earlier one", ("", "ratio"), tuple(rows))


def _take(figures: Figures, prefix: str) -> Figures:
    """Takes out those whose paths begin so."""
    return {path.removeprefix(prefix): figures.pop(path) for path in list(figures) if path.startswith(prefix)}


def _figure(figures: Mapping[str, float], name: str) -> str:
    value = figures.get(name)
    if value is None:
        return _DASH
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"  # noqa: PLR2004 - below it a digit after the point tells something


def _ratio(figures: Mapping[str, float], name: str) -> str:
    return f"{figures[name]:.2f}" if name in figures else _DASH
