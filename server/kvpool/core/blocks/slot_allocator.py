"""Allocates slots for tokens: counts the blocks that a request lacks, checks that they are free, and allocates them.

1. All or nothing: every group gets the blocks that it lacks, or no group gets any.
2. The blocks of a hit are held before any block is taken, in all groups. A group never takes a block of another
   group's hit.
3. Blocks for external tokens are taken before blocks for new tokens, in all groups.
4. Reserved and watermark blocks count against the blocks that are available to the session. With a quota, the session
   allocates as if those blocks were its own pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.group_manager import GroupManager
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.blocks.quota import Quotas
from kvpool.core.ids import NULL_BLOCK, BlockId
from kvpool.core.sessions.request import BlockTable, Request
from kvpool.core.specs.base import RequestLimits
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions


@dataclass(slots=True)
class _GroupDemand:
    """A group's part of an allocation.

    Attributes:
        manager: The group's manager.
        table: The request's table in the group.
        hit: The blocks that the table gets from a hit, null blocks included.
        num_lacking: Blocks that the table lacks beyond the hit; zero or negative if it lacks none.
    """

    manager: GroupManager
    table: BlockTable
    hit: Sequence[BlockId]
    num_lacking: int


class SlotAllocator:
    """Allocates blocks to the requests of a pool.

    Attributes:
        no_blocks: No new blocks, in all groups. Never changed.
        no_hit: No hit, in all groups.
    """

    def __init__(self, config: PoolConfig, blocks: BlockPool, managers: Sequence[GroupManager], quotas: Quotas) -> None:
        self.no_blocks: tuple[list[BlockId], ...] = tuple([] for _ in managers)
        self.no_hit: tuple[Sequence[BlockId], ...] = ((),) * len(managers)
        self._blocks = blocks
        self._managers = managers
        self._windowed = [manager for manager in managers if not manager.spec.keeps_all]
        self._quotas = quotas
        self._max_tokens = config.max_model_len
        in_flight = config.max_in_flight_tokens or config.max_model_len
        limits = RequestLimits(config.max_model_len, in_flight, context_parallel_size=config.dcp_world_size)
        self._max_blocks = [None if m.spec.keeps_all else m.spec.max_blocks(limits) for m in managers]

    def allocate(  # noqa: PLR0913, PLR0917 - the parameters that decide an allocation
        self,
        request: Request,
        computed: ComputedBlocks | None,
        num_computed_tokens: int,
        num_slots: int,
        num_encoder_tokens: int,
        options: AllocationOptions,
    ) -> tuple[list[BlockId], ...] | None:
        """Allocates a hit and the blocks that a request lacks for `num_slots` tokens.

        Args:
            request: The request.
            computed: A hit whose blocks are all still cached, for a request that holds no blocks.
            num_computed_tokens: Computed tokens, those of the hit and external tokens included.
            num_slots: Tokens that need a slot.
            num_encoder_tokens: Encoder tokens that need a slot.
            options: Options of the allocation.

        Returns:
            The new blocks, group by group. None if there are too few; only blocks behind a window were freed.
        """
        has_quota = self._quotas.applies_to(request.holding)
        is_plain = not (computed or has_quota) and options is DEFAULT_OPTIONS
        hit = self.no_hit if is_plain else self._hit(computed, options, num_computed_tokens)
        if options.full_sequence_must_fit and not self.fits_full_sequence(request, hit, num_encoder_tokens, options):
            return None
        for manager in self._windowed:
            table = request.tables[manager.group_id]
            skipped = manager.remove_skipped_blocks(table, num_computed_tokens - options.num_in_flight_tokens)
            if has_quota and skipped:
                self._quotas.record_lost(request.holding, skipped)
        if is_plain:
            return self.allocate_plain(request, num_slots, num_encoder_tokens)
        num_before = num_computed_tokens if options.num_external_tokens else 0
        new = self.allocate_with_options(request, hit, num_before, num_slots, num_encoder_tokens, options)
        if new is not None and computed and computed.shared_prefix_boundary_tokens is not None:
            request.shared_prefix_boundary_tokens = computed.shared_prefix_boundary_tokens
        return new

    def _hit(
        self, computed: ComputedBlocks | None, options: AllocationOptions, num_computed_tokens: int
    ) -> tuple[Sequence[BlockId], ...]:
        """Returns the blocks that a request gets from a hit. External tokens after the hit move windows forward."""
        hit = computed.block_ids if computed else self.no_hit
        if not options.num_external_tokens:
            return hit
        skipped = [manager.num_skipped_blocks(num_computed_tokens) for manager in self._managers]
        return tuple([NULL_BLOCK] * count + list(blocks[count:]) for blocks, count in zip(hit, skipped, strict=True))

    def allocate_plain(
        self, request: Request, num_slots: int, num_encoder_tokens: int
    ) -> tuple[list[BlockId], ...] | None:
        """Allocates the blocks that a request lacks for `num_slots` tokens, without a hit, a quota or options.

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

    def allocate_with_options(  # noqa: PLR0913, PLR0917 - the parameters that decide an allocation
        self,
        request: Request,
        hit: Sequence[Sequence[BlockId]],
        num_external_end: int,
        num_slots: int,
        num_encoder_tokens: int,
        options: AllocationOptions,
    ) -> tuple[list[BlockId], ...] | None:
        """Allocates like `allocate_plain`, with a hit, which the request also gets, with quotas, or with options.

        Args:
            request: The request.
            hit: The blocks that the request gets from a hit, group by group, null blocks included.
            num_external_end: End of the external tokens; 0 if there are none.
            num_slots: Tokens that need a slot.
            num_encoder_tokens: Encoder tokens that need a slot.
            options: Options of the allocation, with the numbers of blocks to leave free.
        """
        demands = [
            _GroupDemand(m, table, blocks, m.num_missing_blocks(table, num_slots, num_encoder_tokens) - len(blocks))
            for m, table, blocks in zip(self._managers, request.tables, hit, strict=True)
        ]
        held = self._hit_to_hold(request, demands, options.num_reserved_blocks + options.num_watermark_blocks)
        if held is None:
            return None
        for demand in demands:
            if demand.hit:
                demand.manager.add_hit_blocks(demand.table, demand.hit)
        first = self._allocate_external(demands, num_external_end) if num_external_end else self.no_blocks
        new = tuple(
            [
                external + (d.manager.allocate_new_blocks(d.table, d.num_lacking) if d.num_lacking > 0 else [])
                for external, d in zip(first, demands, strict=True)
            ]
        )
        if self._quotas.applies_to(request.holding):
            self._quotas.record_gained(request.holding, held, [block_id for blocks in new for block_id in blocks])
        return new

    def fits_full_sequence(
        self,
        request: Request,
        hit: Sequence[Sequence[BlockId]],
        num_encoder_tokens: int,
        options: AllocationOptions,
    ) -> bool:
        """Whether enough blocks are free for all known tokens of a request, at the point where it holds the most."""
        num_tokens = min(request.num_tokens, self._max_tokens)
        demands = []
        for manager, table, blocks, limit in zip(self._managers, request.tables, hit, self._max_blocks, strict=True):
            num_blocks = manager.num_missing_blocks(table, num_tokens, num_encoder_tokens) + len(table.block_ids)
            if limit is not None and num_blocks > limit:
                num_blocks = limit
            demands.append(_GroupDemand(manager, table, blocks, num_blocks - len(table.block_ids) - len(blocks)))
        return self._hit_to_hold(request, demands, options.num_watermark_blocks) is not None

    @staticmethod
    def _allocate_external(demands: Sequence[_GroupDemand], num_end_tokens: int) -> tuple[list[BlockId], ...]:
        """Allocates the lacking blocks of the first `num_end_tokens` tokens, unless the group skips all of them."""
        taken = []
        for demand in demands:
            manager, table = demand.manager, demand.table
            count = min(demand.num_lacking, -(-num_end_tokens // manager.span_tokens) - len(table.block_ids))
            is_read = manager.spec.num_skipped_tokens(num_end_tokens) < num_end_tokens
            is_needed = count > 0 and is_read and not manager.counts_encoder_tokens
            taken.append(manager.allocate_new_blocks(table, count) if is_needed else [])
            demand.num_lacking -= len(taken[-1])
        return tuple(taken)

    def _hit_to_hold(
        self, request: Request, demands: Sequence[_GroupDemand], num_spare_blocks: int
    ) -> Sequence[BlockId] | None:
        """Returns the blocks of the hit, if a quota counts them; None if the request cannot get enough blocks."""
        has_quota = self._quotas.applies_to(request.holding)
        needed = num_hit = 0
        for demand in demands:
            num_hit += len(demand.hit)
            if demand.num_lacking > 0:
                needed += demand.num_lacking
        num_free = self._blocks.num_free_blocks - num_spare_blocks
        if not has_quota and needed + num_hit <= num_free:  # enough even if all blocks of the hit are free
            return ()
        hit_blocks = [block_id for demand in demands for block_id in demand.hit if block_id]
        needed += self._blocks.free_list.num_free_among(hit_blocks)
        # This check comes first because it records whether the session's maximum refuses the allocation. Blocks that
        # the minima of other sessions reserve are not free for this session.
        if has_quota and not self._quotas.allows(request.holding, hit_blocks, needed + num_spare_blocks):
            return None
        return hit_blocks if needed <= num_free else None
