"""Engines that use kvpool because their settings say so: vLLM's plugin chooses the classes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from engine.driving import Setup, make_scheduler
from engine.environment import VLLM_ENVIRONMENT
from engine.models import LLAMA, write_model
from engine.serving import site
from engine.vllm_serve import NUM_BLOCKS, REQUESTS, Serving, serving
from kvpool.client import NotFoundError, connect
from kvpool.client.vllm import Scheduler, version_check
from kvpool.client.vllm.pool_config import UnsupportedError
from kvpool.client.vllm.versions import VERSION
from support import processes

SCHEDULER, WORKER = "kvpool.client.vllm.Scheduler", "kvpool.client.vllm.Worker"
PLAIN = "vllm.v1.core.sched.scheduler.Scheduler"
LENDS = pytest.mark.skipif(not VERSION.startswith(("0.32", "0.33")), reason="this version cannot use lent memory")
RUNS = pytest.mark.skipif(VERSION.startswith("0.14"), reason="engines of older versions do not run here")
VARIABLES = ("KVPOOL_ADDRESS", "KVPOOL_POOL", "KVPOOL_MEMORY", "KVPOOL_VLLM_PLUGIN")


class OwnScheduler(Scheduler):
    """A user's subclass."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    load_general_plugins()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny llama"
    write_model(LLAMA, folder)
    return folder


def chosen(model: Path, **values: Any) -> tuple[Any, str, bool | None]:
    """Returns scheduler, worker and async scheduling of an engine's arguments when its configuration is made."""
    arguments = EngineArgs(
        model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=512, block_size=32, **values
    )
    config = arguments.create_engine_config()
    assert config.scheduler_config.scheduler_cls == arguments.scheduler_cls
    return arguments.scheduler_cls, arguments.worker_cls, arguments.async_scheduling


def test_an_engine_without_settings_is_left_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(model) == (None, "auto", None)
    assert chosen(model, scheduler_cls=PLAIN) == (PLAIN, "auto", None)
    monkeypatch.setenv("KVPOOL_POOL", "p")
    assert chosen(model) == (None, "auto", None), "no server is named"


def test_a_server_in_the_environment_or_the_configuration_is_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = (SCHEDULER, "auto", None)
    assert chosen(model, additional_config={"kvpool": {"address": "unix:/s"}}) == expected
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/s")
    assert chosen(model) == expected
    assert chosen(model, async_scheduling=False) == (SCHEDULER, "auto", False)


