"""The table of docs/reference/models.md that compares plans: case by case, vLLM's and ours.

PYTHONPATH=tests .venv/bin/python -m support.plans_table
"""

from collections.abc import Mapping
from typing import Any, Final

from kvpool.models.config import Model
from support.paths import DOCS
from support.plans import as_vllm_answers, derived, read_recorded

PAGE: Final = DOCS / "reference" / "models.md"
_BEGIN: Final = "<!-- generated: PYTHONPATH=tests .venv/bin/python -m support.plans_table -->"
_END: Final = "<!-- end of the generated table -->"


def generated() -> str:
    """Returns the table."""
    lines = ["| architecture | config | vLLM | kvpool |", "|---|---|---|---|"]
    for name, row in sorted(read_recorded().items()):
        model, plan = derived(row)
        ours = as_vllm_answers(model, plan)
        if "error" in row:
            theirs, result = f"not built here: {_short(row['error'])}", _plan(ours)
        else:
            theirs = _plan(row)
            result = "equal" if ours == {key: row[key] for key in ours} else _plan(ours)
        lines.append(f"| {name} | {row['source']}: {_sizes(model)} | {theirs} | {result} |")
    return "\n".join(lines)


def _plan(answer: Mapping[str, Any]) -> str:
    groups = len(answer["groups"])
    of = "one group" if groups == 1 else f"{groups} groups"
    return f"{answer['num_blocks']:,} blocks, {of}, {answer['concurrency']:,} requests"


def _sizes(model: Model) -> str:
    return f"{len(model.layers)} layers of {model.max_model_len:,} tokens"


def _short(error: str) -> str:
    kind, _, words = error.partition(": ")
    return (words or kind).replace("|", "/")[:100]


def rows_of(page: str) -> list[str]:
    """Returns the lines of the table in a page."""
    return page.partition(_BEGIN)[2].partition(_END)[0].strip().splitlines()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}\n{generated()}\n{_END}{rest.partition(_END)[2]}")
