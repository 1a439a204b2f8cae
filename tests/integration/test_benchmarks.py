"""`python -m benchmarks` as a person or a program runs it. Figures are checked for presence, not for value."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import Report
from benchmarks.tables import markdown
from support import processes
from support.paths import DOCS
from support.vllm import VERSION, write_vllm

DOCUMENTED = json.loads((DOCS / "bench" / "bench.json").read_text())
"""What a whole run beside vLLM reported."""
ON_A_STREAM = {"echo_stream", "empty_step"}
BENCHMARKS = sys.executable, "-m", "benchmarks"


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return processes.run(
        [*BENCHMARKS, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def whole(files: Path) -> subprocess.CompletedProcess[str]:
    """A run of everything, without vLLM."""
    return run("--quick", "--json", "--save", files / "saved" / "run.json")


@pytest.mark.slow
def test_the_last_line_is_one_object_with_every_documented_figure(whole: subprocess.CompletedProcess[str]) -> None:
    answer = last_line(whole)
    assert answer.keys() >= DOCUMENTED.keys()
    for part in ("machine", "settings", "core", "grpc", "tcp", "stages", "server_time", "growth"):
        assert answer[part].keys() >= DOCUMENTED[part].keys()
    for part, sizes in {"sessions": "1 2 8 32", "pools": "1 2", "pool_sizes": "1000 10000 100000"}.items():
        assert list(answer[part]) == sizes.split()
        assert all(figures.keys() >= DOCUMENTED[part][size].keys() for size, figures in answer[part].items())
    assert answer["ratios"].keys() == {"empty_step_to_echo", "server_time_to_echo", "pool_size_largest_to_smallest"}
    for side in ("core", "grpc", "tcp", "server_time"):
        # The process need not grow by the bytes of a block: memory that was freed before is used again.
        assert {name for name, figure in answer[side].items() if figure <= 0} <= {"bytes_per_block"}


@pytest.mark.slow
def test_without_vllm_a_line_on_stderr_reports_the_skipped_columns(whole: subprocess.CompletedProcess[str]) -> None:
    assert last_line(whole)["vllm"] is None
    (line,) = (line for line in whole.stderr.splitlines() if not line.startswith("kvpool: measuring: "))
    assert "--vllm" in line
    assert "skipped" in line


@pytest.mark.slow
def test_the_saved_json_equals_the_output_and_is_read_again(
    whole: subprocess.CompletedProcess[str], files: Path
) -> None:
    saved = json.loads((files / "saved" / "run.json").read_text())
    assert saved == last_line(whole)
    page = markdown(Report.from_json(saved))
    assert "| decode step, 256 requests |" in page
    assert "### Concurrent sessions" in page
    assert "| 2 | one process per pool |" in page


@pytest.mark.slow
def test_a_later_run_is_compared_figure_by_figure(whole: subprocess.CompletedProcess[str], files: Path) -> None:
    earlier = files / "earlier.txt"
    earlier.write_text(f"something printed before\n{whole.stdout}")
    answer = last_line(run("--quick", "--json", "--only", "streams", "--compare", earlier))
    assert answer["compare"].keys() == {f"{side}.{name}" for side in ("grpc", "tcp") for name in ON_A_STREAM}
    before, after = last_line(whole)["grpc"]["empty_step"], answer["grpc"]["empty_step"]
    assert answer["compare"]["grpc.empty_step"] == pytest.approx(after / before, rel=0.01)
    printed = run("--quick", "--only", "streams", "--compare", earlier)
    assert "this run / the earlier run" in printed.stdout
    assert "empty step" in printed.stdout
    assert last_line(printed)["compare"].keys() == answer["compare"].keys()


@pytest.mark.slow
def test_vllm_does_the_same_work_beside_ours(tmp_path: Path) -> None:
    path = os.pathsep.join(write_vllm(tmp_path))
    sections = [option for name in ("prompts", "decodes", "memory", "growth") for option in ("--only", name)]
    done = run("--quick", "--json", *sections, "--vllm", sys.executable, PYTHONPATH=path)
    answer = last_line(done)
    assert "skipped" not in done.stderr
    vllm = answer["vllm"]
    assert vllm["version"] == VERSION
    assert {"lookup_miss_256", "prompt_256_end_to_end_sha256", "bytes_per_block", "construct_1M_ms"} <= set(vllm)
    ratio = answer["ratios"]["grpc_to_vllm"]["decode_step_256_requests"]
    assert ratio == pytest.approx(
        answer["grpc"]["decode_step_256_requests"] / vllm["decode_step_256_requests"], rel=0.01
    )
    assert set(answer["growth"]["requests"]["16"]) == {"grpc", "vllm"}


@pytest.mark.slow
@pytest.mark.parametrize("python", ["/no/such/python", sys.executable, "/bin/true"])
def test_an_interpreter_without_vllm_is_refused_before_anything_is_measured(python: str, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('no vLLM here')")
    done = run("--quick", "--vllm", python, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert done.returncode == 2
    assert "Error: --vllm: " in done.stderr
    assert not done.stdout
    if python == sys.executable:
        assert "ImportError: no vLLM here" in done.stderr


def test_compare_refuses_a_file_without_a_report(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"version": 1}')
    done = run("--quick", "--compare", tmp_path / "other.json")
    assert done.returncode == 2
    assert "--compare" in done.stderr


@pytest.mark.slow
def test_pictures_need_matplotlib(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
    )
    command = [*BENCHMARKS, "--plots", str(tmp_path / "plots")]  # not a fork, which has imported it
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--plots" in done.stderr
    assert "make bench" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
def test_pictures_are_drawn(tmp_path: Path) -> None:
    done = run("--quick", "--only", "sessions", "--only", "evictions", "--plots", tmp_path / "plots")
    assert done.returncode == 0, done.stderr
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [path.name for path in pictures] == ["bench-calls.svg", "bench-growth.svg"]
    assert all(path.read_text().startswith("<?xml") for path in pictures)
