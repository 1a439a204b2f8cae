"""Which memory the blocks of a pool are in, where schedulers declare it and their engines hold the tensors themselves.

1. All that a pool holds, cached or in use, was written into the memory that it names; it names none while that is not
   known: before a session named one, and after a session was opened that did not.
2. A session that names the same memory shares what the pool holds. One that names another is refused while any session
   is open or in quarantine; after that the pool forgets all in a new epoch before the session is opened.
3. What is not known counts as another memory, unless the pool holds nothing.
4. Of pools that ranks form nobody names a memory: their ranks say themselves whether they still have what they held.
"""

from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import InvalidArgumentError, UnavailableError

MAX_MEMORY_ID_BYTES: Final = 128
MEMORY_RETRY_SECONDS: Final = 1.0


def check_memory_id(memory_id: str, *, has_ranks: bool) -> None:
    """Raises InvalidArgumentError if a session may not name this of its pool."""
    if len(memory_id.encode("utf-8", "surrogatepass")) > MAX_MEMORY_ID_BYTES:
        raise InvalidArgumentError("memory_id", f"longer than {MAX_MEMORY_ID_BYTES} bytes")
    if memory_id and has_ranks:
        raise InvalidArgumentError("memory_id", "the pool's ranks say themselves which memory is theirs")


def needs_new_epoch(pool: KVCacheManager, memory_id: str) -> bool:
    """Whether a pool must begin anew before a session in this memory is opened in it.

    Raises:
        UnavailableError: Another memory is in use.
    """
    if not memory_id or memory_id == pool.memory_id:
        return False
    if pool.sessions or pool.quarantine:
        memory = f"memory {pool.memory_id!r}" if pool.memory_id else "a memory that was not named"
        users = f"{len(pool.sessions)} open sessions and {len(pool.quarantine)} in quarantine"
        message = f"the pool's blocks are in {memory}, in use by {users}"
        raise UnavailableError("OTHER_MEMORY", message, field="memory_id", retry_seconds=MEMORY_RETRY_SECONDS)
    return bool(pool.memory_id) or len(pool.blocks.prefix_map) > 0
