"""Runs the checks of a GPU, stage by stage, and writes their results and figures: see --help.

A stage is a program with a time limit of its own. Its last line on stdout may be a JSON object of figures. A stage that
fails does not stop the next one. The folder of results gets results.json, results.md, and in stages.log what the stages
print.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
_PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "xdist.plugin", "_hypothesis_pytestplugin")
"""Plugins that a machine has besides may warn, which fails the tests."""
_PYTEST = (
    *("-m", "pytest", "-q", "-rfEs", "-n", str(min(8, os.cpu_count() or 1)), "-p", "no:cacheprovider"),
    *(part for plugin in _PLUGINS for part in ("-p", plugin)),
)


@dataclass(frozen=True, slots=True)
class Stage:
    """A program that checks or measures.

    Attributes:
        name: Name of the stage and of its log.
        what: What it shows.
        arguments: Arguments of Python.
        limit_seconds: Time after which it is killed.
        lacks: Why it cannot run here; empty if it can.
    """

    name: str
    what: str
    arguments: tuple[str, ...]
    limit_seconds: float
    lacks: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a stage."""

    name: str
    what: str
    outcome: str
    seconds: float
    figures: dict[str, object] = field(default_factory=dict)


def stages(device: str) -> list[Stage]:
    """All stages, in the order in which they run."""
    memory_gib = "40" if device.startswith("cuda") else "4"
    tests = ("tests/unit/gpu_worker", "tests/unit/examples")
    bench = ("-m", "benchmarks.parts.bench_device", "--device", device, "--memory-gib", memory_gib)
    no_vllm = "" if find_spec("vllm") else "vLLM is not installed"
    reference = ("-m", "examples.reference_engine", "--json", "--device", device)
    return [
        Stage("facts", "device, driver, versions", ("tests/gpu/facts.py", "--device", device), 60),
        Stage("tests", "tests of tensors, block tables, metadata, lent memory", (*_PYTEST, *tests), 150),
        Stage("memory", "memory that processes share", ("tests/gpu/memory.py", "--device", device), 120),
        Stage("engine", "two ranks on one device", reference, 60),
        Stage("engines", "engines on lent memory, killed processes", ("tests/gpu/engines.py", "--device", device), 180),
        Stage(
            "vllm",
            "vLLM engines, also on lent memory",
            ("-m", "gpu.vllm_engines", "--device", device),
            150,
            no_vllm if device.startswith("cuda") else "only for GPUs: tests/engine runs vLLM on CPU",
        ),
        Stage("tables", "allocation and block tables", bench, 40),
        Stage("steps", "a scheduler's step beside the device's", ("tests/gpu/steps.py", "--device", device), 90),
    ]


def run(stage: Stage, out: Path) -> Result:
    """Runs a stage if it can run here, and kills what it has left behind."""
    if stage.lacks:
        return Result(stage.name, stage.what, f"not run: {stage.lacks}", 0.0)
    paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    start = time.monotonic()
    with (out / "stages.log").open("a+") as log:
        log.write(f"\n=== {stage.name}\n")
        log.flush()
        begun = log.tell()
        process = subprocess.Popen(
            [sys.executable, *stage.arguments],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(stage.limit_seconds)
            outcome = "passed" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            outcome = f"not done within {stage.limit_seconds:g} s"
        finally:
            _kill(process)
        log.seek(begun)
        lines = log.read().splitlines()
    return Result(stage.name, stage.what, outcome, round(time.monotonic() - start, 1), figures(lines))


def figures(lines: Sequence[str]) -> dict[str, object]:
    """The figures in the output of a stage: its last JSON object, or the counts of pytest."""
    for line in reversed(lines):
        if line.startswith("{"):
            found: dict[str, object] = json.loads(line)
            return found
        if counts := re.findall(r"(\d+) (passed|failed|skipped|errors?|deselected)", line):
            return {what: int(count) for count, what in counts}
    return {}


def table(results: Sequence[Result]) -> str:
    """Results and figures as Markdown."""
    lines = ["| stage | result | s |", "|---|---|---:|"]
    lines += [f"| {result.what} | {result.outcome} | {result.seconds:g} |" for result in results]
    for result in results:
        groups = {name: value for name, value in result.figures.items() if isinstance(value, dict)}
        single = {name: value for name, value in result.figures.items() if name not in groups}
        lines += _rows(result.name, {"": single}) if single else []
        while groups:
            names = next(iter(groups.values())).keys()  # groups with the same figures share a table
            shared = {name: groups.pop(name) for name, value in tuple(groups.items()) if value.keys() == names}
            lines += _rows(result.name, shared)
    return "\n".join(lines) + "\n"


def _rows(title: str, columns: Mapping[str, Mapping[str, object]]) -> list[str]:
    """A table of figures by name, with a column per group of them."""
    spoken = [name.replace("_", " ") for name in columns]
    lines = ["", f"| {title} | {' | '.join(spoken)} |", f"|---|{'---:|' * len(columns)}"]
    for name in next(iter(columns.values())):
        values = " | ".join(str(column[name]) for column in columns.values())
        lines.append(f"| {name.replace('_', ' ')} | {values} |")
    return lines


def _kill(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def main() -> int:
    """Runs from the command line; exits with 1 if a stage has failed."""
    names = [stage.name for stage in stages("cpu")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stages", default=",".join(names), help=f"some of {','.join(names)}")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")), help="folder of results"
    )
    arguments = parser.parse_args()
    chosen = arguments.stages.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"no stages: {', '.join(sorted(unknown))}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "stages.log").unlink(missing_ok=True)
    results = []
    for stage in stages(arguments.device):
        if stage.name in chosen:
            results.append(result := run(stage, arguments.out))
            sys.stdout.write(f"{result.name}: {result.outcome}, {result.seconds:g} s, {json.dumps(result.figures)}\n")
            sys.stdout.flush()
            (arguments.out / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
            (arguments.out / "results.md").write_text(table(results))
    return 0 if all(result.outcome.startswith(("passed", "not run")) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
