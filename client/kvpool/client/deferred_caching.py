"""Decodes that fill a block on credit, where a pool allows it. The next step reports the filled blocks.

1. Only in a step that is sent for another reason: its number is the number of the step that fills the block.
2. The server caches the reported blocks before it applies the rest of the step that reports them: see
   `kvpool.core.execution.deferred_caching`. A decode may therefore be deferred only if no later operation of its step
   could find the block, remove its hash, or cache a block with the same hash. Every answer stays the same.
"""

from collections.abc import Sequence
from typing import Final

from kvpool.client.request import Request
from kvpool.client.results import Answer
from kvpool.client.step_builder import DecodeRow, Row, StepBuilder
from kvpool.core.blocks.credit import fills_on_credit
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Operation

_DROPPING: Final = frozenset((Operation.EVICT, Operation.RESET))
_BLIND: Final = frozenset((Operation.FREE, Operation.PREEMPT, Operation.COMMON_PREFIX))
"""Operations that neither look up nor cache blocks by hash."""


class DeferredCaching:
    """The blocks that decodes of one session filled on credit.

    Attributes:
        unreported: The requests that filled a block on credit in the last step that was answered.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._is_allowed = fills_on_credit(config)
        self._block_size = config.hash_block_size
        self._max_tokens = config.max_model_len
        self.unreported: Sequence[Request] = ()

    def defer(self, builder: StepBuilder) -> None:
        """Moves decodes of a step's last batch to credit, where they can be reported with the next step."""
        after: list[Row] = []
        for row in reversed(builder.rows if self._is_allowed else ()):
            if isinstance(row, DecodeRow):
                filling = self._filling(row, after)
                if filling and len(filling) < len(row.requests) + len(builder.rows) - 1:
                    builder.move_to_credit(row, filling)
                return
            if row.operation in _DROPPING:
                return
            after.append(row)

    def _filling(self, row: DecodeRow, after: Sequence[Row]) -> list[Request]:
        """The requests of a batch that only fill a block; none if the result depends on the order of caching."""
        filling, unreported, contents = [], set(self.unreported), set()
        named_after = {each.request for each in after}
        comparing = [each.request for each in after if each.request and each.operation not in _BLIND]
        for request in row.requests:
            num_computed = request.credit_tokens
            if request.num_credit_tokens:
                if request not in unreported:  # its tokens were appended late: it caches its blocks
                    return []
            elif num_computed % self._block_size == self._block_size - 1 and num_computed < self._max_tokens:
                if row.num_lookahead_tokens or request.num_tokens <= num_computed or request in named_after:
                    return []
                if comparing and self._may_share(request, num_computed // self._block_size, comparing):
                    return []
                filling.append(request)
                contents.add((num_computed, request.token_ids[num_computed]))
        return filling if len(contents) == len(filling) else []  # else two blocks may have the same hash

    @staticmethod
    def _may_share(request: Request, block: int, others: Sequence[Request]) -> bool:
        """Whether a full block of a request may have the hash of another request's block, by the hash before it."""
        before = request.hashes[block - 1] if block else None
        return any(len(of := other.hashes) > block and (before is None or of[block - 1] == before) for other in others)

    def rows(self, builder: StepBuilder) -> list[Row]:
        """Operations that report filled blocks of requests that the step does not name. Its rows report the others."""
        if not self.unreported:
            return []
        named: set[Request | None] = set()
        for row in builder.rows:
            named.update(row.requests if isinstance(row, DecodeRow) else (row.request,))
        return [Row(Operation.APPEND, request, Answer()) for request in self.unreported if request not in named]
