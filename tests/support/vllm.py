"""A stand-in for vLLM if it is not installed: the parts that `beside_vllm.py` imports, based on our core."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from benchmarks.core_target import CoreRequest, CoreTarget
from benchmarks.workloads import NewBlocks, Task
from kvpool.core.blocks.prefix_search import ComputedBlocks

VERSION = "0.14.1.stand-in"


def write_vllm(folder: Path) -> list[str]:
    """Makes a package `vllm` in a folder; returns what an interpreter needs on its path to import it."""
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("from support import vllm\nvllm.install(__name__)\n")
    return [str(folder), *sys.path]


def install(name: str) -> None:
    """Fills the package and its modules."""
    spec = {"FullAttentionSpec": SimpleNamespace, "SlidingWindowSpec": SimpleNamespace}
    config = {"KVCacheConfig": SimpleNamespace, "KVCacheGroupSpec": _group, "torch": SimpleNamespace(float32=None)}
    modules: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        ".sampling_params": {"SamplingParams": SimpleNamespace},
        ".utils": {},
        ".utils.hashing": {"get_hash_fn_by_name": lambda _: hashlib.sha256},
        ".v1": {},
        ".v1.core": {},
        ".v1.core.kv_cache_manager": {"KVCacheManager": KVCacheManager},
        ".v1.core.kv_cache_utils": {"get_request_block_hasher": _block_hasher, "init_none_hash": lambda _: None},
        ".v1.kv_cache_interface": spec | config,
        ".v1.request": {"Request": Request},
    }
    for path, names in modules.items():
        module = sys.modules.setdefault(name + path, ModuleType(name + path))
        vars(module).update(names)
        parent, _, child = (name + path).rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _group(layer_names: list[str], kv_cache_spec: object) -> SimpleNamespace:
    return SimpleNamespace(layer_names=layer_names, kv_cache_spec=kv_cache_spec)


def _block_hasher(_block_size: int, _function: object) -> Callable[["Request"], list[bytes]]:
    return lambda _: []


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int]
    sampling_params: object
    pooling_params: object
    eos_token_id: int | None
    block_hasher: object = None
    num_computed_tokens: int = 0
    known: CoreRequest | None = None
    appended: list[int] = field(default_factory=list)

    def append_output_token_ids(self, token_id: int) -> None:
        self.appended.append(token_id)


@dataclass
class KVCacheBlocks:
    blocks: NewBlocks

    def get_block_ids(self, *, allow_none: bool = False) -> NewBlocks | None:
        return None if allow_none and not any(self.blocks) else self.blocks


class KVCacheManager:
    def __init__(
        self,
        config: SimpleNamespace,
        max_model_len: int,
        hash_block_size: int,
        *,
        enable_caching: bool,
        log_stats: bool,
    ) -> None:
        assert (max_model_len, hash_block_size, enable_caching, log_stats) == (65_536, 16, True, True)
        self._target = CoreTarget(Task("", config.num_blocks, len(config.kv_cache_groups) - 1))

    def get_computed_blocks(self, request: Request) -> tuple[ComputedBlocks, int]:
        hit = self._target.lookup(self._known(request))
        return hit, hit.num_tokens

    def allocate_slots(
        self, request: Request, num_new_tokens: int, num_hit_tokens: int = 0, hit: ComputedBlocks | None = None
    ) -> KVCacheBlocks | None:
        known = self._known(request)
        assert num_hit_tokens == (hit.num_tokens if hit else 0)
        if request.appended:
            (new,) = self._target.decode([known], [request.appended.pop()])
        else:
            new = self._target.allocate(known, num_new_tokens, hit)
        return None if new is None else KVCacheBlocks(new)

    def free(self, request: Request) -> None:
        self._target.settle()
        self._target.free(self._known(request))

    def reset_prefix_cache(self) -> bool:
        self._target.reset()
        return True

    def _known(self, request: Request) -> CoreRequest:
        if request.known is None:
            request.known = self._target.make(request.prompt_token_ids)
        return request.known
