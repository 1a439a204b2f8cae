"""Batched allocation: consecutive plain ALLOCATE operations of a step, such as decodes, are processed as columns.

1. A batch contains only plain operations. `check` and `apply` process all others one by one, and report errors. They
   also process the operations of a batch if there are too few free blocks when it is applied.
2. State and results equal those of one operation at a time. Blocks are taken in the order of the operations. A block
   that becomes full is in use, so the time of its caching does not change which blocks are taken.
3. The pool must have one group, which keeps all blocks (full attention), one slot per token, no events, and no quota
   that applies to the session. Each block then has one hash.
4. The rest of the step names no request of the batch.
"""

from collections.abc import Iterator
from typing import Final

from kvpool.core.blocks.group_manager import GroupManager
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.execution.deferred_caching import DeferredBlocks
from kvpool.core.ids import BlockHash, BlockId, StepNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.steps.allocation_options import OPTION_COLUMNS
from kvpool.core.steps.columns import Operation, Step

_NOT_PLAIN: Final = (
    "num_rejected_tokens",
    "num_lookahead_tokens",
    "num_encoder_tokens",
    "delay_cache_blocks",
    "num_block_ids",
    *OPTION_COLUMNS,
)
"""Columns that are zero for plain allocations; with one group, each has one entry per operation."""


_Allocation = tuple[Request, int, int, int, int, list[BlockHash]]
"""Request, num_tokens after the step, computed tokens before and after the allocation, missing blocks of its table
(zero or negative if none), new block hashes."""


