"""The manager of a group of states that are kept at the ends of steps only, as in vLLM's mamba_cache_mode "align".

A state covers all tokens before it, so a hit needs one. The numbers continue those of `group_manager`.

6. A step writes one state: if its tokens end at n, into block (n - 1) // span. A table grows by null blocks up to
   there, and by one block. The kernel reads the state of the table's block before, so this is freed one step later.
7. A step that completes a prompt can also write the state at the last block boundary before its end, where the prompt
   can be resumed, if its kernel can (`MambaSpec.prefill_checkpoint_alignment`). The table then grows by two blocks.
   Unless only the ends of prompts are kept (`PoolConfig.retention_tokens` 0), each step of a prompt does so.
8. Behind the state come the blocks of states after drafts. They never move back: a growth that leaves some of them
   behind moves these to the end of the table.
9. A hit cannot end with a state that a step fills which has not been launched, as the step that would read it copies
   the states that it continues from before any layer runs (`KVCacheManager.allocate_slots` refuses).
"""

from collections.abc import Sequence
from typing import ClassVar

from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.group_manager import GroupManager
from kvpool.core.blocks.retention import Run
from kvpool.core.ids import NULL_BLOCK, BlockId, GroupId
from kvpool.core.sessions.request import BlockTable, Request
from kvpool.core.specs.kinds import checkpoint_alignment
from kvpool.core.specs.pool_config import PoolConfig


class StateManager(GroupManager):
    """Allocates, caches and frees the states of one group."""

    has_gaps: ClassVar[bool] = True

    def __init__(self, config: PoolConfig, group_id: GroupId, block_pool: BlockPool) -> None:
        super().__init__(config, group_id, block_pool)
        self._checkpoint_alignment = checkpoint_alignment(self.spec)
        self._checkpoints_prompts_only = config.retention_tokens == 0
        self._waits_for_readers = len(config.groups) > 1 and not config.use_eagle

    def num_blocks_to_take(self, request: Request, num_hit: int, start: int, end: int) -> int:
        """Number of blocks to take for a step; at most zero for none.

        Args:
            request: The request.
            num_hit: Number of blocks of a hit, which the table does not contain yet.
            start: Number of computed tokens before the step, those of the hit included.
            end: Number of computed tokens after the step.
        """
        table = request.tables[self.group_id].block_ids
        count = -(-end // self.span_tokens) + self._num_extra_blocks - len(table) - num_hit
        if count <= 0:
            return count
        most = 1 if table else 1 + self._num_extra_blocks
        return min(count, most + self._writes_checkpoint(request, start, end))

    def _writes_checkpoint(self, request: Request, start: int, end: int) -> bool:
        """Whether a step over the tokens [start, end) also writes the state before its last; see rule 7."""
        if not self._checkpoint_alignment:
            return False
        if self._checkpoints_prompts_only and end < max(request.num_prompt_tokens, request.num_tokens - 1):
            return False
        span = self.span_tokens
        checkpoint = (end - 1) // span * span
        return start % span == 0 and start < checkpoint and (checkpoint - start) % self._checkpoint_alignment == 0

    def leave_gap(self, table: BlockTable, new: list[BlockId], num_hit: int, end: int) -> None:
        """Moves the new blocks of a step to the end of its tokens, as rules 6 and 8 say.

        Args:
            table: The table, which ends with the new blocks.
            new: The new blocks. What the table grows by comes before them: null blocks, then blocks for drafts that it
                held before.
            num_hit: Number of blocks of a hit with which the table begins.
            end: Number of computed tokens after the step.
        """
        if not new:
            return
        block_ids, num_before = table.block_ids, len(table.block_ids) - len(new)
        num_gap = -(-end // self.span_tokens) + self._num_extra_blocks - len(block_ids)
        num_drafts = 0 if num_before == num_hit else self._num_extra_blocks
        first = num_before - num_drafts
        moved = block_ids[first : first + min(num_gap, num_drafts)]
        if moved:
            if not table.num_skipped:
                table.block_ids = block_ids = block_ids.copy()  # see BlockTable
            block_ids[first : first + len(moved)] = [NULL_BLOCK] * len(moved)
        gap = [NULL_BLOCK] * (num_gap - len(moved)) + moved
        block_ids[num_before:num_before] = gap
        new[:0] = gap
        if not num_before:
            table.num_skipped = num_gap

    def reads_state(self, running: Request, waiting: Request, num_blocks: int) -> bool:
        """Whether the most recent step of a request ends its prompt from the state at the end of a hit of another.

        In a pool of one group, and with EAGLE, vLLM does not wait for that.

        Args:
            running: The request.
            waiting: The other request.
            num_blocks: Number of blocks of its hit.
        """
        table = running.tables[self.group_id].block_ids
        known_tokens = min(running.num_computed_tokens, running.num_tokens)
        return (
            self._waits_for_readers
            and known_tokens // self.span_tokens == num_blocks
            and (running.num_prompt_tokens - 1) // self.span_tokens == num_blocks
            and num_blocks <= len(table)
            and table[num_blocks - 1] != NULL_BLOCK
            and self.hashes(running)[num_blocks - 1] == self.hashes(waiting)[num_blocks - 1]
        )

    def _runs_to_cache(self, request: Request, first: int, end: int) -> Sequence[Run]:
        block_ids = request.tables[self.group_id].block_ids
        runs = super()._runs_to_cache(request, first, end)
        return [(i, i + 1) for first, end in runs for i in range(first, end) if block_ids[i] != NULL_BLOCK]
