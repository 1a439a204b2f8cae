"""What the installed vLLM asks of its KV cache manager that the one here does not know: newer versions ask for more."""

import inspect
from typing import Final

from vllm.v1.core import kv_cache_manager

from kvpool.client.vllm.manager import KVCacheManager

NOT_CALLED: Final = {
    "create_kv_cache_blocks": "by the manager itself only",
    "prefix_cache_lookup_enabled": "by the manager itself only",
    "pop_blocks_for_free": "where KV connectors load and steps are scheduled ahead",
    "get_computed_blocks_for_connector": "where KV connectors complete hits of groups that end apart",
    "truncate_computed_blocks": "where hits end within a block",
    "record_blocks_for_zeroing": "where blocks are zeroed that KV connectors load",
}
"""Methods that the scheduler does not call here, and who would."""


def missing_methods() -> list[str]:
    """Sentences, one for each method and parameter of vLLM's manager that is not known here."""
    found = []
    for name, theirs in inspect.getmembers(kv_cache_manager.KVCacheManager):
        if name.startswith("_") or name in NOT_CALLED:
            continue
        mine = inspect.getattr_static(KVCacheManager, name, None)
        if mine is None:
            found.append(f"KVCacheManager.{name} is not known")
        elif inspect.isfunction(theirs) and inspect.isfunction(mine):
            found += [
                f"KVCacheManager.{name} has a parameter {each!r}, which is not known" for each in _lacking(mine, theirs)
            ]
    return found


def _lacking(mine: object, theirs: object) -> list[str]:
    """Parameters of theirs that mine cannot be given, by name and by place."""
    own = inspect.signature(mine).parameters  # type: ignore[arg-type]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in own.values()):
        return []
    wanted = list(inspect.signature(theirs).parameters)  # type: ignore[arg-type]
    places = list(own)
    return [name for i, name in enumerate(wanted) if name not in own or places.index(name) != i]
