"""What differs between the versions of vLLM that are served, told by what the installed one has."""

import os
from types import ModuleType
from typing import Any, Final

import vllm
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_manager, kv_cache_utils

from kvpool.core.specs.pool_config import ReuseOrder

VERSION: Final[str] = vllm.__version__
SPECS: Final[ModuleType] = kv_cache_interface

_MANAGER: Final = kv_cache_manager.KVCacheManager

REUSE_ORDER: Final = (
    ReuseOrder.UNCACHED_FIRST if hasattr(kv_cache_utils.FreeKVCacheBlockQueue, "prepend_n") else ReuseOrder.LRU
)
"""In which order vLLM's own pool gives freed blocks again."""

TAGS_KEYS: Final = hasattr(kv_cache_utils, "to_event_extra_keys")
"""Whether vLLM's block hashes say where each extra key comes from."""

COUNTS_ADMISSIONS: Final = hasattr(_MANAGER, "record_prefix_cache_stats")
"""Whether vLLM counts a look-up when the request is admitted, in a call of its own; or at once, whatever comes of it.

In the first case a look-up also tells a boundary in prompts that Mamba states are shared up to.
"""


def block_hash_root(algorithm: str) -> bytes:
    """The parent of every first block in this process; the same in all that may share blocks.

    Where vLLM would draw it at random, PYTHONHASHSEED is set for it, which it derives the root from.
    """
    function: Any = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    root: bytes = kv_cache_utils.NONE_HASH
    kv_cache_utils.init_none_hash(function)  # as the engine does when its scheduler is there
    if root != kv_cache_utils.NONE_HASH:
        os.environ["PYTHONHASHSEED"] = "0"
        kv_cache_utils.init_none_hash(function)
        root = kv_cache_utils.NONE_HASH
    return root
