"""Decodes that fill a block without asking, where a pool allows it: the step after tells of them.

1. Only in a step that is sent for another reason: its number says which step fills the block.
2. What is told so is cached before all else of the step that tells: see `kvpool.core.execution.deferred_caching`. So
   only where nothing after the decode could find the block, drop it, or be cached with its hash: every answer stays
   what it was.
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
"""They find no block by its hash, and cache none."""


class DeferredCaching:
    """What decodes of one session filled without asking.

    Attributes:
        untold: The requests that filled a block so in the last step that was answered.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._is_allowed = fills_on_credit(config)
        self._block_size = config.hash_block_size
        self._max_tokens = config.max_model_len
        self.untold: Sequence[Request] = ()

    def leave_out(self, builder: StepBuilder) -> None:
        """Takes out of a step's last batch the decodes that need not ask."""
        after: list[Row] = []
        for row in reversed(builder.rows if self._is_allowed else ()):
            if isinstance(row, DecodeRow):
                filling = self._filling(row, after)
                if filling and len(filling) < len(row.requests) + len(builder.rows) - 1:
                    builder.fill(row, filling)
                return
            if row.operation in _DROPPING:
                return
            after.append(row)

    def _filling(self, row: DecodeRow, after: Sequence[Row]) -> list[Request]:
        """The requests of a batch that only fill a block; none if what they fill depends on the order of caching."""
        filling, untold, contents = [], set(self.untold), set()
        named_after = {each.request for each in after}
        comparing = [each.request for each in after if each.request and each.operation not in _BLIND]
        for request in row.requests:
            num_computed = request.credit_tokens
            if request.num_credit_tokens:
                if request not in untold:  # its tokens came late: it caches what it may
                    return []
            elif num_computed % self._block_size == self._block_size - 1 and num_computed < self._max_tokens:
                if row.num_lookahead_tokens or request.num_tokens <= num_computed or request in named_after:
                    return []
                if comparing and self._may_share(request, num_computed // self._block_size, comparing):
                    return []
                filling.append(request)
                contents.add((num_computed, request.token_ids[num_computed]))
        return filling if len(contents) == len(filling) else []  # else some of the blocks may be equal

    @staticmethod
    def _may_share(request: Request, block: int, others: Sequence[Request]) -> bool:
        """Whether the full block at a place of a request's may be one of others', by what they hold before it."""
        before = request.hashes[block - 1] if block else None
        return any(len(of := other.hashes) > block and (before is None or of[block - 1] == before) for other in others)

    def rows(self, builder: StepBuilder) -> list[Row]:
        """Operations that tell of what is untold and of no request that a step names: each of these tells it first."""
        if not self.untold:
            return []
        named: set[Request | None] = set()
        for row in builder.rows:
            named.update(row.requests if isinstance(row, DecodeRow) else (row.request,))
        return [Row(Operation.APPEND, request, Answer()) for request in self.untold if request not in named]
