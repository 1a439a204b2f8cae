"""The memory that holds a pool's blocks, in pools declared by schedulers whose engines own the tensors.

1. All blocks of a pool, cached or in use, were written into the memory that the pool names. The name is empty while the
   memory is unknown: before a session names one, and after a session without a memory name was opened.
2. A session that names the same memory shares the cached blocks. A session that names another one is refused while any
   session is open or in quarantine. After that, the pool starts an empty epoch before the session is opened.
3. An unknown memory counts as another memory, unless the pool has no cached blocks.
4. In pools formed by ranks, sessions name no memory, as ranks report whether they still hold their tensors.
5. A pool that is declared again with another configuration is replaced if it names one memory and the caller another,
   under the conditions of rule 2: an engine that starts again may measure another number of blocks.
"""

from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import InvalidArgumentError, UnavailableError, check_size

MAX_MEMORY_ID_BYTES: Final = 128
MEMORY_RETRY_SECONDS: Final = 1.0


def check_memory_id(memory_id: str, *, has_ranks: bool) -> None:
    """Raises InvalidArgumentError if a session may not use this memory name."""
    check_size("memory_id", memory_id, MAX_MEMORY_ID_BYTES)
    if memory_id and has_ranks:
        raise InvalidArgumentError("memory_id", "must be empty: the pool's ranks report their memory themselves")


def needs_new_epoch(pool: KVCacheManager, memory_id: str) -> bool:
    """Whether a pool must start a new epoch before it opens a session in this memory.

    Raises:
        UnavailableError: Another memory is in use.
    """
    if not memory_id or memory_id == pool.memory_id:
        return False
    _check_unused(pool)
    return bool(pool.memory_id) or len(pool.blocks.prefix_map) > 0


def is_replaced(pool: KVCacheManager, memory_id: str) -> bool:
    """Whether an engine in this memory replaces a pool of another configuration; see rule 5.

    Raises:
        UnavailableError: The pool's memory is another one, and in use.
    """
    if not memory_id or not pool.memory_id or memory_id == pool.memory_id:
        return False
    _check_unused(pool)
    return True


def _check_unused(pool: KVCacheManager) -> None:
    if pool.sessions or pool.quarantine:
        memory = f"memory {pool.memory_id!r}" if pool.memory_id else "a memory without a name"
        users = f"{len(pool.sessions)} open sessions and {len(pool.quarantine)} in quarantine"
        message = (
            f"the pool's blocks are in {memory}, in use by {users}; engines with memory of their own need a pool each"
        )
        raise UnavailableError("OTHER_MEMORY", message, field="memory_id", retry_seconds=MEMORY_RETRY_SECONDS)