def test_memory_that_engines_share_leaves_async_scheduling_as_it_is(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/s")
    shared = {"kvpool": {"memory_id": "m", "pool": "p"}}
    assert chosen(model, additional_config=shared) == (SCHEDULER, "auto", None)


@LENDS
def test_lent_memory_needs_a_worker(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/s")
    monkeypatch.setenv("KVPOOL_MEMORY", "unix:/m")
    assert chosen(model) == (SCHEDULER, WORKER, None)
    assert chosen(model, async_scheduling=False) == (SCHEDULER, WORKER, False)
    own = "kvpool.client.vllm.worker.Worker"
    assert chosen(model, worker_cls=own) == (SCHEDULER, own, None)


def test_lent_memory_of_an_older_version_is_refused_and_nothing_replaced(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/s")
    monkeypatch.setenv("KVPOOL_MEMORY", "unix:/m")
    monkeypatch.setattr("kvpool.client.vllm.lendable.VERSION", "0.14.1")
    arguments = EngineArgs(model=str(model), skip_tokenizer_init=True)
    with pytest.raises(UnsupportedError, match=r"does not support lent memory of vLLM .*: use vLLM 0\.32\.x"):
        arguments.create_engine_config()
    assert (arguments.scheduler_cls, arguments.worker_cls, arguments.async_scheduling) == (None, "auto", None)


def test_a_version_that_is_not_supported_is_refused_before_the_model_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/s")
    monkeypatch.setattr(version_check, "VERSION", "0.34.1")
    arguments = EngineArgs(model=str(model), skip_tokenizer_init=True)
    with pytest.raises(UnsupportedError, match=r"use 0\.14\.1, 0\.32 or 0\.33; untested_version='0\.34\.1' runs it"):
        arguments.create_engine_config()
    assert (arguments.scheduler_cls, arguments.worker_cls, arguments.async_scheduling) == (None, "auto", None)
    monkeypatch.setenv("KVPOOL_UNTESTED_VERSION", "0.34.1")
    assert chosen(model) == (SCHEDULER, "auto", None)
    monkeypatch.setattr(version_check, "missing_methods", lambda: ["KVCacheManager.new_thing is missing"])
    with pytest.raises(UnsupportedError, match="new_thing is missing"):
        chosen(model)


def test_the_chosen_class_opens_a_session(
    model: Path, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", address)
    arguments = EngineArgs(model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=512)
    config = arguments.create_engine_config()
    folder = tmp_path / "a model"
    folder.mkdir()
    scheduler = make_scheduler(config.scheduler_config.get_scheduler_cls(), Setup(), folder)
    with connect(address) as client:
        assert client.get_pool("a-model").sessions == 1
        scheduler.shutdown()
        assert client.get_pool("a-model").sessions == 0


def test_classes_of_the_users_own_are_respected_if_they_are_kvpools(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/s")
    own = f"{OwnScheduler.__module__}.OwnScheduler"
    monkeypatch.setitem(sys.modules, OwnScheduler.__module__, sys.modules[__name__])
    for scheduler_cls in (SCHEDULER, OwnScheduler, own):
        assert chosen(model, scheduler_cls=scheduler_cls)[0] == scheduler_cls


@pytest.mark.parametrize("source", ["KVPOOL_ADDRESS", "additional_config"])
def test_another_scheduler_is_refused_and_nothing_replaced(
    model: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = {}
    if source == "KVPOOL_ADDRESS":
        monkeypatch.setenv(source, "unix:/s")
    else:
        values["additional_config"] = {"kvpool": {"address": "unix:/s"}}
    monkeypatch.setenv("KVPOOL_MEMORY", "unix:/m")
    arguments = EngineArgs(model=str(model), skip_tokenizer_init=True, scheduler_cls=PLAIN, **values)
    message = f"scheduler_cls is '{PLAIN}', but {source} names a kvpool server.* set KVPOOL_VLLM_PLUGIN=0"
    with pytest.raises(ValueError, match=message):
        arguments.create_engine_config()
    assert (arguments.scheduler_cls, arguments.worker_cls, arguments.async_scheduling) == (PLAIN, "auto", None)


def test_wrong_settings_are_refused_before_the_engine_starts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"needs additional_config\['kvpool'\]\['address'\], or KVPOOL_ADDRESS"):
        chosen(model, additional_config={"kvpool": {"pool": "p"}})
    with pytest.raises(ValueError, match=r"\['adress'\] is not known"):
        chosen(model, additional_config={"kvpool": {"adress": "unix:/s"}})
    monkeypatch.setenv("KVPOOL_VLLM_PLUGIN", "no")
    with pytest.raises(ValueError, match="KVPOOL_VLLM_PLUGIN must be 0 or 1, not 'no'"):
        chosen(model)


def test_it_can_be_switched_off(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/s")
    monkeypatch.setenv("KVPOOL_VLLM_PLUGIN", "0")
    assert chosen(model) == (None, "auto", None)
    assert chosen(model, scheduler_cls=PLAIN)[0] == PLAIN


# Whole engines.

_PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
              max_model_len=512, block_size=32, num_gpu_blocks_override=64)
    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=8)
    for prompt in (range(1, 101), range(1, 101), range(50, 150)):
        (answer,) = llm.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
        print(json.dumps([list(answer.outputs[0].token_ids), answer.num_cached_tokens]))
"""


def _run(model: Path, **variables: str) -> tuple[list[Any], str]:
    """Runs the program with an engine in a process of its own; returns its answers, and what it logged."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(model)],
        capture_output=True,
        text=True,
        env=processes.environment(
            **VLLM_ENVIRONMENT, VLLM_LOGGING_LEVEL="INFO", VLLM_ENABLE_V1_MULTIPROCESSING="1", **variables
        ),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("[[")], done.stdout + done.stderr


@RUNS
@pytest.mark.slow
def test_one_variable_puts_an_engine_on_kvpool_and_another_takes_it_off(model: Path, address: str) -> None:
    with ThreadPoolExecutor() as threads:
        on = threads.submit(_run, model, KVPOOL_ADDRESS=address)
        off = threads.submit(_run, model, KVPOOL_ADDRESS=address, KVPOOL_VLLM_PLUGIN="0", KVPOOL_POOL="off")
    (pooled, log), (plain, plain_log) = on.result(), off.result()
    assert pooled == plain
    assert [cached for _, cached in pooled] == [0, 96, 0]
    use = f"engine uses kvpool pool=tiny-llama memory=own address={address} setting=KVPOOL_ADDRESS"
    assert [log.count(use), log.count("engine attached pool=tiny-llama")] == [1, 1], log
    assert "engine uses kvpool" not in plain_log
    assert "engine attached" not in plain_log
    with connect(address) as client:
        assert client.get_pool("tiny-llama").prefix_cache.hits_tokens == 96
        with pytest.raises(NotFoundError):
            client.get_pool("off")


@pytest.fixture(scope="module")
def starts() -> Iterator[Serving]:
    with serving() as started:
        yield started


@LENDS
@pytest.mark.complete
@pytest.mark.timeout(1200)
def test_variables_put_vllm_serve_on_lent_memory(
    starts: Serving, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = REQUESTS[:10]
    expected = starts.tokens_of_vllm_alone(requests)
    pool_name = "tiny"  # under which it serves the model
    with site(address, NUM_BLOCKS, pool_name) as lent:
        monkeypatch.setenv("KVPOOL_ADDRESS", address)
        monkeypatch.setenv("KVPOOL_MEMORY", lent.memory)
        engine = starts.start("--api-server-count", "2")
        engine.wait_ready()
        assert [engine.complete(each).tokens for each in requests] == expected
        use = f"engine uses kvpool pool={pool_name} memory={lent.memory} address={address} setting=KVPOOL_ADDRESS\n"
        assert engine.process.log.count(use) == engine.process.log.count("engine uses kvpool") == 1
        with connect(address) as client:
            pool = client.get_pool(pool_name)
        assert (pool.sessions, len(pool.ranks)) == (1, 1)
        assert pool.prefix_cache.hits_tokens
        engine.kill()
