"""Engines that use kvpool because their settings say so: vLLM's plugin chooses the classes."""

import contextlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from engine.driving import Setup, make_scheduler
from engine.environment import VLLM_ENVIRONMENT
from engine.lending import PoolLender
from engine.models import LLAMA, write_model
from engine.serving import site
from engine.vllm_serve import NUM_BLOCKS, REQUESTS, Serving
from kvpool.client import NotFoundError, connect
from kvpool.client.vllm import Scheduler, activation, version_check
from kvpool.client.vllm.pool_config import UnsupportedError
from kvpool.client.vllm.versions import VERSION
from kvpool.client.vllm.weights import default_weights_version
from kvpool.core.errors import UnavailableError, WrongStateError
from kvpool.core.ids import PoolName
from kvpool.lending.lender_client import connect_lender
from support import processes
from support.lending import DECLARED, lender_process
from support.waiting import DEADLINE_SECONDS

SCHEDULER, WORKER = "kvpool.client.vllm.Scheduler", "kvpool.client.vllm.Worker"
PLAIN = "vllm.v1.core.sched.scheduler.Scheduler"
LENDS = pytest.mark.skipif(not VERSION.startswith(("0.32", "0.33")), reason="this version cannot use lent memory")


class OwnScheduler(Scheduler):
    """A user's subclass."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("KVPOOL_")]:
        monkeypatch.delenv(name)
    load_general_plugins()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny llama"
    write_model(LLAMA, folder)
    return folder


def arguments_of(model: Path, **values: Any) -> EngineArgs:
    """Arguments of an engine."""
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=512, block_size=32, **values
    )


def chosen(model: Path, **values: Any) -> tuple[Any, str, bool | None]:
    """Returns scheduler, worker and async scheduling of an engine's arguments when its configuration is made.

    No server is asked.
    """
    arguments = arguments_of(model, **values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation, "check_services", lambda _: None)
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


def test_lent_memory_of_another_version_is_refused_and_nothing_replaced(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/s")
    monkeypatch.setenv("KVPOOL_MEMORY", "unix:/m")
    monkeypatch.setattr("kvpool.client.vllm.lendable.VERSION", "0.34.0")
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
    for named in ("", "0.34.0"):
        monkeypatch.setenv("KVPOOL_UNTESTED_VERSION", named)
        with pytest.raises(UnsupportedError, match=r"use 0\.32 or 0\.33; untested_version='0\.34\.1' runs it"):
            arguments.create_engine_config()
    assert (arguments.scheduler_cls, arguments.worker_cls, arguments.async_scheduling) == (None, "auto", None)
    monkeypatch.setenv("KVPOOL_UNTESTED_VERSION", "0.34.1")
    assert chosen(model) == (SCHEDULER, "auto", None)
    monkeypatch.setattr(version_check, "missing_methods", lambda: ["KVCacheManager.new_thing is missing"])
    with pytest.raises(UnsupportedError, match="new_thing is missing"):
        chosen(model)


@pytest.mark.parametrize("name", ["enable_fault_tolerance", "vllm snapshot"])
def test_an_engine_that_vllm_would_continue_is_refused_before_the_model_is_loaded(
    name: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/s")
    arguments = EngineArgs(model=str(model), skip_tokenizer_init=True)
    if name == "vllm snapshot":
        monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "vllm.snapshot.server", "--", "model"])
    else:
        monkeypatch.setattr(arguments, name, True)
    with pytest.raises(UnsupportedError, match=f"does not support {name} of vLLM"):
        arguments.create_engine_config()
    assert (arguments.scheduler_cls, arguments.worker_cls, arguments.async_scheduling) == (None, "auto", None)


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


def test_wrong_settings_are_refused_before_the_engine_starts(model: Path) -> None:
    with pytest.raises(ValueError, match=r"needs additional_config\['kvpool'\]\['address'\], or KVPOOL_ADDRESS"):
        chosen(model, additional_config={"kvpool": {"pool": "p"}})


# Server and lenders are asked before the model is loaded.


@pytest.fixture
def lent(
    address: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[PoolLender, str]]:
    """A lender that an engine is configured for, and the pool."""
    pool = f"asked-{abs(hash(request.node.name))}"
    with TemporaryDirectory() as folder:
        lender = PoolLender(Path(folder), address)
        for name, value in {"ADDRESS": address, "POOL": pool, "MEMORY": lender.address}.items():
            monkeypatch.setenv(f"KVPOOL_{name}", value)
        yield lender, pool
        lender.stop()


def test_a_server_that_does_not_answer_is_reported_before_the_model_is_loaded(model: Path, tmp_path: Path) -> None:
    settings = {"address": f"unix:{tmp_path}/none", "deadline_seconds": 0.1}
    with pytest.raises(UnavailableError, match="there is no such socket"):
        arguments_of(model, additional_config={"kvpool": settings}).create_engine_config()


@LENDS
def test_a_lender_that_starts_is_waited_for_and_one_that_does_not_is_reported(
    model: Path, lent: tuple[PoolLender, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lender, _ = lent
    lender.stop()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        lender.start()

    monkeypatch.setattr("kvpool.client.vllm.lenders.time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
    arguments_of(model).create_engine_config()
    assert len(pauses) == 1
    assert [(kind, each.lending.client_name.split()[-1]) for kind, each in lender.requests] == [("hello", "start")]
    lender.stop()
    settings = {"kvpool": {"deadline_seconds": 0.1}}
    with pytest.raises(
        UnavailableError, match=r"kvpool memory unix:.*: NO_LENDER: .* the worker that made it has ended"
    ):
        arguments_of(model, additional_config=settings).create_engine_config()


@LENDS
@pytest.mark.parametrize(
    ("offer", "message"),
    [
        ({"rank": 1}, "it lends rank 1 of 1, and this is worker 0 of 1"),
        ({"world_size": 2}, "it lends rank 0 of 2, and this is worker 0 of 1"),
        ({"device": "cuda:0"}, "its memory is on cuda:0, and the engine computes on cpu"),
        ({}, "OTHER_POOL: pool_name: .* belongs to pool 'other'. Set KVPOOL_POOL to the pool of the lender"),
    ],
    ids=["rank", "world size", "device", "pool"],
)
def test_the_lender_of_another_engine_is_reported_before_the_model_is_loaded(
    model: Path, lent: tuple[PoolLender, str], offer: dict[str, Any], message: str
) -> None:
    lender, _ = lent
    for name, value in offer.items():
        setattr(lender.offer, name, value)
    if not offer:
        text = "'asked'; this memory belongs to pool 'other'"
        lender.answers["hello"] = WrongStateError("OTHER_POOL", text, field="pool_name")
    with pytest.raises((ValueError, WrongStateError), match=rf"^kvpool memory {lender.address}: {message}"):
        arguments_of(model).create_engine_config()


@LENDS
def test_an_engine_of_another_model_is_reported_before_the_model_is_loaded_while_the_memory_is_in_use(
    model: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lender_process(address, pool="in-use") as lender, connect(address) as client:
        for name, value in {"ADDRESS": address, "POOL": "in-use", "MEMORY": lender.address}.items():
            monkeypatch.setenv(f"KVPOOL_{name}", value)
        other = connect_lender(lender.address, "in-use")
        other.map(replace(DECLARED, config=replace(DECLARED.config, name=PoolName("in-use"))), DEADLINE_SECONDS)
        arguments_of(model).create_engine_config()
        with client.open_session("in-use"):
            before = client.get_pool("in-use")
            message = r"MEMORY_DIFFERS: fingerprint\[\"decode.*\"\]: '1', the engines .* have None\. Start the engine"
            with pytest.raises(WrongStateError, match=message):
                arguments_of(model).create_engine_config()
            assert client.get_pool("in-use") == before
        other.close()


def _call(address: str) -> None:
    with connect(address, deadline_seconds=DEADLINE_SECONDS) as client, contextlib.suppress(NotFoundError):
        client.get_pool("forked")


def test_an_engine_can_be_forked_from_the_process_that_asked(model: Path, address: str) -> None:
    """As vLLM does by default: what gRPC started in this process is gone in the engine's."""
    arguments_of(model, additional_config={"kvpool": {"address": address}}).create_engine_config()
    engine = multiprocessing.get_context("fork").Process(target=_call, args=(address,))
    engine.start()
    engine.join(DEADLINE_SECONDS)
    assert engine.exitcode == 0
    engine.kill()


