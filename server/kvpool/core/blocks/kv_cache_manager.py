"""A pool: what vLLM's KV cache manager answers, block id for block id, for the requests of any number of sessions.

1. Every method is all or nothing; too few free blocks is an answer (None), not an error. Only blocks that nothing
   looks at any more, behind a window, are freed even then.
2. A request's blocks are changed only through its session; the blocks themselves may be shared, read only.
3. What a request holds never loses its contents: only free blocks are taken.
4. A hit never covers a request's last token, whose logits are to be computed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool.core import ids
from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.credit import fills_on_credit, is_plain
from kvpool.core.blocks.group_manager import GroupManager
from kvpool.core.blocks.prefix_search import PrefixSearch
from kvpool.core.blocks.quota import Quotas
from kvpool.core.blocks.slot_allocator import SlotAllocator
from kvpool.core.errors import InvalidArgumentError, UnavailableError
from kvpool.core.ids import NULL_BLOCK, BlockId, GroupId, SessionId, SessionNumber
from kvpool.core.sessions.quarantine import Quarantine
from kvpool.core.sessions.request import BlockTable, Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.statistics import ActivityCounters, PrefixCacheStats, RecentHitRate
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions

SUSPENDED_RETRY_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """A prefix found in the cache.

    Attributes:
        block_ids: Its blocks, group by group; null where none is needed. Not held: they may be evicted until they are
            allocated.
        num_tokens: Its length.
        num_shared_tokens: Of these, tokens of blocks that another session filled, or this one before it was resumed, in
            the group that has most of them.
        num_probes: What the search cost, in hashes found.
        shared_prefix_boundary_tokens: See `Request`, which copies it when it gets these blocks or a step looked
            them up. None for a result of an earlier step.
    """

    block_ids: tuple[Sequence[BlockId], ...]
    num_tokens: int
    num_shared_tokens: int = 0
    num_probes: int = field(default=0, compare=False)
    shared_prefix_boundary_tokens: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Admission:
    """What an admitted request got.

    Attributes:
        computed: The hit, whose blocks the request now holds.
        num_new_tokens: Tokens beyond the hit that have room.
        new_blocks: The newly allocated blocks, group by group.
    """

    computed: ComputedBlocks
    num_new_tokens: int
    new_blocks: tuple[list[BlockId], ...]


class KVCacheManager:
    """The blocks of one model, and the managers of its groups.

    Attributes:
        config: What the pool was declared with; its none_hash is drawn.
        owner: Name of the token that declared it, or that its first rank showed; empty for none.
        hash_block_size: The configuration's, worked out once.
        epoch: Goes up whenever the contents of blocks can no longer be trusted.
        blocks: The blocks.
        plain_manager: The manager of the only group, if that keeps its blocks, has a slot for each token and no events.
        quotas: What its sessions can always have, and the most they may hold.
        stats: Counters of look-ups.
        recent_hit_rate: Hit rate over the last look-ups.
        num_preemptions: Times that a request's blocks were taken back.
        activity: What it did so far.
        sessions: Those that are open, in the order of their numbers; kept by whoever opens them.
        quarantine: Those that were ended and still hold their blocks; kept by whoever ends them.
        ranks_fence: Whether every rank of the pool says when no step of an ended session is in flight.
        block_lifetimes: How long its blocks keep what they hold; None if that is not sampled.
        memory_id: The memory that all it holds is in, see `memory`; empty if that is not known.
        is_suspended: Whether nothing is allocated for now, as a rank is missing.
    """

    def __init__(
        self, config: PoolConfig, epoch: int = 1, block_lifetimes: BlockLifetimes | None = None, owner: str = ""
    ) -> None:
        self.owner = owner
        self.stats = PrefixCacheStats()
        self.recent_hit_rate = RecentHitRate()
        self.num_preemptions = 0
        self.activity = ActivityCounters()
        self.sessions: dict[SessionId, Session] = {}
        self.quarantine = Quarantine()
        self.ranks_fence = False
        self.block_lifetimes = block_lifetimes
        self.memory_id = ""
        self.is_suspended = False
        self._start_over(config, epoch)

    def _start_over(self, config: PoolConfig, epoch: int) -> None:
        config.check()
        self.config = config
        self.hash_block_size = config.hash_block_size
        self.epoch = epoch
        self.blocks = BlockPool(config, self.block_lifetimes)
        self._managers = [GroupManager(config, GroupId(i), self.blocks) for i in range(len(config.groups))]
        self._no_hit: tuple[Sequence[BlockId], ...] = ((),) * len(self._managers)
        self._credits = [manager.credit for manager in self._managers]
        self._windowed = [manager for manager in self._managers if not manager.spec.keeps_all]
        self.plain_manager = self._managers[0] if is_plain(config) else None
        self._fills_on_credit = fills_on_credit(config)
        self.quotas = Quotas(self.blocks, self.blocks.num_free_blocks)
        self._slot_allocator = SlotAllocator(config, self.blocks, self._managers, self.quotas)
        self._search = PrefixSearch(
            self._managers,
            self.blocks.prefix_map,
            config.hit_alignment,
            finds_shared_prefix_boundary=config.retention_tokens is not None and config.enable_caching,
        )

    def __repr__(self) -> str:
        used = self.blocks.num_blocks - 1 - self.blocks.num_free_blocks
        cached = len(self.blocks.prefix_map)
        return f"<Pool {self.config.name!r}: {self.blocks.num_blocks} blocks, {used} used, {cached} cached>"

    def begin_epoch(self, config: PoolConfig, epoch: int) -> None:
        """Starts over with empty blocks, none in quarantine; counters go on. The caller has ended the sessions.

        O(num_blocks).

        Raises:
            InvalidArgumentError: The configuration is out of range; nothing was changed.
        """
        before = self.blocks
        self._start_over(config, epoch)
        self.quarantine.clear()
        self.blocks.continue_from(before)
        self.recent_hit_rate.reset()

    def check_serving(self) -> None:
        """Raises UnavailableError if the pool is suspended."""
        if self.is_suspended:
            message = "a rank of the pool is lost; nothing is allocated until it is back"
            raise UnavailableError("RANK_LOST", message, retry_seconds=SUSPENDED_RETRY_SECONDS)

    @property
    def sink_blocks(self) -> tuple[BlockId, ...]:
        """Blocks set aside for sinks, group by group."""
        return tuple(block_id for manager in self._managers for block_id in manager.sink_blocks)

    def new_tables(self) -> tuple[BlockTable, ...]:
        """Makes the empty tables of a request."""
        return tuple(BlockTable() for _ in self._managers)

    def find_longest_cache_hit(self, request: Request) -> ComputedBlocks:
        """Finds the longest cached prefix of a request that holds no blocks; not counted."""
        if not self.config.enable_caching:
            return ComputedBlocks(self._no_hit, 0)
        length, found, num_probes, junction = self._search.find(request, max(request.num_tokens - 1, 0))
        shared = max(self._num_shared_tokens(m, found[m.group_id], request.session_number) for m in self._managers)
        return ComputedBlocks(tuple(found), length, shared, num_probes, junction)

    def _num_shared_tokens(self, manager: GroupManager, found: Sequence[BlockId], reader: SessionNumber) -> int:
        held = [block_id for block_id in found if block_id != NULL_BLOCK]
        return (len(held) - self.blocks.prefix_map.num_written_by(held, reader)) * manager.span_tokens

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Finds the longest cached prefix of a request that holds no blocks, and counts the look-up."""
        computed = self.find_longest_cache_hit(request)
        self._count(request, computed)
        return computed

    def admit(  # noqa: PLR0913 - the reference's own parameters
        self,
        request: Request,
        max_new_tokens: int,
        num_lookahead_tokens: int = 0,
        *,
        num_encoder_tokens: int = 0,
        delay_cache_blocks: bool = False,
        options: AllocationOptions = DEFAULT_OPTIONS,
        sequence: ids.StepNumber,
    ) -> Admission | None:
        """Looks up and allocates at once for a request that holds no blocks.

        Makes room for as many of the tokens left as `max_new_tokens` (at least 1) allows. The look-up is counted only
        if the request is admitted.

        Returns:
            What it got; None if there are too few free blocks, and nothing was changed.
        """
        computed = self.find_longest_cache_hit(request)
        num_new_tokens = min(request.num_tokens - computed.num_tokens, max_new_tokens)
        new = self.allocate_slots(
            request,
            num_new_tokens,
            num_lookahead_tokens,
            computed,
            num_encoder_tokens=num_encoder_tokens,
            delay_cache_blocks=delay_cache_blocks,
            options=options,
            sequence=sequence,
        )
        if new is None:
            return None
        self._count(request, computed)
        return Admission(computed, num_new_tokens, new)

    def is_still_cached(self, request: Request, computed: ComputedBlocks) -> bool:
        """Whether what a look-up promised the request is still all there."""
        return all(
            manager.is_still_cached(promised, request)
            for manager, promised in zip(self._managers, computed.block_ids, strict=True)
        )

    def check_computed_blocks(self, where: Callable[[int], str], block_ids: Sequence[Sequence[BlockId]]) -> int:
        """Checks that blocks are of the form of a hit: equally long in all groups, null where none is needed.

        Args:
            where: Names the input of a group, for the error.
            block_ids: The blocks, group by group.

        Returns:
            Tokens that the hit covers.

        Raises:
            InvalidArgumentError: They are not.
        """
        length = len(block_ids[0]) * self._managers[0].span_tokens
        for manager, promised in zip(self._managers, block_ids, strict=True):
            i = manager.group_id
            if len(promised) * manager.span_tokens != length:
                raise InvalidArgumentError(
                    where(i),
                    f"{len(promised)} blocks of {manager.span_tokens} tokens, group 0 covers {length} tokens",
                )
            nulls = manager.num_skipped_blocks(length)
            if any(promised[:nulls]) or not all(promised[nulls:]):
                raise InvalidArgumentError(
                    where(i), f"a hit of {length} tokens has {nulls} null blocks in this group, all of them first"
                )
        return length

    def can_reject(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether all blocks that are looked at after so many tokens are still held, behind no window."""
        return all(
            table.num_skipped <= manager.num_skipped_blocks(num_computed_tokens)
            for manager, table in zip(self._managers, request.tables, strict=True)
        )

    def allocate_slots(  # noqa: PLR0913 - the reference's own parameters
        self,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        computed: ComputedBlocks | None = None,
        *,
        num_encoder_tokens: int = 0,
        delay_cache_blocks: bool = False,
        options: AllocationOptions = DEFAULT_OPTIONS,
        sequence: ids.StepNumber,
    ) -> tuple[list[BlockId], ...] | None:
        """Gives a request room for more tokens, and caches the blocks that become full.

        Args:
            request: The request; its num_computed_tokens move past the hit, external and the new tokens.
            num_new_tokens: Tokens to make room for, at least 1; or 0, if there are external ones.
            num_lookahead_tokens: Tokens beyond these to keep room for; never past max_model_len.
            computed: A hit that is still all there, for a request that holds no blocks.
            num_encoder_tokens: Tokens that the encoder puts out, in the call that makes room for them.
            delay_cache_blocks: Leaves full blocks uncached until `cache`.
            options: On what terms.
            sequence: The session's change, whose execution fills the slots.

        Returns:
            The new blocks, group by group; None if there are too few that the session may be given: then nothing was
            changed, but that blocks which nothing looks at any more were freed.
        """
        if computed is None and options is DEFAULT_OPTIONS and not num_encoder_tokens:
            end_tokens = request.num_computed_tokens + num_new_tokens
            if end_tokens + num_lookahead_tokens <= request.credit_tokens:
                request.num_computed_tokens = end_tokens
                request.filling_sequence = sequence
                self.activity.allocations += 1
                return self._slot_allocator.no_blocks
        num_computed = request.num_computed_tokens + (computed.num_tokens if computed else 0)
        num_computed += options.num_external_tokens
        num_slots = num_computed + num_new_tokens + num_lookahead_tokens
        if num_slots > self.config.max_model_len:  # noqa: PLR1730 - min() takes longer
            num_slots = self.config.max_model_len
        new = self._make_room(request, computed, num_computed, num_slots, num_encoder_tokens, options)
        if new is None:
            self.activity.refusals += 1
            return None
        self.activity.allocations += 1
        if request.has_uncounted_lookup:
            self._count(request, computed or ComputedBlocks(self._no_hit, 0))
            request.has_uncounted_lookup = False
        request.num_computed_tokens = num_computed + num_new_tokens
        request.filling_sequence = sequence
        if self.config.enable_caching and not delay_cache_blocks:
            self.cache_blocks(request, request.num_computed_tokens, sequence=sequence)
        request.credit_tokens = self.credit_tokens(request)
        return new

    def _make_room(  # noqa: PLR0913, PLR0917 - what decides an allocation
        self,
        request: Request,
        computed: ComputedBlocks | None,
        num_computed: int,
        num_slots: int,
        num_encoder_tokens: int,
        options: AllocationOptions,
    ) -> tuple[list[BlockId], ...] | None:
        """Gives a request a hit, and the blocks that it lacks for `num_slots` tokens, of which so many are computed."""
        has_quota = self.quotas.applies_to(request.holding)
        is_usual = not (computed or has_quota) and options is DEFAULT_OPTIONS
        hit = self._no_hit if is_usual else self._hit(computed, options, num_computed)
        if options.full_sequence_must_fit and not self._slot_allocator.fits_whole(
            request, hit, num_encoder_tokens, options
        ):
            return None
        for manager in self._windowed:
            skipped = manager.remove_skipped_blocks(
                request.tables[manager.group_id], num_computed - options.num_in_flight_tokens
            )
            if has_quota and skipped:
                self.quotas.record_lost(request.holding, skipped)
        if is_usual:
            return self._slot_allocator.take(request, num_slots, num_encoder_tokens)
        num_before = num_computed if options.num_external_tokens else 0
        new = self._slot_allocator.take_with_options(request, hit, num_before, num_slots, num_encoder_tokens, options)
        if new is not None and computed and computed.shared_prefix_boundary_tokens is not None:
            request.shared_prefix_boundary_tokens = computed.shared_prefix_boundary_tokens
        return new

    def _hit(
        self, computed: ComputedBlocks | None, options: AllocationOptions, num_computed_tokens: int
    ) -> tuple[Sequence[BlockId], ...]:
        """What a request gets of a hit: external tokens after it move windows on."""
        hit = computed.block_ids if computed else self._no_hit
        if not options.num_external_tokens:
            return hit
        skipped = [manager.num_skipped_blocks(num_computed_tokens) for manager in self._managers]
        return tuple([NULL_BLOCK] * count + list(blocks[count:]) for blocks, count in zip(hit, skipped, strict=True))

    def credit_tokens(self, request: Request) -> int:
        """Up to how many computed tokens a request can go without a change of the pool: see `credit`."""
        credit_tokens, tables = self.config.max_model_len, request.tables
        for room in self._credits:
            table = tables[room.group_id]
            bound_tokens = room.num_tokens(len(table.block_ids), table.num_cached, table.num_skipped)
            if bound_tokens < credit_tokens:  # noqa: PLR1730 - min() takes longer than all else here
                credit_tokens = bound_tokens
        return credit_tokens

    def max_tokens_on_credit(self, request: Request) -> int:
        """Up to how many computed tokens a request may have gone without asking, when it tells so.

        Where it fills blocks so, that is all of its blocks: see `filled`.
        """
        if not self._fills_on_credit:
            return request.credit_tokens
        return min(len(request.tables[0].block_ids) * self.hash_block_size, self.config.max_model_len)

    def cache_blocks(self, request: Request, num_computed_tokens: int, *, sequence: ids.StepNumber) -> None:
        """Caches the request's full blocks among its first `num_computed_tokens` tokens, never past those known."""
        num_tokens = request.num_tokens
        if num_computed_tokens < num_tokens:  # noqa: PLR1730 - as above
            num_tokens = num_computed_tokens
        for manager in self._managers:
            if request.tables[manager.group_id].num_cached < num_tokens // manager.span_tokens:
                manager.cache_blocks(request, num_tokens, sequence)

    def free(self, request: Request) -> None:
        """Frees the request's blocks, the last first; the caller forgets it or admits it again from the start."""
        has_quota = self.quotas.applies_to(request.holding)
        for manager, table in zip(self._managers, request.tables, strict=True):
            freed = manager.free(table)
            if has_quota:
                self.quotas.record_lost(request.holding, freed[::-1])
        request.num_computed_tokens = request.credit_tokens = 0

    def preempt(self, request: Request) -> None:
        """Frees the request's blocks, and counts that they were taken back, if it held any."""
        if request.holds_blocks:
            request.num_preemptions += 1
            self.num_preemptions += 1
        self.free(request)

    def reset_prefix_cache(self) -> bool:
        """Forgets all hashes if no request holds a block and there are no sinks; returns whether it did."""
        if not self.blocks.reset_prefix_cache():
            return False
        self.stats.resets += 1
        self.recent_hit_rate.reset()
        return True

    def get_num_common_prefix_blocks(self, request: Request, running: Iterable[Request]) -> tuple[int, ...]:
        """Leading blocks, group by group, that the request has in common with all `running` requests.

        Without caching nothing is shared, and 0 is told even of a request that runs alone.
        """
        if not self.config.enable_caching:
            return (0,) * len(self._managers)
        others = [other for other in running if other is not request]
        return tuple(
            manager.get_num_common_prefix_blocks(table, (other.tables[manager.group_id] for other in others))
            for manager, table in zip(self._managers, request.tables, strict=True)
        )

    def evict_unpublished(self, session_number: SessionNumber) -> None:
        """Forgets what a session that has ended had cached and never said to be computed."""
        self.blocks.evict_blocks(self.blocks.prefix_map.unpublished_blocks(session_number))

    def renumber_session(self, session_number: SessionNumber, new: SessionNumber) -> None:
        """Gives what a session had cached and never said to be computed to the process that drives it now.

        That can compute again what a request holds. The rest is forgotten: nobody would know whether it was computed.
        """
        blocks = self.blocks
        blocks.evict_blocks([b for b in blocks.prefix_map.unpublished_blocks(session_number) if not blocks.ref_cnt(b)])
        blocks.prefix_map.renumber_session(session_number, new)

    def withdraw_unpublished(self, request: Request, launched: ids.StepNumber, *, reports_execution: bool) -> None:
        """Keeps from all other sessions what a request had cached and was not said to be computed. O(its blocks).

        Args:
            request: About to be freed or preempted.
            launched: What changes of its session up to this one fill will be computed: that stays as it is.
            reports_execution: Its session says what was computed, so that it would not find this either. A session that
                never did so goes on finding it, as a scheduler does that has its blocks to itself.
        """
        prefix_map = self.blocks.prefix_map
        if not prefix_map.has_unpublished(request.session_number):
            return
        pending = prefix_map.pending()
        found = [b for table in request.tables for b in table.held_block_ids if pending.get(b, launched) > launched]
        if reports_execution or launched:
            self.blocks.evict_blocks(found)
        else:
            prefix_map.hide(request.session_number, found)

    def _count(self, request: Request, computed: ComputedBlocks) -> None:
        if not self.config.enable_caching:
            return
        stats = self.stats
        if request.num_preemptions:
            stats.preempted_requests += 1
            stats.preempted_queries_tokens += request.num_tokens
            stats.preempted_hits_tokens += computed.num_tokens
        else:
            stats.requests += 1
            stats.queries_tokens += request.num_tokens
            stats.hits_tokens += computed.num_tokens
            self.recent_hit_rate.observe(request.num_tokens, computed.num_tokens)
        stats.shared_hits_tokens += computed.num_shared_tokens
