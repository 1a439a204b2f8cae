"""What an engine on the service is refused at its start, in a sentence that names it, and its settings."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1 import kv_cache_interface
from vllm.v1.core.sched.scheduler import Scheduler as Plain

from engine.driving import Setup, make_scheduler
from kvpool.client import NotFoundError, connect
from kvpool.client.vllm import Scheduler, Settings, version_check
from kvpool.client.vllm.pool_config import UnsupportedError, pool_config
from kvpool.client.vllm.versions import COUNTS_ADMISSIONS


class _Plain:
    bind_kv_cache_manager = getattr(KVConnectorBase_V1, "bind_kv_cache_manager", None)
    bind_gpu_block_pool = getattr(KVConnectorBase_V1, "bind_gpu_block_pool", None)


class _Binding(_Plain):
    def bind_gpu_block_pool(self, gpu_block_pool: object) -> None:
        """Keeps it."""


class _Replayed:
    prefix_replay_tokens = 128


SET: dict[str, tuple[str, Any, str]] = {
    "a connector of the pool's": ("connector", _Binding(), "_Binding, which uses vLLM's own block pool"),
    "such a one among others": ("connector", SimpleNamespace(_connectors=[_Plain(), _Binding()]), "_Binding, which"),
    "block metrics": ("observability_config.kv_cache_metrics", True, "kv_cache_metrics"),
    "diffusion": ("vllm_config.diffusion_config", SimpleNamespace(), "diffusion models"),
    "multi-module MTP": ("vllm_config.num_prefill_lookahead_tokens", 3, "multi-module MTP"),
    "replay": ("kv_cache_config.kv_cache_groups", [SimpleNamespace(kv_cache_spec=_Replayed())], "bounded replay"),
    "hash": ("cache_config.prefix_caching_hash_algo", "md5", "prefix_caching_hash_algo='md5'"),
    "no groups": ("kv_cache_config.kv_cache_groups", [], "without a KV cache"),
}


def _set(target: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        target = getattr(target, parent)
    if isinstance(getattr(type(target), name, None), property):
        target.__class__ = type("Set", (type(target),), {name: value})
    else:
        object.__setattr__(target, name, value)


@pytest.mark.parametrize("case", SET)
def test_unsupported_features_are_refused_by_name(case: str, tmp_path: Path) -> None:
    path, value, message = SET[case]
    scheduler = make_scheduler(Plain, Setup(), tmp_path)
    assert pool_config(scheduler, "p").num_blocks == 64
    _set(scheduler, path, value)
    with pytest.raises(UnsupportedError, match=message):
        pool_config(scheduler, "p")


@pytest.mark.parametrize(
    ("windows", "path", "value", "message"),
    [
        ((0, 40), "max_model_len", 1024, "with groups other than one of full attention"),
        ((40,), "max_model_len", 1024, "with groups other than one of full attention"),
        ((0,), "needs_kv_cache_zeroing", True, "with zeroing of blocks"),
        ((0,), "defer_block_free", True, "with async scheduling .*: set async_scheduling=False"),
    ],
)
def test_unsupported_connectors_are_refused(
    windows: tuple[int, ...], path: str, value: Any, message: str, tmp_path: Path
) -> None:
    scheduler = make_scheduler(Plain, Setup(windows=windows), tmp_path)
    scheduler.connector = _Plain()
    _set(scheduler, path, value)
    with pytest.raises(UnsupportedError, match=message):
        pool_config(scheduler, "p")


def _groups(*specs: Any) -> list[Any]:
    return [kv_cache_interface.KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate(specs)]


@pytest.mark.skipif(not COUNTS_ADMISSIONS, reason="older versions cache these as all others")
def test_groups_with_different_caching_rules_in_newer_versions_are_refused(tmp_path: Path) -> None:
    scheduler = make_scheduler(Plain, Setup(), tmp_path)
    full = scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    state = kv_cache_interface.MambaSpec(block_size=16, shapes=((4,),), dtypes=(full.dtype,))
    chunks = kv_cache_interface.ChunkedLocalAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=64, dtype=full.dtype, attention_chunk_size=64
    )
    for specs, message in (((full, state), "Mamba"), ((full, chunks), "chunks beside blocks of other sizes")):
        scheduler.kv_cache_config.kv_cache_groups = _groups(*specs)
        with pytest.raises(UnsupportedError, match=message):
            pool_config(scheduler, "p")
    scheduler.kv_cache_config.kv_cache_groups = _groups(full, replace(full, block_size=32))
    assert pool_config(scheduler, "p").retention_tokens == 0
    drafter = SimpleNamespace(use_eagle=lambda: True, use_eagle_block_drop=lambda: True)
    _set(scheduler, "vllm_config.speculative_config", drafter)
    with pytest.raises(UnsupportedError, match="EAGLE with prefix caching and blocks of different sizes"):
        pool_config(scheduler, "p")
    scheduler.vllm_config.speculative_config = None
    scheduler.cache_config.prefix_match_unit = 8
    with pytest.raises(UnsupportedError, match=r"prefix_match_unit=8.*16 tokens"):
        pool_config(scheduler, "p")
    scheduler.cache_config.prefix_match_unit = None
    scheduler.cache_config.enable_prefix_caching = False
    scheduler.kv_cache_config.kv_cache_groups = _groups(full, state)
    assert len(pool_config(scheduler, "p").groups) == 2


def test_an_engine_that_is_refused_leaves_no_pool(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_check, "missing_methods", lambda: ["KVCacheManager.new_thing is missing"])
    attached = Setup(additional_config={"kvpool": {"address": address, "pool": "refused"}})
    with pytest.raises(UnsupportedError, match="new_thing"):
        make_scheduler(Scheduler, attached, tmp_path)
    with connect(address) as client, pytest.raises(NotFoundError):
        client.get_pool("refused")


def test_an_unknown_version_is_refused_unless_it_is_named(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_check, "VERSION", "0.34.1")
    for named in ("", "0.34.0"):
        attached = {"kvpool": {"address": address, "pool": "unknown", "untested_version": named}}
        with pytest.raises(UnsupportedError, match=r"use 0\.14\.1, 0\.32 or 0\.33; untested_version='0\.34\.1'"):
            make_scheduler(Scheduler, Setup(additional_config=attached), tmp_path)
    with connect(address) as client, pytest.raises(NotFoundError):
        client.get_pool("unknown")
    monkeypatch.setenv("KVPOOL_UNTESTED_VERSION", "0.34.1")
    del attached["kvpool"]["untested_version"]
    make_scheduler(Scheduler, Setup(additional_config=attached), tmp_path).shutdown()


def test_a_connector_is_refused_in_shared_memory(address: str, tmp_path: Path) -> None:
    attached = {"kvpool": {"address": address, "pool": "refused", "memory_id": "m"}}
    with pytest.raises(UnsupportedError, match="KV connectors in memory that other engines share"):
        make_scheduler(Scheduler, Setup(load_failures="fail", additional_config=attached), tmp_path)
    with connect(address) as client, pytest.raises(NotFoundError):
        client.get_pool("refused")


def test_settings_in_the_configuration_override_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVPOOL_ADDRESS", "unix:/env")
    monkeypatch.setenv("KVPOOL_POOL", "env")
    monkeypatch.setenv("KVPOOL_WEIGHTS_VERSION", "7")
    monkeypatch.setenv("KVPOOL_ZONE", "a")
    assert Settings.of({}) == Settings("unix:/env", "env", weights_version="7", zone="a")
    chosen = {"kvpool": {"weights_version": "8", "zone": "b"}}
    assert Settings.of(chosen) == Settings("unix:/env", "env", weights_version="8", zone="b")
    monkeypatch.delenv("KVPOOL_WEIGHTS_VERSION")
    monkeypatch.delenv("KVPOOL_ZONE")
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


def test_usage_is_reported_before_the_first_step(address: str, tmp_path: Path) -> None:
    attached = Setup(additional_config={"kvpool": {"address": address, "pool": "usage"}})
    scheduler = make_scheduler(Scheduler, attached, tmp_path)
    assert scheduler.kv_cache_manager.usage == 0
    scheduler.shutdown()
