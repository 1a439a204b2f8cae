"""Records results in the documentation: python tests/gpu/record.py gpu-results/results.json [MORE.json...].

Several files are parts of one run. Pages say what ran, and `docs/reference/gpu.md` has a table. If the stage
`vllm-figures` has the figures of the picture, they are drawn, and README.md and docs/index.md show it. Parts of the
stage that have no figures are named.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.images.diagrams import vllm_on_a_gpu
from gpu.run import ROOT, Result, figure_rows

_PAGES: Final = ("README.md", "docs/index.md", "docs/reference/gpu.md")
_PICTURE: Final = "docs/images/vllm-on-a-gpu.svg"
_BEGIN, _END = "<!-- results of tests/gpu: begin -->", "<!-- results of tests/gpu: end -->"
_STATUS = re.compile(r"(?<=<!-- status of tests/gpu -->).*")
_FIGURE = re.compile(r"(?<=<!-- figure of tests/gpu -->).*")
NO_FIGURE: Final = "vLLM with its own kernels has not been measured on a GPU yet."
FIGURES_STAGE: Final = "vllm-figures"
_DRAWN: Final[Mapping[str, frozenset[str]]] = {
    "alone": frozenset({"restart_known_prompt_ms"}),
    "kvpool": frozenset({"restart_new_prompt_ms", "restart_known_prompt_ms"}),
    "ratio": frozenset({"decode_tokens_per_s_at_1"}),
}
"""What the picture shows of each side; the decodes are one part of the stage."""
_SHOWN: Final[Mapping[str, Mapping[str, str]]] = {
    "memory": {
        "ms_of_a_map_p50": "map, ms (p50)",
        "ms_of_an_unmap_p50": "unmap, ms (p50)",
        "ms_until_exit_p50": "exit of a killed writer, ms (p50)",
        "bytes_more_after_the_maps": "bytes lost after 20 maps",
    },
    "engines": {
        "first_token_cold_ms": "first token, 2,048 tokens, cold, ms",
        "first_token_warm_in_another_engine_ms": "warm in another engine, ms",
        "engine_killed_blocks_free_after_ms": "engine killed: blocks are free after, ms",
        "server_killed_longest_gap_ms": "server killed: longest gap, ms",
        "worker_killed_longest_gap_ms": "worker killed: longest gap, ms",
    },
    "host-memory": {
        "to_host_256_gb_per_s": "copies of 512 MiB to host memory, registered with CUDA and not, GB/s",
        "back_256_gb_per_s": "back, GB/s",
        "promotion_of_4096_tokens_ms": "4,096 tokens of Llama 3 8B back, ms",
    },
    "vllm-host-memory": {
        "evicted_prompt_ms": "first token of an evicted prompt: vLLM alone, with host memory, ms, and their ratio",
    },
    "tables": {
        "commit_256_new_rows_us": "block tables of 256 new requests, us",
    },
    "steps": {
        "mapped_differs_percent": "gather from mapped memory beside torch's, %",
        "device_ms": "device's step, 1, 8, 64 requests, ms",
        "scheduler_us": "scheduler's step beside it, us",
        "one_after_the_other_costs_percent": "one after the other costs, %",
        "sent_ahead_costs_percent": "sent ahead costs, %",
    },
}
"""The figures of the page: stage, figure, and what it is called there. results.md has all."""


def status(results: Sequence[Result]) -> str:
    """One line: what ran, and where."""
    facts = _figures(results, "facts")
    passed = [result.name for result in results if result.outcome == "passed"]
    device = facts["device"].partition(" ")[2] or facts["device"]
    driver = f", driver {facts['driver_version']}" if "driver_version" in facts else ""
    where = f"{device}{driver}, torch {facts['torch']}, {facts['date']}, commit {facts['commit']}"
    lacking = next((result.figures.get("lacking") for result in results if result.name == FIGURES_STAGE), "")
    without = f" Without {lacking}." if lacking else ""
    return f"Ran on: {where}; {len(passed)} of {len(results)} stages passed.{without}"


def figure(results: Sequence[Result], page: str) -> str:
    """The picture for a page, or the sentence that takes its place."""
    if not _is_drawn(results):
        return NO_FIGURE
    folder = "docs/images" if page == "README.md" else "images"
    return f"![vLLM on kvpool beside vLLM alone, on a GPU.]({folder}/{Path(_PICTURE).name})"


def table(results: Sequence[Result]) -> str:
    """Results and chosen figures as Markdown."""
    lines = ["| stage | what it shows | result | s |", "|---|---|---|--:|"]
    lines += [f"| {each.name} | {each.what} | {each.outcome} | {each.seconds:g} |" for each in results]
    lines += ["", "| figure | |", "|---|--:|"]
    for each in results:
        if each.outcome == "passed":
            shown = _SHOWN.get(each.name, {})
            lines += [f"| {title} | {', '.join(_values(each, name))} |" for name, title in shown.items()]
    if _is_drawn(results):
        lines += figure_rows(FIGURES_STAGE, _figures(results, FIGURES_STAGE))
    return "\n".join(lines) + "\n"


def record(results: Sequence[Result], root: Path) -> None:
    """Rewrites what pages of the repository in a folder say about a run, and draws its picture."""
    texts = {name: _rewritten(name, (root / name).read_text(), results) for name in _PAGES}
    for name, text in texts.items():
        (root / name).write_text(text)
    (root / _PICTURE).unlink(missing_ok=True)
    if _is_drawn(results):
        (root / _PICTURE).write_text(vllm_on_a_gpu(_figures(results, FIGURES_STAGE), status(results)))


def _rewritten(page: str, text: str, results: Sequence[Result]) -> str:
    text = _STATUS.sub(f" {status(results)}", text)
    text = _FIGURE.sub(f" {figure(results, page)}", text)
    before, begin, rest = text.partition(_BEGIN)
    if not begin:
        return text
    return f"{before}{begin}\n\n{table(results)}\n{_END}{rest.partition(_END)[2]}"


def _is_drawn(results: Sequence[Result]) -> bool:
    """Whether the stage has what the picture shows, even if other parts of it failed."""
    found = next((result.figures for result in results if result.name == FIGURES_STAGE), {})
    sides: Mapping[str, Any] = found
    return all(names <= sides.get(side, {}).keys() for side, names in _DRAWN.items())


def _figures(results: Sequence[Result], stage: str) -> Mapping[str, Any]:
    return next(result.figures for result in results if result.name == stage)


def _values(result: Result, name: str) -> Iterator[str]:
    """A figure of a stage, of each group that has it."""
    groups = [result.figures, *(value for value in result.figures.values() if isinstance(value, dict))]
    found = [str(group[name]) for group in groups if name in group]
    if not found:
        raise KeyError(f"the stage {result.name} has no figure {name}")
    yield from found


def main() -> None:
    """Records the files of the command line."""
    read = [Result(**entry) for name in sys.argv[1:] for entry in json.loads(Path(name).read_text())]
    record(list({result.name: result for result in read}.values()), ROOT)


if __name__ == "__main__":
    main()
