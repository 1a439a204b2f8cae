"""Schedulers without a model whose engines load LoRAs and other weights, in memory that engines share."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from engine import test_sharing
from engine.driving import Setup
from engine.test_sharing import PROMPT, SETUP
from kvpool.client import connect
from kvpool.client.admin import AdminClient
from kvpool.client.vllm.weights import identify_files
from kvpool.core.events import BlockStored


class Engine(test_sharing.Engine):
    """A scheduler on a pool, with the calls of its engine's core."""

    def __init__(self, address: str, folder: Path, setup: Setup = SETUP, **settings: Any) -> None:
        super().__init__(address, folder.name, folder, setup, **settings)
        self.core: Any = SimpleNamespace(scheduler=self.scheduler, model_executor=Mock())

    def ask(self, name: str, lora: Any = None) -> int:
        """Runs a request to its end; returns how many tokens of it were cached."""
        return self.run(name, PROMPT, 4, lora_request=lora)

    @property
    def version(self) -> str:
        return str(self.scheduler.kv_cache_manager.session.weights_version)


@pytest.fixture
def engines(address: str, tmp_path: Path) -> tuple[Engine, Engine]:
    first = Engine(address, tmp_path, memory_id="gpu0")
    return first, Engine(address, tmp_path, memory_id="gpu0")


