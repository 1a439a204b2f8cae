"""The fast loop of `allocate_batch`: allocates slots for plain rows, such as decodes, together.

1. State and results equal those of one row at a time. Blocks are taken in the order of the rows. A block that becomes
   full is in use, so the time of its caching does not change which blocks are taken.
2. The pool must have one group, which keeps all blocks (full attention), with one slot per token, no events, and no
   quota that applies to the session. Each block then has one hash.

The loop gains as much as compiling the core with mypyc (1.24 times in a decode step), which needs wheels per platform.
"""

from collections.abc import Sequence

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.execution.rows import Row
from kvpool.core.ids import BlockHash, BlockId, GroupId, StepNumber
from kvpool.core.sessions.session import Session

_ONLY_GROUP = GroupId(0)


def allocate_plain_rows(
    pool: KVCacheManager, session: Session, rows: Sequence[Row], sequence: StepNumber, max_blocks: int
) -> tuple[list[int], list[BlockId]] | None:
    """Allocates slots for consecutive plain rows of a step, after their growth was recorded.

    Args:
        pool: The pool.
        session: The session.
        rows: The rows.
        sequence: Number of the step.
        max_blocks: Maximum number of blocks to allocate.

    Returns:
        The number of new blocks per row, and the blocks. None if rule 2 does not hold, or if they would be more than
        `max_blocks` or the available blocks; then nothing was changed.
    """
    manager, max_tokens = pool.plain_manager, pool.config.max_model_len
    if manager is None or pool.quotas.applies_to(session.holding):
        return None
    span, caches = manager.span_tokens, pool.config.enable_caching
    lookahead_tokens = pool.config.hash_scheme.num_lookahead_tokens
    counts = _count_missing(pool, session.reserve_tokens, rows, span)
    num_missing = sum(counts)
    if num_missing > min(max_blocks, pool.blocks.num_available_blocks):
        return None
    new = pool.blocks.get_new_blocks(_ONLY_GROUP, num_missing) if num_missing else []
    full_block_ids: list[BlockId] = []
    hashes: list[BlockHash] = []
    at = 0
    for row, count in zip(rows, counts, strict=True):
        request = row.request
        table = request.tables[0]
        if count:
            table.block_ids += new[at : at + count]
            at += count
        end_tokens = request.num_computed_tokens = row.num_computed_tokens + row.num_new_tokens
        request.filling_sequence = sequence
        if caches:
            num_hashed = row.num_tokens - lookahead_tokens
            num_full = (end_tokens if end_tokens < num_hashed else num_hashed) // span  # noqa: FURB136 - min() is slower
            if num_full > table.num_cached:
                full_block_ids += table.block_ids[table.num_cached : num_full]
                hashes += request.hashes[table.num_cached : num_full]
                table.num_cached = num_full
        credit_tokens = manager.slot_tokens(table) if session.reserve_tokens else manager.credit_tokens(table)
        request.credit_tokens = credit_tokens if credit_tokens < max_tokens else max_tokens  # noqa: FURB136 - min() is slower
    if full_block_ids:
        pool.blocks.prefix_map.insert(session.first_map, full_block_ids, hashes, session.session_number, sequence)
    pool.activity.allocations += len(rows)
    return counts, new


def _count_missing(pool: KVCacheManager, reserve_tokens: int, rows: Sequence[Row], span: int) -> list[int]:
    """Number of blocks that each row takes: those that its request lacks, and then its reserve, see `SlotAllocator`."""
    max_tokens, num_left = pool.config.max_model_len, pool.blocks.num_available_blocks - pool.reserve_floor_blocks
    counts = []
    for row in rows:
        num_slots = row.num_computed_tokens + row.num_new_tokens + row.num_lookahead_tokens
        if num_slots > max_tokens:  # noqa: PLR1730 - min() is slower
            num_slots = max_tokens
        num_held = len(row.request.tables[0].block_ids)
        missing = (num_slots - 1) // span + 1 - num_held
        missing = missing if missing > 0 else 0  # noqa: FURB136 - max() is slower
        if reserve_tokens:
            wanted = (min(num_slots + reserve_tokens, max_tokens) - 1) // span + 1 - num_held
            if missing < wanted <= num_left:
                missing = wanted
            num_left -= missing
        counts.append(missing)
    return counts
