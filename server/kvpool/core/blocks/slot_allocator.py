"""Allocates slots for tokens: counts the blocks that a request lacks, checks that they are free, and allocates them.

1. All or nothing: every group gets the blocks that it lacks, or no group gets any.
2. The blocks of a hit are held before any block is taken, in all groups. A group never takes a block of another
   group's hit.
3. Blocks for external tokens are taken before blocks for new tokens, in all groups.
4. A block that is copied takes one more, before the other new blocks of its group.
5. Reserved and watermark blocks count against the blocks that are available to the session. With a quota, the session
   allocates as if those blocks were its own pool.
6. Slots in reserve are allocated only if `reserve_floor_blocks` are still available afterwards, so that each running
   request of the pool can get its next block. All of a request's reserve is allocated, or none. In pools with states,
   a request has none before the step that ends its prompt.
"""

from collections.abc import Sequence

from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.group_manager import GroupManager
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.blocks.quota import Quotas
from kvpool.core.blocks.state_manager import StateManager
from kvpool.core.blocks.steps_in_flight import StepsInFlight
from kvpool.core.ids import NULL_BLOCK, BlockId, StepNumber
from kvpool.core.sessions.request import Request
from kvpool.core.specs.base import RequestLimits
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions


class SlotAllocator:
    """Allocates blocks to the requests of a pool.

    Attributes:
        no_blocks: No blocks, in all groups.
        refused_for_ever: Whether a refusal that was not looked at was for more blocks than its session can ever hold.
        reserve_floor_blocks: See rule 6.
    """

    def __init__(
        self,
        config: PoolConfig,
        blocks: BlockPool,
        managers: Sequence[GroupManager],
        quotas: Quotas,
        in_flight: StepsInFlight,
    ) -> None:
        self.no_blocks: tuple[Sequence[BlockId], ...] = ((),) * len(managers)
        self.refused_for_ever = False
        self.reserve_floor_blocks = 0
        self._blocks = blocks
        self._managers = managers
        self._windowed = [manager for manager in managers if not manager.spec.keeps_all]
        self._of_states = [manager for manager in managers if isinstance(manager, StateManager)]
        self._copying = [manager for manager in managers if manager.resumes_within]
        self._quotas = quotas
        self._steps_in_flight = in_flight
        self._max_tokens = config.max_model_len
        num_in_flight = config.max_in_flight_tokens or config.max_model_len
        limits = RequestLimits(config.max_model_len, num_in_flight, context_parallel_size=config.dcp_world_size)
        self._max_blocks = [None if m.spec.keeps_all else m.spec.max_blocks(limits) for m in managers]

    def allocate(  # noqa: PLR0913, PLR0917 - the parameters that decide an allocation
        self,
        request: Request,
        computed: ComputedBlocks | None,
        num_computed_tokens: int,
        end_tokens: int,
        num_slots: int,
        num_encoder_tokens: int,
        options: AllocationOptions,
        sequence: StepNumber,
    ) -> tuple[Sequence[BlockId], ...] | None:
        """Allocates a hit and the blocks that a request lacks for `num_slots` tokens.

        Args:
            request: The request.
            computed: A hit whose blocks are all still cached, for a request that holds no blocks.
            num_computed_tokens: Computed tokens, those of the hit and external tokens included.
            end_tokens: Computed tokens after the step.
            num_slots: Tokens that need a slot: those and look-ahead tokens.
            num_encoder_tokens: Encoder tokens that need a slot.
            options: Options of the allocation.
            sequence: Number of the session's step.

        Returns:
            The new blocks, group by group. None if there are too few; only blocks behind a window were freed.
        """
        # Blocks of one group, by the tokens that they hold. A request with a hit holds none yet:
        #
        #   0            skipped             hit        num_computed_tokens                num_slots
        #   |--- null ---|--- hit or held ---|--- external ---|--- new, look-ahead, drafts ---|
        #                                    |------------------ counts ----------------------|
        hit = self._hit(computed, options, num_computed_tokens)
        copying = self._copying_groups(request, computed, hit) if self._copying else ()
        if options.full_sequence_must_fit and not self.fits_full_sequence(
            request, hit, num_computed_tokens, num_encoder_tokens, options, copying
        ):
            return None
        # Before the count, although the allocation may fail: as in vLLM, the freed blocks may be those that it lacks.
        if self._windowed:
            self.free_behind_windows(request, num_computed_tokens - options.num_in_flight_tokens)
        counts = []
        for manager in self._managers:
            i = manager.group_id
            counts.append(manager.num_missing_blocks(request.tables[i], num_slots, num_encoder_tokens) - len(hit[i]))
        if self._of_states or copying:
            self._count_states_and_copies(counts, request, hit, num_computed_tokens, end_tokens, copying)
        found = self._hit_to_hold(request, hit, counts, options.num_reserved_blocks + options.num_watermark_blocks)
        if found is None:
            self._note_refused(request, hit, counts, len(copying))
            return None
        counts, (held, num_own), end_tokens = self._with_reserve(
            request, hit, counts, found, (end_tokens, num_slots + request.reserve_tokens), num_encoder_tokens, options
        )
        promoted = self._add_hit(request, hit, copying, num_own, sequence) if hit is not self.no_blocks else ()
        new: tuple[list[BlockId], ...] = ()
        if max(counts) > 0:
            num_external_end = num_computed_tokens if options.num_external_tokens else 0
            new = self._allocate_missing(request, counts, num_external_end, num_own)
        if self._quotas.applies_to(request.holding):
            taken = [*promoted, *(block_id for blocks in new for block_id in blocks)]
            self._quotas.record_gained(request.holding, [*held, *promoted], taken)  # promoted ones: in copies, too
        if new and (self._of_states or copying):
            self._place_states_and_copies(new, request, hit, end_tokens, copying, sequence)
        return new or self.no_blocks

    def reserve(self, request: Request, num_slots: int) -> tuple[Sequence[BlockId], ...]:
        """Allocates and returns the blocks that a request lacks for `num_slots` tokens; none if rule 6 forbids it."""
        none, ends = ([0] * len(self._managers), ((), 0)), (request.num_computed_tokens, num_slots)
        counts, (held, num_own), _ = self._with_reserve(request, self.no_blocks, *none, ends, 0, DEFAULT_OPTIONS)
        if max(counts) <= 0:
            return self.no_blocks
        new = self._allocate_missing(request, counts, 0, num_own)
        if self._quotas.applies_to(request.holding):
            self._quotas.record_gained(request.holding, held, [block_id for blocks in new for block_id in blocks])
        return new

    def give_back(self, request: Request, num_slots: int) -> None:
        """Frees the blocks of a request beyond those with slots for `num_slots` tokens."""
        for manager, table in zip(self._managers, request.tables, strict=True):
            freed = manager.free_surplus(table, num_slots)
            if freed and self._quotas.applies_to(request.holding):
                self._quotas.record_lost(request.holding, freed)

    def _with_reserve(  # noqa: PLR0913, PLR0917 - as `allocate`
        self,
        request: Request,
        hit: Sequence[Sequence[BlockId]],
        counts: list[int],
        found: tuple[Sequence[BlockId], int],
        ends: tuple[int, int],
        num_encoder_tokens: int,
        options: AllocationOptions,
    ) -> tuple[list[int], tuple[Sequence[BlockId], int], int]:
        """Adds the blocks of a request's reserve to those that it lacks, see rule 6; or returns these as they are.

        Args:
            request: The request.
            hit: As for `_hit_to_hold`.
            counts: As for `_hit_to_hold`.
            found: Its answer for these counts.
            ends: Computed tokens after the step; and the number of slots with the reserve.
            num_encoder_tokens: See `allocate`.
            options: See `allocate`.

        Returns:
            The counts; their answer; and the number of tokens to whose end they extend the tables of states.
        """
        end_tokens, num_slots = ends
        # The next step of a prompt would pass by a state in reserve.
        if not request.reserve_tokens or (self._of_states and end_tokens < request.num_tokens):
            return counts, found, end_tokens
        num_slots = min(num_slots, self._max_tokens)
        more = [
            manager.num_missing_blocks(table, num_slots, num_encoder_tokens) - len(blocks)
            for manager, table, blocks in zip(self._managers, request.tables, hit, strict=True)
        ]
        # A step needs blocks only for the last states that it writes, not for all of its tokens: see `StateManager`.
        for states in self._of_states:
            i = states.group_id
            missing = states.num_missing_blocks(request.tables[i], end_tokens, 0) - len(hit[i])
            more[i] -= max(missing, 0) - max(counts[i], 0)
        if not any(wanted > max(count, 0) for wanted, count in zip(more, counts, strict=True)):
            return counts, found, end_tokens
        num_spare = options.num_reserved_blocks + options.num_watermark_blocks + self.reserve_floor_blocks
        with_more = self._hit_to_hold(request, hit, more, num_spare)
        if with_more is None:
            if request.holding:
                request.holding.is_over = False  # the allocation itself is not refused
            return counts, found, end_tokens
        return more, with_more, num_slots

    def _add_hit(
        self,
        request: Request,
        hit: Sequence[Sequence[BlockId]],
        copying: Sequence[GroupManager],
        num_own: int,
        sequence: StepNumber,
    ) -> Sequence[BlockId]:
        """Adds the blocks of a hit to the tables of a request that holds none.

        Takes blocks for those of the hit that are in host memory, and orders the copies. A group in which the
        allocation copies the last block of the hit copies it from there.

        Returns:
            The blocks that it took.
        """
        if self._blocks.free_list.num_held:
            host = self._blocks.host
            self._steps_in_flight.keep_hit(map(host.without, hit) if host else hit)
        for manager, table, blocks in zip(self._managers, request.tables, hit, strict=True):
            manager.add_hit_blocks(table, blocks)
        if not self._blocks.host:
            return ()
        if num_own > 0:
            self._blocks.free_list.put_own_first(num_own)
        num_hit = [len(blocks) - (manager in copying) for manager, blocks in zip(self._managers, hit, strict=True)]
        promoted = [m.promote(request, count, sequence) for m, count in zip(self._managers, num_hit, strict=True)]
        return [block_id for block_ids in promoted for block_id in block_ids]

    def free_behind_windows(self, request: Request, num_run_tokens: int) -> None:
        """Frees the blocks that no token attends to any more once `num_run_tokens` tokens have run."""
        for manager in self._windowed:
            table = request.tables[manager.group_id]
            if self._steps_in_flight.is_keeping:
                end = manager.num_skipped_blocks(num_run_tokens)
                self._steps_in_flight.keep_shared(manager.group_id, table.block_ids[table.num_skipped : end])
            skipped = manager.remove_skipped_blocks(table, num_run_tokens)
            if skipped and self._quotas.applies_to(request.holding):
                self._quotas.record_lost(request.holding, skipped)

    def _hit(
        self, computed: ComputedBlocks | None, options: AllocationOptions, num_computed_tokens: int
    ) -> tuple[Sequence[BlockId], ...]:
        """Returns the blocks that a request gets from a hit. External tokens after the hit move windows forward."""
        hit = computed.block_ids if computed else self.no_blocks
        if not options.num_external_tokens:
            return hit
        skipped = [manager.num_skipped_blocks(num_computed_tokens) for manager in self._managers]
        return tuple([NULL_BLOCK] * count + list(blocks[count:]) for blocks, count in zip(hit, skipped, strict=True))

    def fits_full_sequence(  # noqa: PLR0913, PLR0917 - as `allocate`
        self,
        request: Request,
        hit: Sequence[Sequence[BlockId]],
        num_computed_tokens: int,
        num_encoder_tokens: int,
        options: AllocationOptions,
        copying: Sequence[GroupManager] = (),
    ) -> bool:
        """Whether enough blocks are free for all known tokens of a request, at the point where it holds the most."""
        num_tokens = min(request.num_tokens, self._max_tokens)
        counts = []
        for manager, table, blocks, limit in zip(self._managers, request.tables, hit, self._max_blocks, strict=True):
            num_blocks = manager.num_missing_blocks(table, num_tokens, num_encoder_tokens) + len(table.block_ids)
            if limit is not None and num_blocks > limit:  # a window never holds all tokens at once
                num_blocks = limit
            counts.append(num_blocks - len(table.block_ids) - len(blocks))
        self._count_states_and_copies(counts, request, hit, num_computed_tokens, num_tokens, copying)
        fits = self._hit_to_hold(request, hit, counts, options.num_watermark_blocks) is not None
        if not fits:
            self._note_refused(request, hit, counts, len(copying))
        return fits

    def _copying_groups(
        self, request: Request, computed: ComputedBlocks | None, hit: Sequence[Sequence[BlockId]]
    ) -> list[GroupManager]:
        """Returns the groups in which the allocation copies a block."""
        num_hit_tokens = computed.num_tokens if computed else 0
        return [each for each in self._copying if each.copies_block(request, hit[each.group_id], num_hit_tokens)]

    def _count_states_and_copies(  # noqa: PLR0913, PLR0917 - as `allocate`
        self,
        counts: list[int],
        request: Request,
        hit: Sequence[Sequence[BlockId]],
        start_tokens: int,
        end_tokens: int,
        copying: Sequence[GroupManager],
    ) -> None:
        """Sets the numbers of states that a step over the tokens [start_tokens, end_tokens) takes, and adds copies."""
        for states in self._of_states:
            i = states.group_id
            counts[i] = states.num_blocks_to_take(request, len(hit[i]), start_tokens, end_tokens)
        for manager in copying:
            counts[manager.group_id] = max(counts[manager.group_id], 0) + 1

    def _place_states_and_copies(  # noqa: PLR0913, PLR0917 - as `allocate`
        self,
        new: Sequence[list[BlockId]],
        request: Request,
        hit: Sequence[Sequence[BlockId]],
        end_tokens: int,
        copying: Sequence[GroupManager],
        sequence: StepNumber,
    ) -> None:
        """Moves new states to the ends of a step's tokens, and copies to their places."""
        copies = [(manager.group_id, manager.make_copy(request, new, hit, sequence)) for manager in copying]
        for states in self._of_states:
            i = states.group_id
            states.leave_gap(request.tables[i], new[i], len(hit[i]), end_tokens)
        for i, copy in copies:
            if hit[i]:
                new[i].insert(0, copy.target)
        if copies and self._quotas.applies_to(request.holding):
            referenced = [copy.target if hit[i] else copy.source for i, copy in copies]
            self._quotas.record_gained(request.holding, referenced, ())

    def _allocate_missing(
        self, request: Request, counts: list[int], num_external_end: int, num_own: int
    ) -> tuple[list[BlockId], ...]:
        """Allocates the missing blocks, first those of external tokens, which end at `num_external_end` unless it is 0.

        At least `num_own` of them, if there are as many, are blocks that wait for the session's steps.
        Blocks of external tokens are not allocated first in groups that skip all of these tokens.
        """
        new: tuple[list[BlockId], ...] = tuple([[] for _ in counts])
        if num_own > 0:
            self._blocks.free_list.put_own_first(num_own)
        # vLLM's order, in which a connector gets the blocks of what it loads first: block ids depend on it.
        for manager in self._managers if num_external_end else ():
            table, spec = request.tables[manager.group_id], manager.spec
            count = -(-num_external_end // manager.span_tokens) - len(table.block_ids)
            count = min(count, counts[manager.group_id])
            is_read = spec.num_skipped_tokens(num_external_end) < num_external_end
            if count > 0 and is_read and not manager.counts_encoder_tokens:
                new[manager.group_id].extend(manager.allocate_new_blocks(table, count))
                counts[manager.group_id] -= count
        for manager in self._managers:
            count = counts[manager.group_id]
            if count > 0:
                new[manager.group_id].extend(manager.allocate_new_blocks(request.tables[manager.group_id], count))
        return new

    def _hit_to_hold(
        self, request: Request, hit: Sequence[Sequence[BlockId]], counts: Sequence[int], num_spare_blocks: int
    ) -> tuple[Sequence[BlockId], int] | None:
        """Returns the blocks of the hit, if a quota counts them, and how many blocks must be of those that wait for it.

        None if the request cannot get enough blocks.

        Args:
            request: The request.
            hit: The blocks that it gets from a hit, group by group, null blocks included.
            counts: Number of blocks that it lacks beyond the hit, per group; zero or negative for none.
            num_spare_blocks: Number of blocks that must remain free.
        """
        has_quota = self._quotas.applies_to(request.holding)
        needed = sum([count for count in counts if count > 0])
        num_free = self._blocks.num_available_blocks - num_spare_blocks
        # Enough even if all blocks of the hit are free?
        if not has_quota and needed + (0 if hit is self.no_blocks else sum(map(len, hit))) <= num_free:
            return (), 0
        hit_blocks = [block_id for blocks in hit for block_id in blocks if block_id]
        if self._blocks.host:  # those in host memory need new blocks
            num_hit, hit_blocks = len(hit_blocks), self._blocks.host.without(hit_blocks)
            needed += num_hit - len(hit_blocks)
        # A free block of the hit costs one as well: holding it takes it from the blocks that could be allocated.
        free_list = self._blocks.free_list
        needed += free_list.num_free_among(hit_blocks)
        # This check comes first because it records whether the session's maximum refuses the allocation. Blocks that
        # the minima of other sessions reserve are not free for this session.
        num_own = self._quotas.num_from_own(request.holding, hit_blocks, needed + num_spare_blocks) if has_quota else 0
        if num_own is None:
            return None
        if free_list.num_held:  # a block of the hit that another session holds could not be allocated anyway
            needed -= len(dict(free_list.held_for_others(hit_blocks)))
        return (hit_blocks, num_own) if needed <= num_free else None

    def _note_refused(
        self, request: Request, hit: Sequence[Sequence[BlockId]], counts: Sequence[int], num_copies: int
    ) -> None:
        """Records whether a request that lacks `counts` blocks beyond a hit needs more than its session can hold."""
        num_blocks = -num_copies  # whose sources it needs for a step only
        for manager in self._managers:
            i = manager.group_id
            table, num_tokens = request.tables[i], request.num_computed_tokens
            # A window frees those behind it when the steps in flight have run, and a step can pass states in reserve.
            end = len(table.block_ids) - (manager.num_surplus_blocks(table, num_tokens) if manager.has_gaps else 0)
            held = table.block_ids[manager.num_skipped_blocks(num_tokens) : end]
            num_blocks += len({*held, *hit[i]} - {NULL_BLOCK}) + max(counts[i], 0)
        self.refused_for_ever = num_blocks > self._quotas.max_blocks_for(request.holding)
