"""Deferred caching: full blocks are collected and cached together.

In a pool with one full-attention group, one slot per token and no events, a session does not send a decode that fills a
block, as nothing is allocated. The next step reports the tokens (`Step.num_taken_tokens`). The block is then cached
before all other operations, as filled by the previous step.
"""

from kvpool.core import ids
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import BlockHash, BlockId, GroupId
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session

_ONLY_GROUP = GroupId(0)


class DeferredBlocks:
    """Full blocks of one session to cache, in the order in which they are added."""

    def __init__(self, pool: KVCacheManager, session: Session) -> None:
        self._pool = pool
        self._session = session
        self._block_ids: list[BlockId] = []
        self._hashes: list[BlockHash] = []

    def add(self, request: Request, num_full_blocks: int) -> None:
        """Adds the uncached blocks among the first `num_full_blocks` of a request, and marks them as cached."""
        table = request.tables[_ONLY_GROUP]
        if num_full_blocks > table.num_cached:
            self._block_ids += table.block_ids[table.num_cached : num_full_blocks]
            self._hashes += request.hashes[table.num_cached : num_full_blocks]
            table.num_cached = num_full_blocks

    def cache(self, sequence: ids.StepNumber) -> None:
        """Caches the blocks as filled by step `sequence`; publishes them if that step was reported as executed."""
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
