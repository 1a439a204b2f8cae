"""`python -m benchmarks`: measures what allocator work costs."""

import importlib.util
import json
from pathlib import Path

import click
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from benchmarks import suite
from benchmarks.earlier import compare as compare_with
from benchmarks.earlier import read_earlier
from benchmarks.report import Report
from benchmarks.scale import FULL, QUICK
from benchmarks.tables import Grid, grids
from benchmarks.vllm_side import VllmSide
from benchmarks.workloads import WorkloadError
from kvpool.cli.progress import progress
from kvpool.replay import ChildError

_PIPED_WIDTH = 140


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON object.")
@click.option(
    "--vllm",
    metavar="PYTHON",
    help="An interpreter with vllm (0.14.1 or later). Its KV cache manager does the same work, in turns with kvpool.",
)
@click.option(
    "--compare",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Output of an earlier run: adds the ratios of this run's figures to it.",
)
@click.option("--quick", is_flag=True, help="Run a few rounds only, to check that everything works. Not a measurement.")
@click.option(
    "--only", multiple=True, type=click.Choice(list(suite.SECTIONS)), help="Run only this section. Can be repeated."
)
@click.option(
    "--save", type=click.Path(dir_okay=False, path_type=Path), help="Also write the JSON object to this file."
)
@click.option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    help="Draw SVG pictures into this folder; needs matplotlib.",
)
def bench(  # noqa: PLR0913 - one parameter per option
    *,
    as_json: bool,
    vllm: str | None,
    compare: Path | None,
    quick: bool,
    only: tuple[str, ...],
    save: Path | None,
    plots: Path | None,
) -> None:
    """Measure what allocator work costs: in process, through a server, and in vLLM's KV cache manager.

    Prints tables, then one JSON object as the last line. Takes a few minutes and needs two free cores. Targets that
    are compared run in turns. Machines are noisy: compare ratios within one run, not times of two runs.
    """
    if plots and not importlib.util.find_spec("matplotlib"):
        raise click.UsageError("--plots needs matplotlib: pip install matplotlib, or run make bench")
    try:
        earlier = read_earlier(compare) if compare else None
    except (ValueError, OSError) as error:
        raise click.UsageError(f"--compare: {error}") from error
    report = _measure(vllm, only or tuple(suite.SECTIONS), quick=quick)
    if earlier is not None:
        compare_with(report, earlier)
    line = json.dumps(report.as_json())
    try:
        _write(save, line + "\n")
        if plots:
            _plot(report, plots)
    except OSError as error:
        raise click.ClickException(f"cannot write {error.filename}: {error.strerror}") from error
    if not as_json:
        _print(report)
    click.echo(line)


def _measure(python: str | None, sections: tuple[str, ...], *, quick: bool) -> Report:
    scale = QUICK if quick else FULL
    side = _vllm_side(python)
    try:
        with progress("measuring", suite.num_rounds(scale, sections), "rounds") as advance:
            return suite.measure(scale, sections, side, advance)
    except WorkloadError as error:
        raise click.ClickException(f"a workload did not do the intended work: {error}") from error
    finally:
        if side:
            side.close()


def _vllm_side(python: str | None) -> VllmSide | None:
    if python is None:
        click.echo(
            "benchmarks: without --vllm PYTHON, vLLM's manager is not measured; its columns are skipped", err=True
        )
        return None
    try:
        return VllmSide(python)
    except ChildError as error:
        raise click.UsageError(f"--vllm: {error}") from error


def _write(path: Path | None, text: str) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _plot(report: Report, folder: Path) -> None:
    from benchmarks.plots import plot  # noqa: PLC0415 - imports matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    for path in plot(report, folder):
        click.echo(f"benchmarks: drew {path}", err=True)


def _print(report: Report) -> None:
    screen = RichConsole()
    if not screen.is_terminal:
        screen = RichConsole(width=_PIPED_WIDTH)
    for grid in grids(report):
        screen.print(_table(grid))


def _table(grid: Grid) -> Table:
    first, *others = grid.columns
    table = Table(title=Text(grid.title))
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    for row in grid.rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    bench(prog_name="python -m benchmarks")
