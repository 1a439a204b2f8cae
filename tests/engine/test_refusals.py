"""What an engine on the service is refused at its start, in a sentence that names it, and its settings."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from vllm.v1 import kv_cache_interface
from vllm.v1.core.sched.scheduler import Scheduler as Plain

from engine.driving import Setup, make_scheduler
from engine.features import Connector, make_groups, set_attribute
from engine.test_sharing import Engine
from kvpool.client import NotFoundError, connect
from kvpool.client.vllm import Settings, version_check
from kvpool.client.vllm.pool_config import UnsupportedError, pool_config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cache_config.prefix_caching_hash_algo", "md5", "prefix_caching_hash_algo='md5'"),
        ("parallel_config.enable_fault_tolerance", True, "enable_fault_tolerance"),
        ("kv_cache_config.kv_cache_groups", [], "without a KV cache"),
    ],
)
def test_unsupported_values_are_refused_by_name(path: str, value: Any, message: str, tmp_path: Path) -> None:
    """What is refused by feature, test_versions.py tests."""
    scheduler = make_scheduler(Plain, Setup(), tmp_path)
    assert pool_config(scheduler, "p").num_blocks == 64
    set_attribute(scheduler, path, value)
    with pytest.raises(UnsupportedError, match=message):
        pool_config(scheduler, "p")


@pytest.mark.parametrize(
    ("windows", "path", "value", "message"),
    [
        ((40,), "max_model_len", 1024, "with groups other than one of full attention"),
        ((0,), "needs_kv_cache_zeroing", True, "with zeroing of blocks"),
    ],
)
def test_unsupported_connectors_are_refused(
    windows: tuple[int, ...], path: str, value: Any, message: str, tmp_path: Path
) -> None:
    scheduler = make_scheduler(Plain, Setup(windows=windows), tmp_path)
    scheduler.connector = Connector()
    setattr(scheduler, path, value)
    with pytest.raises(UnsupportedError, match=message):
        pool_config(scheduler, "p")


def test_groups_of_different_block_sizes_cache_few_blocks_and_states_none(tmp_path: Path) -> None:
    scheduler = make_scheduler(Plain, Setup(), tmp_path)
    full = scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    scheduler.kv_cache_config.kv_cache_groups = make_groups(full, replace(full, block_size=32))
    assert pool_config(scheduler, "p").retention_tokens == 0
    scheduler.cache_config.enable_prefix_caching = False
    state = kv_cache_interface.MambaSpec(block_size=16, shapes=((4,),), dtypes=(full.dtype,))
    scheduler.kv_cache_config.kv_cache_groups = make_groups(full, state)
    assert len(pool_config(scheduler, "p").groups) == 2


def test_an_engine_that_is_refused_leaves_no_pool(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_check, "missing_methods", lambda: ["KVCacheManager.new_thing is missing"])
    with pytest.raises(UnsupportedError, match="new_thing"):
        Engine(address, "refused", tmp_path)
    with connect(address) as client, pytest.raises(NotFoundError):
        client.get_pool("refused")


def test_settings_in_the_configuration_override_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/env")
    monkeypatch.setenv("KVPOOL_POOL", "env")
    monkeypatch.setenv("KVPOOL_WEIGHTS_VERSION", "7")
    assert Settings.of({}) == Settings("unix:/env", "env", weights_version="7")
    chosen = {"kvpool": {"weights_version": "8"}}
    assert Settings.of(chosen) == Settings("unix:/env", "env", weights_version="8")
    monkeypatch.delenv("KVPOOL_WEIGHTS_VERSION")
    assert Settings.of(None) == Settings("unix:/env", "env")
    given = {"kvpool": {"pool": "mine", "lease_seconds": 5, "max_blocks": 7, "memory_id": "m"}}
    assert Settings.of(given) == Settings("unix:/env", "mine", lease_seconds=5, max_blocks=7, memory_id="m")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"needs additional_config\['kvpool'\]\['address'\], or KVPOOL_ADDRESS in the environment"),
        ({"kvpool": {"address": "a:1"}}, r"\['pool'\], or KVPOOL_POOL"),
        ({"kvpool": {"address": "a:1", "pool": "p", "adress": 1}}, r"\['adress'\] is not known; known: address, pool,"),
        ({"kvpool": {"address": "a:1", "pool": 7}}, r"\['pool'\] must be str, not 7"),
        ({"kvpool": {"address": "a:1", "pool": "p", "max_blocks": True}}, r"\['max_blocks'\] must be int, not True"),
        ({"kvpool": "unix:/s"}, r"\['kvpool'\] must be an object, not 'unix:/s'"),
    ],
)
def test_wrong_settings_are_refused_by_name(given: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_ADDRESS", raising=False)
    monkeypatch.delenv("KVPOOL_POOL", raising=False)
    with pytest.raises(ValueError, match=message):
        Settings.of(given)


@pytest.mark.skipif(not find_spec("vllm.v1.kv_hints"), reason="0.32 has no hints")
def test_hints_of_a_request_change_nothing(address: str, tmp_path: Path) -> None:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: PLC0415 - see the mark

    driver = Engine(address, "hints", tmp_path).driver
    hints = KvHintsEnvelope("1", "m", [KvHintAction("a", "prefetch", "1", {"tier": "host"})])
    driver.add("with", [1] * 40, 9, kv_hints=hints)
    driver.add("without", [1] * 40, 9)
    driver.finish()
    assert {name: len(tokens) for name, tokens in driver.generated.items()} == {"with": 9, "without": 9}


def test_usage_is_reported_before_the_first_step(address: str, tmp_path: Path) -> None:
    assert Engine(address, "usage", tmp_path).scheduler.kv_cache_manager.usage == 0