class AllocationBatch:
    """Consecutive plain allocations of a step.

    Attributes:
        num_hash_bytes: Bytes of the step's `block_hashes` that belong to the batch.
        num_missing_blocks: Number of blocks that the batch takes.
    """

    def __init__(
        self,
        pool: KVCacheManager,
        session: Session,
        manager: GroupManager,
        rows: list[_Allocation],
        num_hash_bytes: int,
    ) -> None:
        self.num_hash_bytes = num_hash_bytes
        self.num_missing_blocks = sum([row[4] for row in rows if row[4] > 0])
        self._pool = pool
        self._session = session
        self._manager = manager
        self._rows = rows

    def __len__(self) -> int:
        """The number of operations."""
        return len(self._rows)

    @classmethod
    def from_step(
        cls, pool: KVCacheManager, session: Session, step: Step, first: int, hash_at: int
    ) -> "AllocationBatch | None":
        """Checks the allocations from operation `first` on, whose hashes start at byte `hash_at`. Changes nothing.

        The columns of the step must be empty or have equal lengths.

        Returns:
            The plain operations up to the first other one; None if there is none, or batches do not apply.
        """
        manager = pool.plain_manager
        if manager is None or pool.quotas.applies_to(session.holding):
            return None
        rows, end_hash_at = _plain_rows(pool, manager.span_tokens, session, step, first, hash_at)
        last, numbers = first + len(rows), step.request_numbers
        named = set(numbers[first:last])
        if (
            not rows
            or len(named) < len(rows)
            or not named.isdisjoint(numbers[:first] + numbers[last:])
            or any([any(column[first:last]) for name in _NOT_PLAIN if (column := getattr(step, name))])  # noqa: C419 - a generator is slower
        ):
            return None
        return cls(pool, session, manager, rows, end_hash_at - hash_at)

    def record_growth(self, filled: DeferredBlocks, sequence: StepNumber) -> None:
        """Records the growth of the requests and the tokens taken on credit, and adds the blocks that these filled."""
        span = self._manager.span_tokens
        for request, num_tokens, start_tokens, _, _, hashes in self._rows:
            request.num_tokens = num_tokens
            if hashes:
                request.hashes += hashes
            if start_tokens > request.num_computed_tokens:
                request.num_computed_tokens = start_tokens
                request.filling_sequence = sequence
                if start_tokens > request.credit_tokens:  # it filled a block on credit
                    filled.add(request, min(num_tokens, start_tokens) // span)
                    request.credit_tokens = self._pool.credit_tokens(request)

    def apply(self, sequence: StepNumber) -> tuple[list[int], list[BlockId]]:
        """Allocates the blocks. Call `record_growth` first, and check that there are enough free blocks.

        Returns:
            The number of new blocks per operation, empty if there are none, and the block ids.
        """
        pool, manager, max_tokens = self._pool, self._manager, self._pool.config.max_model_len
        span, credit, caches = manager.span_tokens, manager.credit, pool.config.enable_caching
        new = manager.get_new_blocks(self.num_missing_blocks) if self.num_missing_blocks else []
        counts = [0] * len(self._rows) if new else []
        filled = DeferredBlocks(pool, self._session)
        at = 0
        for i, (request, num_tokens, _, end_tokens, missing, _) in enumerate(self._rows):
            table = request.tables[0]
            if missing > 0:
                table.block_ids += new[at : at + missing]
                counts[i] = missing
                at += missing
            if caches and end_tokens // span > table.num_cached < num_tokens // span:
                filled.add(request, min(num_tokens, end_tokens) // span)
            request.num_computed_tokens = end_tokens
            request.filling_sequence = sequence
            bound_tokens = credit.num_tokens(len(table.block_ids), table.num_cached, 0)
            request.credit_tokens = bound_tokens if bound_tokens < max_tokens else max_tokens  # noqa: FURB136 - min() is slower
        filled.cache(sequence)
        pool.activity.allocations += len(self._rows)
        return counts, new

    def operations(self) -> Iterator[tuple[Request, int]]:
        """Iterates over the requests and their numbers of new tokens."""
        return ((request, end_tokens - start_tokens) for request, _, start_tokens, end_tokens, _, _ in self._rows)


def _plain_rows(  # noqa: PLR0913, PLR0917 - called once
    pool: KVCacheManager, span: int, session: Session, step: Step, first: int, hash_at: int
) -> tuple[list[_Allocation], int]:
    """Returns the plain allocations from `first` on, without a check of `_NOT_PLAIN`, and the end of their hashes."""
    max_tokens = pool.config.max_model_len
    by_number, joined = session.by_number, step.block_hashes
    size_bytes = pool.config.hash_scheme.hash_size_bytes if pool.config.enable_caching else 0
    zeros = [0] * (len(step.operations) - first)
    columns = zip(
        step.operations[first:],
        step.request_numbers[first:],
        step.num_new_tokens[first:],
        step.num_appended_tokens[first:] or zeros,
        step.num_taken_tokens[first:] or zeros,
        strict=False,  # with an empty column no operation is plain
    )
    rows: list[_Allocation] = []
    for operation, number, new, appended, taken in columns:
        request = by_number.get(number)  # type: ignore[call-overload]  # a call of NewType is slow
        if (
            operation != Operation.ALLOCATE
            or request is None
            or not request.num_computed_tokens
            or appended < 0
            or new < 1
            or taken < 0
        ):
            break
        before_tokens, start_tokens = request.num_tokens, request.num_computed_tokens + taken
        num_tokens, end_tokens = before_tokens + appended, start_tokens + new
        if num_tokens > max_tokens or end_tokens > max_tokens:
            break
        if taken and start_tokens > pool.max_tokens_on_credit(request):
            break
        hashes: list[bytes] = []
        if size_bytes and num_tokens // span > before_tokens // span:
            end = hash_at + (num_tokens // span - before_tokens // span) * size_bytes
            if end > len(joined):
                break
            hashes = [joined[i : i + size_bytes] for i in range(hash_at, end, size_bytes)]
            hash_at = end
        missing = (end_tokens - 1) // span + 1 - len(request.tables[0].block_ids)
        # A call of BlockHash is slow, too.
        rows.append((request, num_tokens, start_tokens, end_tokens, missing, hashes))  # type: ignore[arg-type]
    return rows, hash_at
