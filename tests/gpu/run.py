"""Runs the checks of a GPU, stage by stage, and writes their results and figures: see --help.

A stage is a program with a time limit of its own. Its last line on stdout may be a JSON object of figures. A stage that
fails does not stop the next one. The folder of results gets results.json, results.md, and in stages.log what the stages
print. Stages that write files find it in $OUT.
"""

import argparse
import contextlib
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
_END_SECONDS = 40.0
"""Time that a stage has to end what it has started, when its own time is over."""
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
    tests = ("tests/unit/gpu_worker", "tests/unit/lending", "tests/unit/examples")
    bench = ("-m", "benchmarks.parts.bench_device", "--device", device, "--memory-gib", memory_gib)
    no_vllm, no_kernels = lacks_of_vllm()
    is_gpu = device.startswith("cuda")
    reference = ("-m", "examples.reference_engine", "--json", "--device", device)
    return [
        Stage("facts", "device, driver, versions", ("tests/gpu/facts.py", "--device", device), 60),
        Stage("tests", "tests of tensors, layouts, block tables, metadata and lent memory", (*_PYTEST, *tests), 150),
        Stage(
            "memory",
            "write in one process, read in another; kills, unmaps and exhausted memory under load; MPS; leaks",
            ("tests/gpu/memory.py", "--device", device),
            120,
        ),
        Stage(
            "host-memory",
            "copies to host memory and back: bandwidth, contents, kills in the middle",
            ("tests/gpu/host_memory.py", "--device", device),
            120,
        ),
        Stage("engine", "two ranks on one device, tokens equal a model without a cache", reference, 60),
        Stage(
            "engines",
            "engines hit each other's prefixes; kills of engine, server and worker; an upgrade of the worker",
            ("tests/gpu/engines.py", "--device", device),
            180,
        ),
        Stage(
            "vllm",
            "vLLM alone, on kvpool and on lent memory, two engines, one that sleeps: equal tokens, tables, counters",
            ("-m", "gpu.vllm_engines", "--device", device),
            210,
            no_vllm if is_gpu else "only for GPUs: tests/engine runs vLLM on CPU",
        ),
        *(
            Stage(
                f"vllm-native-{model}",
                f"vLLM as users run it, alone and on kvpool, with a model like {like}",
                ("-m", "gpu.vllm_native", "--device", device, "--models", model),
                500 if is_gpu else 1800,
                no_vllm or (no_kernels if is_gpu else ""),
            )
            for model, like in (("llama", "Llama 3 8B"), ("gemma", "Gemma 3 4B"))
        ),
        Stage("tables", "plans like Llama 3 70B and Gemma 3 27B: layouts, time of block tables", bench, 40),
        Stage(
            "steps",
            "a scheduler's step beside one of a model like Llama 3 8B; gathers from mapped memory",
            ("tests/gpu/steps.py", "--device", device),
            90,
        ),
        Stage(
            "vllm-figures",
            "vLLM alone beside kvpool, both as users run them: throughput, latency, restarts, sleep",
            ("-m", "gpu.vllm_figures", "--device", device),
            540 if is_gpu else 1800,
            no_vllm or (no_kernels if is_gpu else ""),
        ),
        Stage(
            "vllm-host-memory",
            "vLLM alone beside kvpool with host memory: the first token of prompts that were evicted",
            ("-m", "gpu.vllm_host_memory", "--device", device),
            300 if is_gpu else 900,
            no_vllm or (no_kernels if is_gpu else ""),
        ),
        Stage(
            "vllm-restarts",
            "memory of the device before and after engines on lent memory are killed",
            ("-m", "gpu.vllm_restarts", "--device", device),
            360 if is_gpu else 900,
            no_vllm or (no_kernels if is_gpu else ""),
        ),
    ]


def lacks_of_vllm() -> tuple[str, str]:
    """Why vLLM cannot run here, and why not with its own kernels; empty if it can."""
    vllm = find_spec("vllm")
    if vllm is None:
        return ("vLLM is not installed",) * 2
    folders = map(Path, vllm.submodule_search_locations or ())
    has_kernels = any(library for folder in folders for library in folder.glob("vllm_flash_attn/_vllm_fa3_C*"))
    return "", "" if has_kernels else "vLLM's kernels are not in the kit"


def run(stage: Stage, out: Path) -> Result:
    """Runs a stage if it can run here, and kills what it has left behind."""
    if stage.lacks:
        return Result(stage.name, stage.what, f"not run: {stage.lacks}", 0.0)
    paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "OUT": str(out.resolve()),
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
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
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
        lines += figure_rows(result.name, result.figures)
    return "\n".join(lines) + "\n"


def figure_rows(title: str, figures: Mapping[str, object]) -> list[str]:
    """Tables of the figures of a stage: single ones, and groups with the same figures beside each other."""
    groups = {name: value for name, value in figures.items() if isinstance(value, dict)}
    single = {name: value for name, value in figures.items() if name not in groups}
    lines = _rows(title, {"": single}) if single else []
    while groups:
        names = next(iter(groups.values())).keys()
        shared = {name: groups.pop(name) for name, value in tuple(groups.items()) if value.keys() == names}
        lines += _rows(title, shared)
    return lines


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
