"""Blocks that became full, cached together: those that a step fills, and those that decodes before it had filled.

In a pool of one group whose blocks are kept and hold a slot a token, without events, a session need not ask for a
decode that fills a block: nothing is allocated. It tells so with its next step (`Step.num_taken_tokens`), where the
block is cached before all else, as filled by the step before.
"""

from kvpool.core import ids
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import BlockHash, BlockId, GroupId
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session

_ONLY_GROUP = GroupId(0)


class DeferredBlocks:
    """What one change of a session filled, in the order in which it is added."""

    def __init__(self, pool: KVCacheManager, session: Session) -> None:
        self._pool = pool
        self._session = session
        self._block_ids: list[BlockId] = []
        self._hashes: list[BlockHash] = []

    def add(self, request: Request, num_full_blocks: int) -> None:
        """Adds those of a request's first blocks that are not cached; they count as cached from now on."""
        table = request.tables[_ONLY_GROUP]
        if num_full_blocks > table.num_cached:
            self._block_ids += table.block_ids[table.num_cached : num_full_blocks]
            self._hashes += request.hashes[table.num_cached : num_full_blocks]
            table.num_cached = num_full_blocks

    def cache(self, sequence: ids.StepNumber) -> None:
        """Caches all, as filled by the change `sequence`; others find them at once if that is said to have run."""
        if not self._block_ids:
            return
        blocks, session_number, executed = (
            self._pool.blocks,
            self._session.session_number,
            self._session.executed_sequence,
        )
        blocks.cache_full_blocks(_ONLY_GROUP, self._block_ids, self._hashes, session_number, sequence)
        if sequence <= executed:
            blocks.prefix_map.publish(session_number, executed)
