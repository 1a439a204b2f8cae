"""What vLLM's plugin costs and changes, without vLLM; tests/engine/test_plugin.py has vLLM."""

import logging
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpool.client.vllm.settings import VARIABLES, Settings, pool_of_model
from kvpool.vllm_plugin import register
from support.paths import ROOT
from support.waiting import DEADLINE_SECONDS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class FakeArguments:
    """As vLLM's EngineArgs."""

    additional_config: object = None

    def create_engine_config(self, *args: object) -> tuple[object, ...]:
        """Makes a configuration."""
        return ("config", *args)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> type[FakeArguments]:
    """A class that has not been wrapped, in the place of vLLM's."""
    for name in [each for each in os.environ if each.startswith("KVPOOL_")]:
        monkeypatch.delenv(name)
    module: Any = ModuleType("vllm.engine.arg_utils")
    module.EngineArgs = type("EngineArgs", (FakeArguments,), {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made: type[FakeArguments] = module.EngineArgs
    return made


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of the module that chooses the classes."""
    calls: list[str] = []
    module: Any = ModuleType("kvpool.client.vllm.activation")
    module.warn_of_variables = lambda *, uses_kvpool: calls.append(f"warn {uses_kvpool}")
    module.choose_classes = lambda _: calls.append("choose")
    module.check_services = calls.append
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(import_module("kvpool.client.vllm"), "activation", module, raising=False)
    return calls


def test_the_entry_point_is_the_plugin_and_the_extra_replaces_no_vllm() -> None:
    name, _, attribute = PROJECT["entry-points"]["vllm.general_plugins"]["kvpool"].partition(":")
    assert getattr(import_module(name), attribute) is register
    needed = " ".join([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["vllm"]])
    assert "vllm" not in needed
    assert "torch" not in needed


def test_an_engine_without_settings_imports_nothing_for_it() -> None:
    program = "import sys; from kvpool.vllm_plugin import register; register(); register(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS, env={}
    )
    loaded = set(done.stdout.split())
    assert "kvpool.vllm_plugin" in loaded
    assert not loaded & {"grpc", "torch", "vllm", "kvpool.client", "kvpool.core", "google.protobuf"}


def test_the_method_is_wrapped_once(arguments: type[FakeArguments]) -> None:
    register()
    wrapped = arguments.create_engine_config
    assert wrapped is not FakeArguments.create_engine_config
    register()
    assert arguments.create_engine_config is wrapped


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"config": {"other": 1}}, []),
        ({"KVPOOL_ADDRESS": ""}, ["warn False"]),
        ({"KVPOOL_MEMORY": "unix:/m"}, ["warn False"]),
        ({"KVPOOL_ADDRESS": "unix:/s"}, ["warn True", "choose", ("config", 7)]),
        ({"config": {"kvpool": {}}}, ["warn True", "choose", ("config", 7)]),
        ({"KVPOOL_ADDRESS": "unix:/s", "KVPOOL_VLLM_PLUGIN": "1"}, ["warn True", "choose", ("config", 7)]),
        ({"KVPOOL_ADDRESS": "unix:/s", "KVPOOL_VLLM_PLUGIN": "0", "config": {"kvpool": {}}}, []),
    ],
)
def test_settings_decide_when_the_configuration_is_made(
    arguments: type[FakeArguments],
    activated: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    expected: list[Any],
) -> None:
    register()
    made = arguments()
    made.additional_config = settings.get("config")
    for name in settings.keys() - {"config"}:
        monkeypatch.setenv(name, settings[name])
    assert made.create_engine_config(7) == ("config", 7)
    assert activated == expected


def test_another_value_of_the_switch_is_refused(
    arguments: type[FakeArguments], activated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    monkeypatch.setenv("KVPOOL_VLLM_PLUGIN", "off")
    with pytest.raises(ValueError, match="KVPOOL_VLLM_PLUGIN must be 0 or 1, not 'off'"):
        arguments().create_engine_config()
    assert not activated


@pytest.mark.parametrize(("scheduler", "is_shown"), [("kvpool.client.vllm.Scheduler", False), ("own.Scheduler", True)])
def test_vllms_warning_of_other_schedulers_is_not_given_for_kvpools(
    caplog: pytest.LogCaptureFixture, scheduler: str, *, is_shown: bool
) -> None:
    register()
    logger = logging.getLogger("vllm.config.scheduler")
    logger.warning("Using custom scheduler class %s. This scheduler interface is not public", scheduler)
    logger.warning("another warning, of %s", scheduler)
    assert len(caplog.messages) == 1 + is_shown


def test_every_variable_that_kvpool_reads_is_known() -> None:
    """So that none of them is called unknown in an engine."""
    packages = (ROOT / name for name in ("client", "gpu_worker", "proto", "server"))
    sources = "".join(path.read_text() for package in packages for path in package.rglob("*.py"))
    read = set(re.findall(r"[\"'](KVPOOL_[A-Z_]+[A-Z])[\"']", sources))
    assert {"KVPOOL_ADDRESS", "KVPOOL_TOKEN", "KVPOOL_REPLAY_ADDRESS"} <= read
    assert read - {"KVPOOL_REPLAY_ADDRESS"} <= set(VARIABLES)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)

    def make(name: str) -> str:
        Path(name).mkdir(parents=True)
        return name

    return make


@pytest.mark.parametrize(
    ("model", "pool"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("s3://bucket/a model", "s3-//bucket/a-model"),
        ("/cache/models--Qwen--Qwen3-0.6B/snapshots/c1899de2", "Qwen/Qwen3-0.6B"),
        ("m" * 130, "m" * 100),
    ],
)
def test_the_pool_has_the_models_name_by_default(model: str, pool: str) -> None:
    assert pool_of_model(model) == pool


def test_the_pool_has_the_last_part_of_a_models_folder(folder: Callable[[str], str]) -> None:
    assert pool_of_model(folder("models/tiny llama/")) == "tiny-llama"
    assert pool_of_model(folder("Qwen/Qwen3-0.6B")) == "Qwen3-0.6B"


def test_a_name_that_is_given_comes_before_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/s")
    monkeypatch.delenv("KVPOOL_POOL", raising=False)
    assert Settings.of({}, "org/model").pool == "org/model"
    with pytest.raises(ValueError, match=r"needs additional_config\['kvpool'\]\['pool'\], or KVPOOL_POOL"):
        Settings.of({"kvpool": {"memory_id": "m"}}, "org/model")
    monkeypatch.setenv("KVPOOL_POOL", "env")
    assert Settings.of({}, "org/model").pool == "env"
    assert Settings.of({"kvpool": {"pool": "own"}}, "org/model").pool == "own"


DENSE, MOE = (SimpleNamespace(served_model_name="m", is_moe=is_moe) for is_moe in (False, True))


@pytest.mark.parametrize(
    ("model", "size", "index", "pool"),
    [
        (DENSE, 1, 0, "p"),
        (MOE, 1, 0, "p"),
        (DENSE, 1, 1, "p.dp1"),  # as in the engine's process
        (DENSE, 2, 0, "p"),  # as in the process that starts the engines
        (DENSE, 2, 1, "p.dp1"),
        (MOE, 2, 0, "p.dp0"),
        (MOE, 2, 1, "p.dp1"),
    ],
)
def test_data_parallel_engines_have_a_pool_and_a_lender_each_unless_they_share_one(
    model: SimpleNamespace, size: int, index: int, pool: str
) -> None:
    def used(memory: str) -> tuple[str, str]:
        config = SimpleNamespace(
            additional_config={"kvpool": {"address": "unix:/s", "pool": "p", "memory": memory}},
            model_config=model,
            parallel_config=SimpleNamespace(data_parallel_size=size, data_parallel_index=index),
        )
        settings = Settings.of_engine(config)
        return settings.pool, settings.memory_of(3)

    assert used("") == (pool, "")
    assert used("unix:/m-{dp}-{rank}") == (pool, f"unix:/m-{index}-3")
    assert used("unix:/m-{rank}") == ("p", "unix:/m-3")
