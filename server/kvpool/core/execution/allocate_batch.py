"""Plain allocations that stand together in a step, as of requests that decode: in columns, not by twenty calls each.

1. What is not plain is not taken here, and nothing is changed: `check` and `apply` do it operation by operation, and
   say what is wrong. So they do with all, if there are too few blocks when the run's turn comes.
2. State and answers are those of one by one. Blocks are taken in the order of the operations. A block that becomes full
   is held, so nothing that is taken depends on whether it is cached before or after.
3. Only for pools of one group whose blocks are kept and hold a slot a token, without events, where no quota applies.
   There a block has one hash.
4. The rest of the step names none of its requests.
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
"""Columns that plain allocations have nothing in; in a pool of one group each has one entry an operation."""


_Allocation = tuple[Request, int, int, int, int, list[BlockHash]]
"""The request; the tokens it has then; those of them that have room before, and then; blocks that its table lacks for
them, not positive if it lacks none; hashes that it gains."""


class AllocationBatch:
    """Allocations of a step that stand one after another.

    Attributes:
        num_hash_bytes: How much of the step's hashes is theirs.
        num_missing_blocks: Blocks that they take.
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
        """How many operations they are."""
        return len(self._rows)

    @classmethod
    def from_step(
        cls, pool: KVCacheManager, session: Session, step: Step, first: int, hash_at: int
    ) -> "AllocationBatch | None":
        """Checks the allocations that begin with a step's operation `first`, whose hashes begin at a place.

        The step's columns are of one length, or empty. Changes nothing.

        Returns:
            As many of them as are plain; None if not one is, or they are not for this file.
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
            or any([any(column[first:last]) for name in _NOT_PLAIN if (column := getattr(step, name))])  # noqa: C419 - a generator takes longer
        ):
            return None
        return cls(pool, session, manager, rows, end_hash_at - hash_at)

    def record_growth(self, filled: DeferredBlocks, sequence: StepNumber) -> None:
        """Notes what the requests grew by, and took room for without asking, and adds what that filled."""
        span = self._manager.span_tokens
        for request, num_tokens, start_tokens, _, _, hashes in self._rows:
            request.num_tokens = num_tokens
            if hashes:
                request.hashes += hashes
            if start_tokens > request.num_computed_tokens:
                request.num_computed_tokens = start_tokens
                request.filling_sequence = sequence
                if start_tokens > request.credit_tokens:  # it took room that it filled
                    filled.add(request, min(num_tokens, start_tokens) // span)
                    request.credit_tokens = self._pool.credit_tokens(request)

    def apply(self, sequence: StepNumber) -> tuple[list[int], list[BlockId]]:
        """Does them. They have been taken note of, and there are blocks enough.

        Returns:
            How many blocks each got, or nothing if none got any; and the blocks.
        """
        pool, manager, max_tokens = self._pool, self._manager, self._pool.config.max_model_len
        span, room, caches = manager.span_tokens, manager.credit, pool.config.enable_caching
        new = manager.take(self.num_missing_blocks) if self.num_missing_blocks else []
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
            bound_tokens = room.num_tokens(len(table.block_ids), table.num_cached, 0)
            request.credit_tokens = bound_tokens if bound_tokens < max_tokens else max_tokens  # noqa: FURB136 - min() is slower
        filled.cache(sequence)
        pool.activity.allocations += len(self._rows)
        return counts, new

    def operations(self) -> Iterator[tuple[Request, int]]:
        """Each request, and the tokens that it asks room for."""
        return ((request, end_tokens - start_tokens) for request, _, start_tokens, end_tokens, _, _ in self._rows)


def _plain_rows(  # noqa: PLR0913, PLR0917 - whose, of what, and from where
    pool: KVCacheManager, span: int, session: Session, step: Step, first: int, hash_at: int
) -> tuple[list[_Allocation], int]:
    """The plain allocations from a place on, but for what `_NOT_PLAIN` says of them, and where their hashes end."""
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
        strict=False,  # without numbers or new tokens none is plain
    )
    rows: list[_Allocation] = []
    for operation, number, new, appended, taken in columns:
        request = by_number.get(number)  # type: ignore[call-overload]  # NewType's call takes its time
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
        if taken and start_tokens > pool.most_taken_tokens(request):
            break
        hashes: list[bytes] = []
        if size_bytes and num_tokens // span > before_tokens // span:
            end = hash_at + (num_tokens // span - before_tokens // span) * size_bytes
            if end > len(joined):
                break
            hashes = [joined[i : i + size_bytes] for i in range(hash_at, end, size_bytes)]
            hash_at = end
        missing = (end_tokens - 1) // span + 1 - len(request.tables[0].block_ids)
        # BlockHash's call, too, takes its time.
        rows.append((request, num_tokens, start_tokens, end_tokens, missing, hashes))  # type: ignore[arg-type]
    return rows, hash_at
