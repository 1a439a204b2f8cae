"""Detects methods and parameters of the installed vLLM's KV cache manager that `KVCacheManager` lacks."""

import inspect
from collections.abc import Callable
from typing import Final

from vllm.v1.core import kv_cache_manager

from kvpool.client.vllm.manager import KVCacheManager

NOT_CALLED: Final = {
    "create_kv_cache_blocks": "called only by the manager itself",
    "get_num_common_prefix_blocks": "called by no version since 0.32",
    "prefix_cache_lookup_enabled": "called only by the manager itself",
    "truncate_computed_blocks": "called if a KV connector continues a hit that ends within a block",
    "record_blocks_for_zeroing": "called if blocks that KV connectors load are zeroed",
}
"""Methods that the scheduler does not call in supported configurations, with their callers."""


def missing_methods() -> list[str]:
    """Describes each method and parameter of vLLM's manager that is missing here."""
    found = []
    for name, theirs in inspect.getmembers(kv_cache_manager.KVCacheManager):
        if name.startswith("_") or name in NOT_CALLED:
            continue
        mine = inspect.getattr_static(KVCacheManager, name, None)
        if mine is None:
            found.append(f"KVCacheManager.{name} is missing")
        elif inspect.isfunction(theirs) and inspect.isfunction(mine):
            found += [
                f"KVCacheManager.{name} has a parameter {each!r} that is missing"
                for each in _missing_parameters(mine, theirs)
            ]
    return found


def _missing_parameters(mine: Callable[..., object], theirs: Callable[..., object]) -> list[str]:
    """Parameters of `theirs` that `mine` does not accept at the same position and name."""
    own = inspect.signature(mine).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in own.values()):
        return []
    names = list(own)
    wanted = inspect.signature(theirs).parameters
    return [name for i, name in enumerate(wanted) if names[i : i + 1] != [name]]
