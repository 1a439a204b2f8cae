"""Records the results of a run in the documentation: python tests/gpu/record.py gpu-results/results.json."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu.run import ROOT, Result, table

_BEGIN, _END = "<!-- results of tests/gpu: begin -->", "<!-- results of tests/gpu: end -->"
_STATUS = re.compile(r"(?<=<!-- status of tests/gpu -->).*")


def status(results: Sequence[Result]) -> str:
    """One line: what ran, and where."""
    facts: Mapping[str, Any] = next(result.figures for result in results if result.name == "facts")
    passed = [result.name for result in results if result.outcome == "passed"]
    device = facts["device"].partition(" ")[2] or facts["device"]
    driver = f", driver {facts['driver_version']}" if "driver_version" in facts else ""
    where = f"{device}{driver}, torch {facts['torch']}, {facts['date']}, commit {facts['commit']}"
    return f"Ran on: {where}; {len(passed)} of {len(results)} stages passed."


def main() -> None:
    """Rewrites the status in README.md and docs/reference/gpu.md, and the table in the latter."""
    results = [Result(**entry) for entry in json.loads(Path(sys.argv[1]).read_text())]
    for name in ("README.md", "docs/reference/gpu.md"):
        path = ROOT / name
        text = _STATUS.sub(lambda _: f" {status(results)}", path.read_text())
        if _BEGIN in text:
            before, _, rest = text.partition(_BEGIN)
            text = f"{before}{_BEGIN}\n\n{table(results)}\n{_END}{rest.partition(_END)[2]}"
        path.write_text(text)


if __name__ == "__main__":
    main()
