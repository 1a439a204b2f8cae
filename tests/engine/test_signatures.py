"""What the installed vLLM asks of its KV cache manager is what the one on the service answers."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.v1.core import kv_cache_manager

from engine.test_sharing import Engine
from kvpool.client.vllm import missing_methods
from kvpool.client.vllm.manager import KVCacheManager
from kvpool.client.vllm.pool_config import UnsupportedError

CALLERS = ("vllm.v1.core.sched.scheduler", "vllm.v1.core.sched.async_scheduler", "vllm.v1.engine.core")


def test_no_method_is_missing() -> None:
    assert missing_methods.missing_methods() == []


def _asked(path: Path) -> set[str]:
    """Names of what a file reads of something called kv_cache_manager."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    return {
        node.attr
        for node in nodes
        if (isinstance(node.value, ast.Attribute) and node.value.attr == "kv_cache_manager")
        or (isinstance(node.value, ast.Name) and node.value.id in ("kv_cache_manager", "cache_manager"))
    }


@pytest.mark.parametrize("module", CALLERS)
def test_all_attributes_that_the_engine_reads_exist(module: str, address: str, tmp_path: Path) -> None:
    spec = find_spec(module)
    assert spec
    assert spec.origin
    manager = Engine(address, f"signatures.{module}", tmp_path).scheduler.kv_cache_manager
    lacking = {name for name in _asked(Path(spec.origin)) if not hasattr(manager, name)}
    assert lacking <= missing_methods.NOT_CALLED.keys()


def test_an_engine_with_a_new_parameter_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str, tmp_path: Path
) -> None:
    def allocate_slots(self: object, request: object, num_new_tokens: int, a_new_thing: int = 0) -> None:
        """A newer one."""

    monkeypatch.setattr(kv_cache_manager.KVCacheManager, "allocate_slots", allocate_slots)
    with pytest.raises(UnsupportedError, match=r"allocate_slots has a parameter 'a_new_thing' that is missing"):
        Engine(address, "newer", tmp_path)


def test_no_method_is_public_but_those_of_vllm() -> None:
    own = {name for name in vars(KVCacheManager) if not name.startswith("_")}
    assert own <= {*dir(kv_cache_manager.KVCacheManager), "mamba_shared_prefix_checkpoint"}  # set by its constructor