def write_adapter(folder: Path, weights: bytes = b"one") -> str:
    """Writes the files of a LoRA. Other weights have another size here, whatever the clock does."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.bin").unlink(missing_ok=True)
    (folder / "adapter_model.bin").write_bytes(weights)
    return str(folder)


def lora(path: str, number: int = 1, **values: Any) -> Any:
    return LoRARequest("sql", number, path, **values)


def test_a_lora_is_shared_with_engines_that_have_its_weights_only(
    engines: tuple[Engine, Engine], address: str, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "sql")
    first, second = engines
    assert first.ask("a", lora(path)) == 0
    assert second.ask("b", lora(path, number=5)) == 96
    assert second.ask("c") == 0, "the model without it"
    write_adapter(tmp_path / "sql", b"other")
    third = Engine(address, tmp_path, memory_id="gpu0")
    assert third.ask("d", lora(path)) == 0
    assert third.ask("e", lora(path)) == 96
    for engine in engines:
        assert engine.ask("f", lora(path)) == 0, "it may have either weights"


def test_an_unreadable_lora_is_never_shared(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    first, second = engines
    missing = lora(str(tmp_path / "missing"))
    assert [first.ask("a", missing), second.ask("b", missing), first.ask("c", missing)] == [0, 0, 0]


def test_a_salt_stays_part_of_the_keys(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    request = lora(write_adapter(tmp_path / "sql"))
    driver = engines[0].driver
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        driver.add(name, PROMPT, 4, lora_request=request, cache_salt=salt)
        driver.finish()
    assert [driver.cached[name] for name in "abc"] == [0, 0, 96]


def test_events_name_the_lora_as_vllm_does(address: str, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/e"
    engine = Engine(address, tmp_path, replace(SETUP, events_endpoint=endpoint), memory_id="gpu0")
    with connect(address) as client:
        batches = client.watch(tmp_path.name, snapshot=True)
        engine.ask("a", lora(write_adapter(tmp_path / "sql")))
        stored = next(event for batch in batches for event in batch.events if isinstance(event, BlockStored))
        assert stored.lora_name == "sql"


def test_memory_of_its_own_has_the_hashes_of_vllm(address: str, tmp_path: Path) -> None:
    engine = Engine(address, tmp_path)
    path = write_adapter(tmp_path / "sql")
    assert [engine.ask("a", lora(path)), engine.ask("b", lora(path))] == [0, 96]
    write_adapter(tmp_path / "sql", b"other")
    assert engine.ask("c", lora(path)) == 96
    assert engine.driver.requests["c"].cache_salt is None
    EngineCore.collective_rpc(engine.core, "reload_weights")
    assert engine.version == ""


def test_a_lora_that_is_loaded_in_place_is_another(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "sql")
    for engine, hit in zip(engines, (0, 96), strict=True):
        EngineCore.add_lora(engine.core, lora(path))
        assert engine.ask("a", lora(path)) == hit
    write_adapter(tmp_path / "sql", b"other")
    for engine, hit in zip(engines, (0, 96), strict=True):
        EngineCore.add_lora(engine.core, lora(path, load_inplace=True))
        each_step = lora(path, load_inplace=True)
        assert [engine.ask("b", each_step), engine.ask("c", each_step), engine.ask("d", lora(path))] == [0, 96, hit]
        assert engine.version == engines[0].version


def test_files_that_change_before_the_first_step_are_noticed(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "sql")
    first, second = engines
    first.driver.add("a", PROMPT, 4, lora_request=lora(path))
    write_adapter(tmp_path / "sql", b"other")  # vLLM loads it for the step
    first.run_all()
    assert first.version.startswith("unknown-")
    assert second.ask("b", lora(path)) == 0


def test_files_that_change_between_load_and_request_are_noticed(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "sql")
    first, second = engines
    EngineCore.add_lora(first.core, lora(path))
    write_adapter(tmp_path / "sql", b"other")
    assert second.ask("a", lora(path)) == 0
    assert first.ask("b", lora(path)) == 0, "it computes with the earlier weights"
    assert second.ask("c", lora(path)) == 96


def test_requests_that_run_while_their_lora_is_replaced_cache_nothing_more(
    engines: tuple[Engine, Engine], address: str, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "sql")
    first, second = engines
    assert second.ask("before", lora(path)) == 0
    first.driver.add("running", [*PROMPT, *range(100)], 40, lora_request=lora(path))
    first.driver.step()
    write_adapter(tmp_path / "sql", b"other")
    EngineCore.add_lora(first.core, lora(path, load_inplace=True))
    assert first.version.startswith("unknown-")
    with connect(address) as client:
        cached = client.get_pool(tmp_path.name).cached_blocks
        first.run_all()
        assert client.get_pool(tmp_path.name).cached_blocks == cached


def test_a_load_that_fails_leaves_the_lora_unknown(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "sql")
    first, second = engines
    EngineCore.add_lora(first.core, lora(path))
    write_adapter(tmp_path / "sql", b"broken")
    first.core.model_executor.add_lora.side_effect = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        EngineCore.add_lora(first.core, lora(path, load_inplace=True))
    assert [first.ask("a", lora(path)), second.ask("b", lora(path))] == [0, 0]


@pytest.mark.parametrize("method", ["reload_weights", "update_weights", "finish_weight_update"])
def test_weights_that_are_loaded_over_are_unknown_until_they_are_stated(
    engines: tuple[Engine, Engine], address: str, tmp_path: Path, method: str
) -> None:
    first, second = engines
    assert [first.ask("a"), second.ask("b")] == [0, 96]
    assert first.version == second.version
    EngineCore.collective_rpc(first.core, "list_loras")
    assert first.ask("c") == 96
    EngineCore.collective_rpc(first.core, method)
    first.core.model_executor.collective_rpc.assert_called_with(method, None, (), None)
    assert [first.ask("d"), first.ask("e"), second.ask("f")] == [0, 96, 96]
    with AdminClient(address) as admin:
        admin.set_weights_version(tmp_path.name, "2")
    assert [first.ask("g"), second.ask("h")] == [0, 96]


def test_a_stated_version_stays_when_weights_are_loaded(address: str, tmp_path: Path) -> None:
    engine = Engine(address, tmp_path, memory_id="gpu0", weights_version="1")
    assert engine.version == "1"
    EngineCore.collective_rpc(engine.core, "reload_weights")
    assert engine.version == "1"


def test_a_name_stands_for_its_files_in_the_cache_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("1" * 40)
    (snapshot / "config.json").write_text("{}")
    found = identify_files("org/name", cache=str(tmp_path))
    assert found == identify_files(str(snapshot))
    assert [*found] == ["config.json"]
    for name in ("org/other", "s3://bucket/name"):
        assert isinstance(identify_files(name, cache=str(tmp_path)), str)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert identify_files("org/name", cache=str(tmp_path)) == "org/name is a name of ModelScope"


def test_other_schedulers_of_the_process_are_left_alone(engines: tuple[Engine, Engine]) -> None:
    core: Any = SimpleNamespace(scheduler=object(), model_executor=Mock())
    EngineCore.collective_rpc(core, "reload_weights")
    EngineCore.add_lora(core, lora("/nowhere"))
    core.model_executor.add_lora.assert_called_once()
    assert not engines[0].version.startswith("unknown-")
