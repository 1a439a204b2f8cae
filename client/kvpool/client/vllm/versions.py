"""Differences between the supported versions of vLLM, detected from the installed version.

What an older version lacks is read with `getattr`, with the value that describes that version.
"""

import os
from inspect import signature
from types import ModuleType
from typing import Any, Final

import vllm
from vllm.config import VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager

VERSION: Final[str] = vllm.__version__
SUPPORTED_VERSIONS: Final = ("0.32", "0.33")
"""What versions begin with whose scheduler gives the same results on kvpool as on its own manager."""
SPECS: Final[ModuleType] = kv_cache_interface

IS_0_33_OR_NEWER: Final = hasattr(VllmConfig, "num_hash_lookahead_tokens")
"""Whether vLLM is 0.33 or newer.

With EAGLE it hashes a block together with the tokens after it, instead of computing blocks again, and it also caches
windows a block before the end of a shared prefix, if it caches few of them. It resumes a request from a state that a
step of the same round reads to end a prompt.
"""

AUX_OUTPUTS_READ_POOL: Final = "max_cache_hit_length" in signature(KVCacheManager.get_computed_blocks).parameters
"""Whether vLLM limits look-ups to prefixes whose auxiliary outputs it has, which it finds in its own block pool."""


def block_hash_root(algorithm: str) -> bytes:
    """Returns the parent hash of every first block; it is the same in all processes that may share blocks.

    If vLLM would draw it at random, this sets PYTHONHASHSEED, from which vLLM derives it.
    """
    function: Any = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    root: bytes = kv_cache_utils.NONE_HASH
    kv_cache_utils.init_none_hash(function)  # as the engine does after it made its scheduler
    if root != kv_cache_utils.NONE_HASH:
        os.environ["PYTHONHASHSEED"] = "0"
        kv_cache_utils.init_none_hash(function)
        root = kv_cache_utils.NONE_HASH
    return root
