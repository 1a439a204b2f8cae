"""Steps of nothing but plain allocations, as of requests that decode, in columns: one by one each takes twenty calls.

1. What is not plain, and what would find too few blocks, is not taken here, and nothing is changed: `check` and `apply`
   do it operation by operation, and say what is wrong.
2. State and answers are those of one by one. Blocks are taken in the order of the operations. A block that becomes full
   is held, so nothing that is taken depends on whether it is cached before or after.
3. Only for pools of one group whose blocks are kept and hold a slot a token, without events, where no quota applies.
   There a block has one hash.
"""

from collections.abc import Iterable
from typing import Final

from kvpool.server.core import types
from kvpool.server.core.filled import Filled
from kvpool.server.core.group_manager import GroupManager
from kvpool.server.core.pool import Pool
from kvpool.server.core.request import Request
from kvpool.server.core.session import Session
from kvpool.server.core.step import (
    MAX_OPERATIONS,
    MAX_QUIET_ALLOCATIONS,
    MAX_STEP_WORK,
    Operation,
    Step,
    StepResult,
)
from kvpool.server.core.types import MAX_TOKENS, BlockHash

_NOT_PLAIN: Final = (
    "num_block_ids",
    "num_rejected_tokens",
    "num_lookahead_tokens",
    "num_encoder_tokens",
    "delay_cache_blocks",
    "num_external_tokens",
    "num_in_flight_tokens",
    "num_reserved_blocks",
    "num_watermark_blocks",
    "full_sequence_must_fit",
    "block_ids",
    "token_ids",
    "request_ids",
    "lora_names",
)
"""Columns and queues that plain allocations have nothing in."""


_Allocation = tuple[Request, int, int, int, int, list[BlockHash] | None]
"""The request; the tokens it has then; those of them that have room before, and then; blocks that its table lacks for
them, not positive if it lacks none; hashes that it gains."""


class PlainStep:
    """The allocations of one step, which can all be done."""

    def __init__(self, manager: GroupManager, rows: list[_Allocation], num_lacking_blocks: int) -> None:
        self._manager = manager
        self._rows = rows
        self._num_lacking_blocks = num_lacking_blocks

    @classmethod
    def of(cls, pool: Pool, session: Session, step: Step) -> "PlainStep | None":
        """Checks a step that is next in its session; None if it is not for this file. Changes nothing."""
        manager, count = pool.plain_manager, len(step.operations)
        if (
            manager is None
            or count > MAX_OPERATIONS
            or step.operations.count(Operation.ALLOCATE) != count
            or len(step.request_numbers) != count
            or len(step.num_new_tokens) != count
            or len(set(step.request_numbers)) != count
            or pool.quotas.applies_to(session.holding)
            or not 0 <= step.executed_sequence <= session.sequence
            or not 0 <= step.launched_sequence <= session.sequence
            or not 0 <= step.admission_budget_tokens <= MAX_TOKENS
            or not 0 <= step.num_quiet_allocations <= MAX_QUIET_ALLOCATIONS
            or any([getattr(step, name) for name in _NOT_PLAIN])  # noqa: C419 - a generator takes longer
        ):
            return None
        zeros = [0] * count
        appended, taken = step.num_appended_tokens or zeros, step.num_taken_tokens or zeros
        if len(appended) != count or len(taken) != count:
            return None
        found = cls._find(pool, manager.span_tokens, session, step, zip(appended, taken, strict=True))
        return cls(manager, *found) if found else None

    @staticmethod
    def _find(
        pool: Pool, span: int, session: Session, step: Step, told: Iterable[tuple[int, int]]
    ) -> tuple[list[_Allocation], int] | None:
        max_tokens = pool.config.max_model_len
        by_number, joined = session.by_number, step.block_hashes
        size_bytes = pool.config.hash_scheme.hash_size_bytes if pool.config.enable_caching else 0
        rows: list[_Allocation] = []
        at = needed = 0
        for number, asked, (grown, quietly) in zip(step.request_numbers, step.num_new_tokens, told, strict=True):
            request = by_number.get(number)  # type: ignore[call-overload]  # NewType's call takes its time
            if request is None or not request.num_computed_tokens or grown < 0 or asked < 1 or quietly < 0:
                return None
            before_tokens, start_tokens = request.num_tokens, request.num_computed_tokens + quietly
            num_tokens, end_tokens = before_tokens + grown, start_tokens + asked
            num_blocks = len(request.tables[0].block_ids)
            if num_tokens > max_tokens or end_tokens > max_tokens:
                return None
            if quietly and start_tokens > pool.most_taken_tokens(request):
                return None
            hashes = None
            if size_bytes and num_tokens // span > before_tokens // span:
                end = at + (num_tokens // span - before_tokens // span) * size_bytes
                if end > len(joined):
                    return None
                hashes = [joined[i : i + size_bytes] for i in range(at, end, size_bytes)]
                at = end
            lacking = (end_tokens - 1) // span + 1 - num_blocks
            if lacking > 0:
                needed += lacking
            # BlockHash's call, too, takes its time.
            rows.append((request, num_tokens, start_tokens, end_tokens, lacking, hashes))  # type: ignore[arg-type]
        if at != len(joined) or needed > pool.blocks.num_free_blocks or needed >= MAX_STEP_WORK:
            return None
        return rows, needed

    def apply(self, pool: Pool, session: Session, step: Step) -> StepResult:
        """Does them."""
        manager, sequence = self._manager, types.Sequence(step.sequence)
        span, caches = manager.span_tokens, pool.config.enable_caching
        new = manager.take(self._num_lacking_blocks) if self._num_lacking_blocks else []
        counts = [0] * len(self._rows) if new else []
        before, now = Filled(pool, session), Filled(pool, session)
        max_tokens, room = pool.config.max_model_len, manager.quiet_room
        at = 0
        for i, (request, num_tokens, start_tokens, end_tokens, lacking, hashes) in enumerate(self._rows):
            table = request.tables[0]
            if hashes:
                request.hashes += hashes
            if lacking > 0:
                table.block_ids += new[at : at + lacking]
                counts[i] = lacking
                at += lacking
            if caches:
                if request.num_computed_tokens < start_tokens > request.quiet_tokens:  # it took room that it filled
                    before.add(request, min(num_tokens, start_tokens) // span)
                if end_tokens // span > table.num_cached < num_tokens // span:
                    now.add(request, min(num_tokens, end_tokens) // span)
            request.num_tokens, request.num_computed_tokens = num_tokens, end_tokens
            request.filling_sequence = sequence
            bound_tokens = room.num_tokens(len(table.block_ids), table.num_cached, 0)
            request.quiet_tokens = bound_tokens if bound_tokens < max_tokens else max_tokens  # noqa: FURB136 - min() is slower
        before.cache(types.Sequence(sequence - 1))
        now.cache(sequence)
        pool.activity.allocations += len(self._rows)
        free_blocks = pool.quotas.num_free_for(session.holding)
        return StepResult(sequence, free_blocks, num_new_blocks=counts, block_ids=new)  # type: ignore[arg-type]  # nobody else has the list
