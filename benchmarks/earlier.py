"""Comparison with an earlier run."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.race import Figures
from benchmarks.report import Report


def read_earlier(path: Path) -> dict[str, object]:
    """Reads the JSON object on the last line of an earlier run's output.

    Raises:
        ValueError: The last line of the file is not such an object.
        OSError: The file cannot be read.
    """
    lines = path.read_text().strip().splitlines()
    try:
        found = json.loads(lines[-1] if lines else "")
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or "machine" not in found:
        raise ValueError(f"{path}: the last line is not the JSON of python -m benchmarks")
    return found


def compare(report: Report, earlier: Mapping[str, object]) -> None:
    """Adds to the report the ratio of this run to the earlier one, for each figure of both runs."""
    before = dict(_flat("", earlier))
    now: Figures = dict(_flat("", report.numbers()))
    report.compare = {path: figure / before[path] for path, figure in now.items() if before.get(path)}


def _flat(path: str, numbers: object) -> Iterator[tuple[str, float]]:
    if isinstance(numbers, Mapping):
        for name, value in numbers.items():
            yield from _flat(f"{path}.{name}" if path else name, value)
    elif isinstance(numbers, int | float) and not isinstance(numbers, bool):
        yield path, float(numbers)
