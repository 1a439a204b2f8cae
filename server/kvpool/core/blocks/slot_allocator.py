"""Room for tokens: which blocks a request lacks, whether they can be given, and giving them.

1. All or nothing: every group gets what it lacks, or none does.
2. The blocks of a hit are held before any block is taken, in all groups: what one group takes is no other's hit.
3. Room for external tokens is taken before that for new ones, in all groups.
4. What must stay free is of the blocks that the session can be given: with a quota, it is as if that were its own pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.group_manager import GroupManager
from kvpool.core.blocks.quota import Quotas
from kvpool.core.ids import BlockId
from kvpool.core.sessions.request import BlockTable, Request
from kvpool.core.specs.base import RequestLimits
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.allocation_options import AllocationOptions


@dataclass(slots=True)
class _Row:
    """A group's part of an allocation.

    Attributes:
        manager: The group's manager.
        table: The request's table in it.
        hit: What the table gets of a hit, nulls included.
        num_lacking: Blocks that it lacks beyond that, not positive if it lacks none.
    """

    manager: GroupManager
    table: BlockTable
    hit: Sequence[BlockId]
    num_lacking: int


class SlotAllocator:
    """Gives the requests of a pool the blocks that they lack.

    Attributes:
        no_blocks: No new blocks, in all groups. Never changed.
    """

    def __init__(self, config: PoolConfig, blocks: BlockPool, managers: Sequence[GroupManager], quotas: Quotas) -> None:
        self.no_blocks: tuple[list[BlockId], ...] = tuple([] for _ in managers)
        self._blocks = blocks
        self._managers = managers
        self._quotas = quotas
        self._max_tokens = config.max_model_len
        in_flight = config.max_in_flight_tokens or config.max_model_len
        limits = RequestLimits(config.max_model_len, in_flight, context_parallel_size=config.dcp_world_size)
        self._max_blocks = [None if m.spec.keeps_all else m.spec.max_blocks(limits) for m in managers]

    def take(self, request: Request, num_slots: int, num_encoder_tokens: int) -> tuple[list[BlockId], ...] | None:
        """Gives a request the blocks that it lacks for `num_slots` tokens, as decodes do: no hit, quota or terms.

        Returns:
            The new blocks, group by group; None if there are too few, and nothing was changed.
        """
        tables, counts, needed = request.tables, [], 0
        for manager in self._managers:
            lacking = manager.num_missing_blocks(tables[manager.group_id], num_slots, num_encoder_tokens)
            counts.append(lacking)
            if lacking > 0:
                needed += lacking
        if not needed:
            return self.no_blocks
        if needed > self._blocks.num_free_blocks:
            return None
        new = []
        for manager in self._managers:
            lacking = counts[manager.group_id]
            new.append(manager.allocate_new_blocks(tables[manager.group_id], lacking) if lacking > 0 else [])
        return tuple(new)

    def take_with_options(  # noqa: PLR0913, PLR0917 - what decides an allocation
        self,
        request: Request,
        hit: Sequence[Sequence[BlockId]],
        num_external_end: int,
        num_slots: int,
        num_encoder_tokens: int,
        options: AllocationOptions,
    ) -> tuple[list[BlockId], ...] | None:
        """The same with a hit, which the request gets, too, with quotas, or on terms.

        Args:
            request: The request.
            hit: What it gets of a hit, group by group, nulls included.
            num_external_end: Tokens up to which external ones reach; 0 if there are none.
            num_slots: Tokens to have room for.
            num_encoder_tokens: Of its encoder, likewise.
            options: Blocks to be left free.
        """
        rows = [
            _Row(m, table, blocks, m.num_missing_blocks(table, num_slots, num_encoder_tokens) - len(blocks))
            for m, table, blocks in zip(self._managers, request.tables, hit, strict=True)
        ]
        held = self._hit_to_hold(request, rows, options.num_reserved_blocks + options.num_watermark_blocks)
        if held is None:
            return None
        for row in rows:
            if row.hit:
                row.manager.add_hit_blocks(row.table, row.hit)
        first = self._take_external(rows, num_external_end) if num_external_end else self.no_blocks
        new = tuple(
            [
                external + (row.manager.allocate_new_blocks(row.table, row.num_lacking) if row.num_lacking > 0 else [])
                for external, row in zip(first, rows, strict=True)
            ]
        )
        if self._quotas.applies_to(request.holding):
            self._quotas.record_gained(request.holding, held, [block_id for blocks in new for block_id in blocks])
        return new

    def fits_whole(
        self,
        request: Request,
        hit: Sequence[Sequence[BlockId]],
        num_encoder_tokens: int,
        options: AllocationOptions,
    ) -> bool:
        """Whether the blocks are free that all known tokens of a request take, most at a time."""
        num_tokens = min(request.num_tokens, self._max_tokens)
        rows = []
        for manager, table, blocks, most in zip(self._managers, request.tables, hit, self._max_blocks, strict=True):
            num_blocks = manager.num_missing_blocks(table, num_tokens, num_encoder_tokens) + len(table.block_ids)
            if most is not None and num_blocks > most:
                num_blocks = most
            rows.append(_Row(manager, table, blocks, num_blocks - len(table.block_ids) - len(blocks)))
        return self._hit_to_hold(request, rows, options.num_watermark_blocks) is not None

    @staticmethod
    def _take_external(rows: Sequence[_Row], num_end_tokens: int) -> tuple[list[BlockId], ...]:
        """Takes of what rows lack that for their first `num_end_tokens` tokens, if any of these are looked at."""
        taken = []
        for row in rows:
            count = min(row.num_lacking, -(-num_end_tokens // row.manager.span_tokens) - len(row.table.block_ids))
            is_looked_at = row.manager.spec.num_skipped_tokens(num_end_tokens) < num_end_tokens
            is_some = count > 0 and is_looked_at and not row.manager.counts_encoder_tokens
            taken.append(row.manager.allocate_new_blocks(row.table, count) if is_some else [])
            row.num_lacking -= len(taken[-1])
        return tuple(taken)

    def _hit_to_hold(self, request: Request, rows: Sequence[_Row], num_spare_blocks: int) -> Sequence[BlockId] | None:
        """The hit's blocks, if they count in a quota; None if there are too few that the request may be given."""
        has_quota = self._quotas.applies_to(request.holding)
        needed = num_hit = 0
        for row in rows:
            num_hit += len(row.hit)
            if row.num_lacking > 0:
                needed += row.num_lacking
        num_free = self._blocks.num_free_blocks - num_spare_blocks
        if not has_quota and needed + num_hit <= num_free:  # it does not matter how many of the hit are free
            return ()
        hit_blocks = [block_id for row in rows for block_id in row.hit if block_id]
        needed += self._blocks.free_list.num_free_among(hit_blocks)
        # First, as it notes the maximum. What others' minima keep from the session is not free for it.
        if has_quota and not self._quotas.allows(request.holding, hit_blocks, needed + num_spare_blocks):
            return None
        return hit_blocks if needed <= num_free else None