@pytest.mark.parametrize("is_changed", [False, True])
def test_weights_are_identified_before_the_model_is_loaded_and_must_stay(
    tmp_path: Path, address: str, *, is_changed: bool
) -> None:
    model = tmp_path / "model"
    write_model(LLAMA, model)
    (model / "model.safetensors").write_bytes(bytes(64))
    settings = {"address": address, "pool": "loaded", "memory_id": "gpu0"}
    config = arguments_of(model, additional_config={"kvpool": settings}).create_engine_config()
    config = deepcopy(config)  # as for the processes of engines
    if is_changed:
        (model / "model.safetensors").write_bytes(bytes(65))
    assert default_weights_version(config).startswith("unknown-" if is_changed else "files-")


@LENDS
def test_api_servers_ask_nobody(
    model: Path, lent: tuple[PoolLender, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVPOOL_ADRESS", "unix:/s")
    monkeypatch.setattr(multiprocessing.current_process(), "name", "ApiServer_0")
    arguments_of(model).create_engine_config()
    assert not lent[0].requests
    assert not [each for each in caplog.records if each.name.startswith("kvpool")]


@pytest.mark.parametrize(
    ("variables", "warnings"),
    [
        (
            {"KVPOOL_MEMORY": "unix:/m"},
            {"KVPOOL_MEMORY": "KVPOOL_ADDRESS is not set, so the engine does not use kvpool"},
        ),
        ({"KVPOOL_ADRESS": "unix:/s"}, {"KVPOOL_ADRESS": "not known; did you mean KVPOOL_ADDRESS?"}),
        ({"KVPOOL_ADDRESS": "unix:/s", "KVPOOL_QQQQQQQQQQQQQQ": "1"}, {"KVPOOL_QQQQQQQQQQQQQQ": "not known"}),
        (
            {"KVPOOL_ADDRESS": "unix:/s", "KVPOOL_MEMORY": "unix:/m", "KVPOOL_TOKEN": "t", "KVPOOL_SERVE_X": ""},
            {},
        ),
        ({"KVPOOL_SERVER_PORT_9464_TCP_ADDR": "10.0.0.1", "KVPOOL_PORT": "tcp://10.0.0.1:1"}, {}),
        ({"KVPOOL_MEMORY": "unix:/m", "KVPOOL_X": "1", "KVPOOL_VLLM_PLUGIN": "0"}, {}),
    ],
    ids=["memory alone", "misspelt", "unknown", "known", "of Kubernetes", "switched off"],
)
def test_variables_without_effect_are_named(
    model: Path,
    variables: dict[str, str],
    warnings: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    chosen(model)
    found = {vars(each)["setting"]: vars(each)["error"] for each in caplog.records if each.msg == "variable ignored"}
    assert found == warnings


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


@pytest.mark.slow
def test_one_variable_puts_an_engine_on_kvpool_and_another_takes_it_off(model: Path, address: str) -> None:
    with ThreadPoolExecutor() as threads:
        on = threads.submit(_run, model, KVPOOL_ADDRESS=address)
        off = threads.submit(_run, model, KVPOOL_ADDRESS=address, KVPOOL_VLLM_PLUGIN="0", KVPOOL_POOL="off")
    (pooled, log), (plain, plain_log) = on.result(), off.result()
    assert pooled == plain
    assert [cached for _, cached in pooled] == [0, 96, 0]
    use = f"engine uses kvpool pool=tiny-llama memory=own address={address} setting=KVPOOL_ADDRESS"
    assert log.count(use) == log.count("engine attached") == 1, log
    fields = r"pool=tiny-llama session=\d+ epoch=\d+ memory=vllm-\S+ blocks=64 cached_blocks=0"
    assert re.search(
        rf"INFO .*\] engine attached {fields} address={address} async_scheduling=\w+$", log, re.MULTILINE
    ), log
    assert "Using custom scheduler class" not in log
    assert "engine uses kvpool" not in plain_log
    assert "engine attached" not in plain_log
    with connect(address) as client:
        assert client.get_pool("tiny-llama").prefix_cache.hits_tokens == 96
        with pytest.raises(NotFoundError):
            client.get_pool("off")


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
        assert [engine.complete(each).tokens for each in requests] == expected
        use = f"engine uses kvpool pool={pool_name} memory={lent.memory} address={address} setting=KVPOOL_ADDRESS\n"
        assert engine.process.log.count(use) == engine.process.log.count("engine uses kvpool") == 1
        with connect(address) as client:
            pool = client.get_pool(pool_name)
        assert (pool.sessions, len(pool.ranks)) == (1, 1)
        assert pool.prefix_cache.hits_tokens
        engine.kill()
