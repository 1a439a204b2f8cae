"""An earlier run, to compare with."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.race import Figures
from benchmarks.report import Report


def read_earlier(path: Path) -> dict[str, object]:
    """Reads what `--json` printed, whatever was printed before it.

    Raises:
        ValueError: The file's last line is not such an object.
        OSError: It cannot be read.
    """
    lines = path.read_text().strip().splitlines()
    try:
        told = json.loads(lines[-1] if lines else "")
    except json.JSONDecodeError:
        told = None
    if not isinstance(told, dict) or "machine" not in told:
        raise ValueError(f"{path}: the last line is not what kvpool bench --json prints")
    return told


def compare(report: Report, earlier: Mapping[str, object]) -> None:
    """Puts into the report, for every figure that both have, this run's over the earlier one's."""
    before = dict(_flat("", earlier))
    now: Figures = dict(_flat("", report.numbers()))
    report.compare = {path: figure / before[path] for path, figure in now.items() if before.get(path)}


def _flat(path: str, numbers: object) -> Iterator[tuple[str, float]]:
    if isinstance(numbers, Mapping):
        for name, value in numbers.items():
            yield from _flat(f"{path}.{name}" if path else name, value)
    elif isinstance(numbers, int | float) and not isinstance(numbers, bool):
        yield path, float(numbers)
