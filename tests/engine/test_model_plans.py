"""`kvpool plan` against vLLM: what vLLM's own models declare and plan for configs of many architectures.

`--record-plans` writes tests/golden/model_plans.json.gz, which tests/unit/models/test_vllm_plans.py compares with what
`kvpool.models` derives. Here vLLM is asked again: its answers must be those.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from vllm import __version__ as vllm_version

from engine.environment import VLLM_ENVIRONMENT
from engine.model_configs import cases, config_of
from engine.record_class_defaults import TARGET, table
from support import processes
from support.plans import read_recorded, write_recorded

QUICK: Final = ("DeepseekV4ForCausalLM of Flash", "Gemma4ForCausalLM", "Lfm2ForCausalLM")
"""What a change runs: compressed vectors, a cache that layers share, heads that differ, and states."""
_TIMEOUT_SECONDS: Final = 1800


def _parameters() -> list[Any]:
    return [
        pytest.param(name, marks=() if name in QUICK else (pytest.mark.complete, pytest.mark.slow)) for name in cases()
    ]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM answers for the cases of this run, asked in one process."""
    chosen = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and "answers" in item.fixturenames
    ]
    output = tmp_path_factory.mktemp("plans") / "answers.jsonl"
    program = (str(sys.executable), "-m", "engine.plans_program", str(output), *map(str, chosen))
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS, env=processes.environment()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {row["case"]: row for row in map(json.loads, output.read_text().splitlines())}
    if request.config.getoption("--record-plans", default=False):
        known = {**read_recorded(), **found}
        write_recorded({case: known[case] for case in cases() if case in known})
    return found


@pytest.mark.parametrize("case", _parameters())
def test_vllm_answers_as_recorded(case: str, answers: dict[str, dict[str, Any]]) -> None:
    recorded = read_recorded()[case]
    if recorded["vllm"] != vllm_version:
        pytest.skip(f"recorded with vLLM {recorded['vllm']}")
    assert _without_words(answers[case]) == _without_words(recorded)


def _without_words(row: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the words of an error, which depend on what is installed beside vLLM."""
    return {**row, "error": True} if "error" in row else row


def test_defaults_of_config_classes_are_as_recorded() -> None:
    assert Path(TARGET).read_text() == table()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("DeepseekV4ForCausalLM of Flash", "CPU_MLA"),
        pytest.param("Lfm2ForCausalLM", "CPU_ATTN", marks=pytest.mark.complete),
    ],
)
def test_the_command_takes_the_layers_of_vllm(name: str, backend: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_of(name)))
    options = ("--memory", "40GiB", "--max-model-len", "8192", "--tp", "2", "--json")
    theirs = _planned(config, *options, "--with-vllm")
    ours = _planned(config, *options, "--backend", backend)
    for key in ("architecture", "num_blocks", "max_concurrency", "max_requests", "kv_bytes_per_token"):
        assert theirs[key] == ours[key]
    assert any("layers are those of vLLM" in note for note in theirs["notes"])
    assert len(theirs["groups"]) == len(ours["groups"]) > 1


@pytest.mark.complete
@pytest.mark.slow
def test_the_command_says_why_vllm_cannot_build_a_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["NobodyForCausalLM"], "model_type": "llama"}))
    done = _kvpool_plan(config, "--memory", "40GiB", "--with-vllm")
    assert done.returncode == 2
    assert "--with-vllm: vLLM cannot build the model without its weights: " in done.stderr
    assert "NobodyForCausalLM" in done.stderr


def _planned(config: Path, *options: str) -> dict[str, Any]:
    done = _kvpool_plan(config, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def _kvpool_plan(config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    program = (sys.executable, "-m", "kvpool.cli", "plan", str(config), *options)
    environment = processes.environment(**VLLM_ENVIRONMENT)
    return subprocess.run(program, capture_output=True, text=True, check=False, timeout=600, env=environment)
