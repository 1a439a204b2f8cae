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
10. With partial hits, a hit needs the state after its last token, also within a block. A step that ends at the tail
    of a prompt (see `group_manager`) caches its state, which the request's next step overwrites. So that step copies
    the state first, and the copy, which is in no table, keeps the hash. Until then no other session finds it, because
    its steps are not ordered before that one. The state of rule 7 is then that after the step's last whole hash block;
    its block, the one before the last, gets the hash of that prefix.
11. A state is cached only as that after the tokens after which it was written. A step that begins within a block and
    ends behind it leaves the state before the step there, so this block is never cached. Drafts are no such step: the
    engine writes the state at a boundary that accepted drafts reach or pass. A request cannot go back to before a
    cached state.
12. Slots in reserve are further blocks behind the state, one per span of tokens. Decodes on credit write them one after
    the other. A step of many tokens that passes a block in reserve writes no state into it, so it stays uncached.
"""

from collections.abc import Sequence
from typing import ClassVar

from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.group_manager import GroupManager
from kvpool.core.blocks.retention import Run
from kvpool.core.ids import NULL_BLOCK, BlockHash, BlockId, GroupId, StepNumber
from kvpool.core.sessions.request import BlockCopy, BlockTable, Request
from kvpool.core.specs.kinds import checkpoint_alignment
from kvpool.core.specs.pool_config import PoolConfig


class StateManager(GroupManager):
    """Allocates, caches and frees the states of one group.

    Attributes:
        waits_for_readers: Whether a hit waits for steps that end prompts from the state at its end. In a pool of one
            group, with EAGLE, and since 0.33, vLLM does not wait for them.
    """

    has_gaps: ClassVar[bool] = True

    def __init__(self, config: PoolConfig, group_id: GroupId, block_pool: BlockPool) -> None:
        super().__init__(config, group_id, block_pool)
        self._checkpoint_alignment = checkpoint_alignment(self.spec)
        self._checkpoints_prompts_only = config.retention_tokens == 0
        self._hit_alignment = config.hit_alignment
        self.waits_for_readers = not (
            config.shares_read_states or len(config.groups) == 1 or config.use_eagle or config.partial_hits
        )
        if config.partial_hits or (self._checkpoint_alignment and self._hit_alignment != self.span_tokens):
            self.caches_tails = config.enable_caching

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
        span, unit = self.span_tokens, self._hash_tokens
        checkpoint = self._checkpoint_tokens(end)
        return (
            start % unit == 0
            and -(-end // span) - 2 > (start - 1) // span
            and start + unit <= checkpoint
            and (checkpoint - start) % self._checkpoint_alignment == 0
        )

    def pass_boundaries(self, request: Request, start: int, end: int) -> None:
        """Leaves the blocks uncached whose ends a step over the tokens [start, end) passes; see rule 11.

        They stay so if the blocks of the step are cached later.
        """
        table, span = request.tables[self.group_id], self.span_tokens
        num_passed = (min(end, request.num_tokens) - 1) // span
        if num_passed <= start // span:
            return
        if self._writes_checkpoint(request, start, end) and self._checkpoint_tokens(end) == num_passed * span:
            num_passed -= 1
        table.num_cached = max(table.num_cached, num_passed)

    def can_go_back(self, table: BlockTable, num_computed_tokens: int) -> bool:
        """See `GroupManager`. The next steps overwrite the states after later tokens, so none of these is cached."""
        overwritten = table.block_ids[num_computed_tokens // self.span_tokens :]
        return super().can_go_back(table, num_computed_tokens) and not any(
            block_id and self._pool.block_hash(block_id) for block_id in overwritten
        )

    def _checkpoint_tokens(self, end: int) -> int:
        """Tokens before the state that a step which ends after `end` tokens can write within."""
        return (end - 1) // self._hit_alignment * self._hit_alignment

    def copies_block(self, request: Request, hit: Sequence[BlockId], num_hit_tokens: int) -> bool:
        """See `GroupManager`. A running request copies the state at which it has cached the tail of its prompt."""
        num_tokens = request.num_computed_tokens
        if hit or not self.ends_within(num_tokens) or num_tokens != self._tail_tokens(request):
            return super().copies_block(request, hit, num_hit_tokens)
        block_hash = request.hashes[num_tokens // self._hash_tokens - 1]
        return self._pool.prefix_map.has_hash(self._state(request, num_tokens), block_hash)

    def _state(self, request: Request, num_tokens: int) -> BlockId:
        """The block of the state after `num_tokens` tokens, the null block if the table has none."""
        block_ids, at = request.tables[self.group_id].block_ids, (num_tokens - 1) // self.span_tokens
        return block_ids[at] if at < len(block_ids) else NULL_BLOCK

    def make_copy(
        self, request: Request, new: Sequence[list[BlockId]], hit: Sequence[Sequence[BlockId]], sequence: StepNumber
    ) -> BlockCopy:
        """See `GroupManager`. Without a hit, the copy takes the hash of the state at the tail of the prompt."""
        if hit[self.group_id]:
            return super().make_copy(request, new, hit, sequence)
        block_ids, target = request.tables[self.group_id].block_ids, new[self.group_id].pop(0)
        del block_ids[len(block_ids) - len(new[self.group_id]) - 1]
        source = self._state(request, request.num_computed_tokens)
        self._pool.move_hashes(source, target, request.session_number, sequence)
        self._pool.touch(self.group_id, [source])
        copy = BlockCopy(self.group_id, source, target, sequence)
        request.copies.append(copy)
        return copy

    def cache_tail(self, request: Request, num_tokens: int, start_tokens: int | None, sequence: StepNumber) -> None:
        """See `GroupManager`. Caches the state that the step has written within its tokens, or at its end."""
        table, end = request.tables[self.group_id], request.num_computed_tokens
        if table.has_stopped_caching:
            return
        if start_tokens is not None and self._writes_checkpoint(request, start_tokens, end):
            self._cache_checkpoint(request, end, sequence)
            return
        if num_tokens == end:
            self.cache_tail_state(request, num_tokens, sequence)

    def cache_tail_state(self, request: Request, num_tokens: int, sequence: StepNumber) -> None:
        """Caches the state after `num_tokens` tokens, at which a step ended, if its prompt can be resumed there."""
        is_tail = 0 < num_tokens == self._tail_tokens(request)
        if not is_tail or num_tokens % self._hit_alignment or request.tables[self.group_id].has_stopped_caching:
            return
        block_id = self._state(request, num_tokens)
        if block_id == NULL_BLOCK:
            return
        is_overwritten = self.ends_within(num_tokens)
        self._cache_state(request, block_id, num_tokens, StepNumber(-sequence) if is_overwritten else sequence)

    def _tail_tokens(self, request: Request) -> int:
        """See `GroupManager`. With EAGLE, the state at the end of the hit."""
        return max(super()._tail_tokens(request) - (self._hash_tokens if self._use_eagle else 0), 0)

    def _cache_checkpoint(self, request: Request, end: int, sequence: StepNumber) -> None:
        """Caches the state within a step, or nothing in its block if no hit can end there."""
        num_tokens = self._checkpoint_tokens(end)
        block_id = request.tables[self.group_id].block_ids[-(-end // self.span_tokens) - 2]
        is_whole, kept_at = num_tokens % self.span_tokens == 0, request.shared_prefix_boundary_tokens
        is_kept = is_whole and (self._retention is None or self._retention.keeps_segment(num_tokens))
        if is_kept or num_tokens in (self._checkpoint_tokens(request.num_prompt_tokens), kept_at):
            self._cache_state(request, block_id, num_tokens, sequence)
        else:
            self._pool.drop_hashes([block_id])

    def _cache_state(self, request: Request, block_id: BlockId, num_tokens: int, sequence: StepNumber) -> None:
        """Gives a block the hash of the state after `num_tokens` tokens, if it is known, in place of others."""
        num_hashes = num_tokens // self._hash_tokens
        if num_hashes > len(request.hashes):  # it covers tokens ahead
            return
        block_hash = request.hashes[num_hashes - 1]
        if self._pool.prefix_map.has_hash(block_id, block_hash):
            return
        self._pool.drop_hashes([block_id])
        self._pool.cache_tail(self.map_id(request), block_id, block_hash, request.session_number, sequence)
        self._record_tail(request, block_id, num_tokens)

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

    def state_read(self, request: Request) -> BlockHash | None:
        """Hash of the state from which the most recent step of a request ends its prompt; None if there is none."""
        known_tokens = min(request.num_computed_tokens, request.num_tokens)
        if known_tokens >= request.num_prompt_tokens + self._hit_alignment:  # most decodes
            return None
        table, tail_tokens = request.tables[self.group_id].block_ids, self._tail_tokens(request)
        num_blocks = tail_tokens // self.span_tokens
        is_read = (
            0 < num_blocks <= min(len(table), len(self.hashes(request)))  # fewer hashes without caching
            and num_blocks * self.span_tokens == tail_tokens
            and known_tokens // self._hit_alignment * self._hit_alignment == tail_tokens
            and table[num_blocks - 1] != NULL_BLOCK
        )
        return self.hashes(request)[num_blocks - 1] if is_read else None

    def _record_stored(self, request: Request, block_ids: list[BlockId], start: int) -> None:
        for i, block_id in enumerate(block_ids, start + 1):
            self._record_tail(request, block_id, i * self.span_tokens)

    def _runs_to_cache(self, request: Request, first: int, end: int) -> Sequence[Run]:
        block_ids = request.tables[self.group_id].block_ids
        runs = super()._runs_to_cache(request, first, end)
        return [(i, i + 1) for first, end in runs for i in range(first, end) if block_ids[i] != NULL_BLOCK]
