"""The KV cache manager of a pool, for the requests of any number of sessions.

It returns the same block ids as vLLM's KV cache manager.

1. Every method is all or nothing. Too few free blocks is a result (None), not an error. Even then, blocks behind a
   window are freed.
2. A request's blocks are changed only through its session. The blocks themselves can be shared, read-only.
3. A block that a request holds never loses its contents: only free blocks are taken.
4. A hit never covers a request's last token, because its logits must be computed, nor the last tokens that only the
   hashes of blocks before them cover.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from kvpool.core import ids
from kvpool.core.block_lifetimes import BlockLifetimes
from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.group_manager import GroupManager
from kvpool.core.blocks.host_tier import copier
from kvpool.core.blocks.integrity import check_blocks, uses_by, waiting_for_steps
from kvpool.core.blocks.prefix_search import ComputedBlocks, PrefixSearch, SearchEnd
from kvpool.core.blocks.quota import Quotas
from kvpool.core.blocks.slot_allocator import SlotAllocator
from kvpool.core.blocks.state_manager import StateManager
from kvpool.core.blocks.state_readers import StateReaders
from kvpool.core.blocks.steps_in_flight import StepsInFlight
from kvpool.core.errors import InvalidArgumentError, UnavailableError
from kvpool.core.hit_curve import HitCurve
from kvpool.core.ids import MAX_BLOCKS, MAX_TOKENS, BlockId, GroupId, MapId, Scope, SessionNumber
from kvpool.core.sessions.quarantine import Quarantine
from kvpool.core.sessions.request import BlockTable, Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import allocation_spec, has_gaps, num_draft_blocks
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.statistics import ActivityCounters, PrefixCacheStats, RecentHitRate
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions

SUSPENDED_RETRY_SECONDS: Final = 0.5
_RESERVE_FLOOR_SHARE: Final = 16
"""The part of a pool's blocks that no reserve takes, as a divisor."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Result of an admission.

    Attributes:
        computed: The hit, whose blocks the request now holds.
        num_new_tokens: Tokens beyond the hit that have slots.
        new_blocks: The newly allocated blocks, group by group.
    """

    computed: ComputedBlocks
    num_new_tokens: int
    new_blocks: tuple[Sequence[BlockId], ...]


class KVCacheManager:
    """The blocks of one pool, and the managers of its groups.

    Elsewhere in this code, `pool` is an object of this class. Its `blocks` are what vLLM calls the block pool.

    Attributes:
        config: Configuration that the pool was declared with; its none_hash is drawn.
        owner: Name of the token that declared the pool, or that its first rank presented; empty for none.
        hash_block_size: `config.hash_block_size`, computed once.
        hash_size_bytes: Length of a hash; 0 without caching.
        epoch: Increases whenever the contents of blocks can no longer be trusted.
        blocks: The blocks.
        plain_manager: Manager of the only group, if it keeps its blocks, has a slot for each token, makes no events and
            caches full blocks at once.
        gives_credit: Whether sessions without slots in reserve may allocate on credit. Not in pools with states: hits
            of a state wait for the steps that read it (`StateReaders`) as in vLLM, so the service must know each step.
        reserves_slots: Whether sessions may hold slots in reserve. Not where the states after drafts move.
        state_managers: Managers of the groups that keep only the states at the ends of steps.
        state_readers: States that steps read; `record` each change of a request's tokens or blocks there, after it.
        quotas: Minimum and maximum numbers of blocks of the sessions.
        in_flight: Blocks that steps in flight may use although their session has freed them.
        stats: Counters of look-ups.
        recent_hit_rate: Hit rate over the most recent look-ups.
        num_preemptions: Number of preemptions.
        activity: Counters of the pool's activity.
        sessions: The open sessions by number, ascending; maintained by the code that opens them.
        quarantine: Ended sessions that still hold their blocks; maintained by the code that ends them.
        ranks_fence: Whether every rank of the pool reports when no step of an ended session is in flight.
        block_lifetimes: Sampled lifetimes of blocks; None if lifetimes are not sampled.
        hit_curve: Estimated hits of smaller and larger pools; None if the model does not apply to the pool.
        memory_id: Identity of the memory that holds the pool's tensors, see `memory_identity`; empty if unknown.
        is_suspended: Whether allocation is stopped because a rank is missing.
    """

    def __init__(
        self,
        config: PoolConfig,
        epoch: int = 1,
        block_lifetimes: BlockLifetimes | None = None,
        owner: str = "",
        sample_key: bytes = b"",
    ) -> None:
        self.owner = owner
        self._sample_key = sample_key
        self.stats = PrefixCacheStats()
        self.hit_curve: HitCurve | None = None
        self.recent_hit_rate = RecentHitRate()
        self.num_preemptions = 0
        self.activity = ActivityCounters()
        self.sessions: dict[SessionNumber, Session] = {}
        self.quarantine = Quarantine()
        self.ranks_fence = False
        self.block_lifetimes = block_lifetimes
        self.memory_id = ""
        self.is_suspended = False
        self._create_blocks(config, epoch)

    def _create_blocks(self, config: PoolConfig, epoch: int) -> None:
        config.check()
        blocks = BlockPool(config, self.block_lifetimes)
        self._managers = [
            (StateManager if has_gaps(allocation_spec(group.spec)) else GroupManager)(config, GroupId(i), blocks)
            for i, group in enumerate(config.groups)
        ]
        self.blocks = blocks  # nothing was changed before, if memory is short
        self.config = config
        before, self.hit_curve = self.hit_curve, HitCurve.for_pool(config, self._sample_key)
        if self.hit_curve:
            self.hit_curve.continue_from(before)
        self.hash_block_size = config.hash_block_size
        self.hash_size_bytes = config.hash_scheme.hash_size_bytes if config.enable_caching else 0
        self.epoch = epoch
        self._caching_managers = [manager for manager in self._managers if manager.spec.is_cached]
        num_extra = 3 if config.partial_hits else 2
        self._max_extra_blocks = sum(
            num_extra + num_draft_blocks(manager.spec) + manager.spec.num_replayed_tokens // manager.span_tokens
            for manager in self._managers
        )
        first = self._managers[0]
        is_plain = len(self._managers) == 1 and first.spec.keeps_all and not first.counts_encoder_tokens
        is_plain = is_plain and not (config.makes_events or config.num_reprefillable_tokens)
        self.plain_manager = first if is_plain else None
        self.state_managers = [manager for manager in self._managers if isinstance(manager, StateManager)]
        self.gives_credit = not self.state_managers
        self._max_credit_tokens = 0 if config.partial_hits else config.max_model_len  # a copy must be known
        moves_blocks = any(num_draft_blocks(manager.spec) for manager in self.state_managers)
        self.reserves_slots = not (config.partial_hits or moves_blocks)
        self.state_readers = StateReaders(self.state_managers)
        self.quotas = Quotas(self.blocks, self.blocks.num_free_blocks, self.sessions)
        self._num_unhit_tokens = max(config.hash_scheme.num_lookahead_tokens, 1)  # of a request: see rule 4
        self.in_flight = StepsInFlight(self.blocks, self.quotas)
        self._slot_allocator = SlotAllocator(config, self.blocks, self._managers, self.quotas, self.in_flight)
        self._search = PrefixSearch(
            self._managers,
            self.blocks.prefix_map,
            config.hit_alignment,
            finds_shared_prefix_boundary=(config.retention_tokens is not None or bool(self.state_managers))
            and config.enable_caching,
        )

    def __repr__(self) -> str:
        used = self.blocks.num_blocks - 1 - self.blocks.num_free_blocks
        cached = len(self.blocks.prefix_map)
        return f"<Pool {self.config.name!r}: {self.blocks.num_blocks} blocks, {used} used, {cached} cached>"

    def begin_epoch(self, config: PoolConfig, epoch: int) -> None:
        """Starts an epoch with empty blocks and an empty quarantine. Counters continue.

        The caller ends the sessions, before or after.

        Raises:
            InvalidArgumentError: The configuration is out of range; nothing was changed.
            MemoryError: There is too little memory; nothing was changed.
        """
        before = self.blocks
        self._create_blocks(config, epoch)
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
        """Blocks reserved for attention sinks, group by group."""
        return tuple(block_id for manager in self._managers for block_id in manager.sink_blocks)

    def open_scope(self, scope: Scope) -> MapId:
        """See `PrefixMap.open_scope`. Evicts the surplus of earlier weights versions. O(sessions + evicted blocks)."""
        in_use = {scope, *(session.scope for session in self.sessions.values())}
        self.blocks.evict_blocks(self.blocks.prefix_map.surplus_blocks(in_use))
        return self.blocks.prefix_map.open_scope(scope, in_use)

    def set_weights_version(self, session: Session, weights_version: str) -> None:
        """Has a session look up and cache under another weights version from now on.

        Blocks that it has not reported as executed are evicted: their steps may run with either weights. Requests that
        hold blocks keep them, and cache no further ones, because these continue from contents of the version before.
        O(sessions + its requests + evicted blocks).
        """
        session.before_change(session.requests.values())
        self.evict_pending(session.session_number)
        session.weights_version = weights_version
        session.first_map = self.open_scope(session.scope)
        for request in session.requests.values():
            request.first_map = session.first_map
            if request.holds_blocks:
                for table in request.tables:
                    table.stop_caching()

    def set_reserve_floor(self) -> None:
        """Records how many blocks a reserve leaves. O(sessions).

        One of each group for each running request, and for one more; and a share of the pool for admissions.
        """
        num_running = sum([session.num_running for session in self.sessions.values()])
        share = self.blocks.num_blocks // _RESERVE_FLOOR_SHARE
        self._slot_allocator.reserve_floor_blocks = (num_running + 1) * len(self._managers) + share

    @property
    def reserve_floor_blocks(self) -> int:
        """Blocks that a reserve leaves, as of the step that is applied."""
        return self._slot_allocator.reserve_floor_blocks

    def max_new_blocks(self, num_tokens: int, num_requests: int) -> int:
        """Upper bound of the blocks that requests take, together, for slots of `num_tokens` further tokens."""
        return (
            sum([num_tokens // manager.span_tokens for manager in self._managers])
            + num_requests * self._max_extra_blocks
        )

    def new_tables(self) -> tuple[BlockTable, ...]:
        """Returns the empty block tables of a new request."""
        return tuple(BlockTable() for _ in self._managers)

    def find_longest_cache_hit(self, request: Request) -> ComputedBlocks:
        """Finds the longest cached prefix of a request that holds no blocks, without counting the look-up."""
        if not self.config.enable_caching:
            return ComputedBlocks(self._slot_allocator.no_blocks, 0)
        return self._search.find(request, max(request.num_tokens - self._num_unhit_tokens, 0))

    def search_ends(self, request: Request) -> list[SearchEnd]:
        """Searches the prefix of a request that holds no blocks in each group alone."""
        return self._search.ends(request, max(request.num_tokens - self._num_unhit_tokens, 0))

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """Finds the longest cached prefix of a request that holds no blocks, and counts the look-up at once."""
        computed = self.find_longest_cache_hit(request)
        self._count_lookup(request, computed)
        return computed

    def admit(  # noqa: PLR0913 - vLLM's parameters
        self,
        request: Request,
        max_new_tokens: int,
        num_lookahead_tokens: int = 0,
        *,
        budget_tokens: int = MAX_TOKENS,
        max_promoted_blocks: int = 0,
        num_encoder_tokens: int = 0,
        delay_cache_blocks: bool = False,
        options: AllocationOptions = DEFAULT_OPTIONS,
        sequence: ids.StepNumber,
    ) -> Admission | None:
        """Looks up and allocates in one call, for a request that holds no blocks.

        Allocates slots for the tokens after the hit, for at most `max_new_tokens` and `budget_tokens` (both at least 1)
        of them. The budget cuts where a state can be found, if it reaches that far. Allocates none if the hit has more
        than `max_promoted_blocks` in host memory, unless this is 0. The look-up is counted only if the request is
        admitted.

        Returns:
            The admission; None if there are too few free blocks, and nothing was changed.
        """
        computed = self.find_longest_cache_hit(request)
        num_new_tokens = min(request.num_tokens - computed.num_tokens, max_new_tokens)
        if num_new_tokens > budget_tokens:
            num_new_tokens = budget_tokens
            past_end = (computed.num_tokens + budget_tokens) % self.config.block_alignment
            if self.state_managers and past_end < budget_tokens:
                num_new_tokens -= past_end
        host = self.blocks.host
        if host and max_promoted_blocks and sum(map(len, map(host.places, computed.block_ids))) > max_promoted_blocks:
            num_new_tokens = num_lookahead_tokens = 0
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
        self._count_lookup(request, computed)
        return Admission(self.promoted(request, computed), num_new_tokens, new)

    def promoted(self, request: Request, computed: ComputedBlocks) -> ComputedBlocks:
        """A hit as the request now holds it: with the blocks that those of host memory are copied to."""
        host = self.blocks.host
        if not host or not any(map(host.places, computed.block_ids)):
            return computed
        blocks = [
            [table.block_ids[i] if host.contains(block_id) else block_id for i, block_id in enumerate(hit)]
            for table, hit in zip(request.tables, computed.block_ids, strict=True)
        ]
        return replace(computed, block_ids=tuple(blocks), num_host_tokens=self.num_host_tokens(computed))

    def is_still_cached(self, request: Request, computed: ComputedBlocks) -> bool:
        """Whether all blocks of an earlier hit are still cached and visible to the request."""
        return all(
            manager.is_still_cached(computed.block_ids[manager.group_id], request, computed.num_tokens)
            for manager in self._caching_managers
        )

    def check_computed_blocks(
        self, where: Callable[[int], str], block_ids: Sequence[Sequence[BlockId]], num_found_tokens: int = 0
    ) -> int:
        """Checks that blocks have the form of a hit: the same length in all groups, null where none is needed.

        Args:
            where: Returns the name of a group's input, for the error.
            block_ids: The blocks, group by group.
            num_found_tokens: Length of the hit that the request's most recent look-up found.

        Returns:
            Number of tokens that the hit covers: with partial hits that of the look-up, else those of the blocks.

        Raises:
            InvalidArgumentError: The blocks do not have that form.
        """
        first = next((manager for manager in self._managers if manager.spec.is_cached), self._managers[0])
        length = len(block_ids[first.group_id]) * first.span_tokens
        if self.config.partial_hits:
            length = num_found_tokens
        for manager, group_block_ids in zip(self._managers, block_ids, strict=True):
            i = manager.group_id
            if not manager.spec.is_cached:
                nulls = manager.num_skipped_blocks(length)
                if len(group_block_ids) != nulls or any(group_block_ids):
                    raise InvalidArgumentError(where(i), f"a hit of {length} tokens has {nulls} null blocks here")
                continue
            if len(group_block_ids) != -(-length // manager.span_tokens) or length % manager.hit_span_tokens:
                raise InvalidArgumentError(
                    where(i),
                    f"{len(group_block_ids)} blocks of {manager.span_tokens} tokens, group {first.group_id} covers"
                    f" {length} tokens",
                )
            nulls = manager.num_unread_blocks(length)
            if any(group_block_ids[:nulls]) or not all(group_block_ids[nulls:]):
                raise InvalidArgumentError(
                    where(i), f"a hit of {length} tokens has {nulls} null blocks in this group, all of them first"
                )
        return length

    def can_reject(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request can go back to this number of computed tokens.

        No block that it needs then was freed, and none that it writes again has a cached state.
        """
        return all(
            manager.can_go_back(table, num_computed_tokens)
            for manager, table in zip(self._managers, request.tables, strict=True)
        )

    def allocate_slots(  # noqa: C901, PLR0913 - vLLM's parameters, and a branch per kind of pool
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
    ) -> tuple[Sequence[BlockId], ...] | None:
        """Allocates slots for a request's next tokens, and caches the blocks that become full.

        Args:
            request: The request. Its num_computed_tokens grows by the hit, the external and the new tokens.
            num_new_tokens: Tokens that need a slot, at least 1; 0 is allowed if there is a hit or are external tokens.
            num_lookahead_tokens: Further tokens that need a slot; never past max_model_len.
            computed: A hit whose blocks are all still cached, for a request that holds no blocks.
            num_encoder_tokens: Tokens that the encoder produces, in the call that allocates their slots.
            delay_cache_blocks: Leaves full blocks uncached until `cache_blocks`.
            options: Options of the allocation.
            sequence: Number of the session's step whose execution fills the slots.

        Returns:
            The new blocks, group by group. None if too few are available to the session; then nothing was changed,
            except that blocks behind a window were freed.
        """
        is_plain = computed is None and options is DEFAULT_OPTIONS and not num_encoder_tokens
        if is_plain and not request.reserve_tokens:  # else credit goes beyond what a block fills
            end_tokens = request.num_computed_tokens + num_new_tokens
            if end_tokens + num_lookahead_tokens <= request.credit_tokens:  # changes nothing but the request
                request.num_computed_tokens, request.filling_sequence = end_tokens, sequence
                self.activity.allocations += 1
                if self.state_managers:
                    self.state_readers.record(request)
                return self._slot_allocator.no_blocks
        num_computed = request.num_computed_tokens + (computed.num_tokens if computed else 0)
        num_computed += options.num_external_tokens
        num_slots = num_computed + num_new_tokens + num_lookahead_tokens
        if num_slots > self.config.max_model_len:  # noqa: PLR1730 - min() is slower
            num_slots = self.config.max_model_len
        new = None
        if computed is None or not self._is_too_fresh(request, computed, sequence):
            new = self._slot_allocator.allocate(
                request,
                computed,
                num_computed,
                num_computed + num_new_tokens,
                num_slots,
                num_encoder_tokens,
                options,
                sequence,
            )
        if new is None:
            self.activity.refusals += 1
            self.state_readers.record(request)  # states behind the newest one were freed
            return None
        self.activity.allocations += 1
        if computed and computed.shared_prefix_boundary_tokens is not None:
            request.shared_prefix_boundary_tokens = computed.shared_prefix_boundary_tokens
        if request.has_uncounted_lookup:
            hit = computed or ComputedBlocks(self._slot_allocator.no_blocks, 0)
            # Counted here, as a hit that a step names has none.
            num_shared = self._search.num_shared_tokens(request, hit.block_ids, hit.num_tokens)
            self._count_lookup(request, replace(hit, num_shared_tokens=num_shared, miss=request.miss))
            request.has_uncounted_lookup = False
        request.num_computed_tokens = num_computed + num_new_tokens
        request.filling_sequence = sequence
        for states in self.state_managers:
            states.pass_boundaries(request, num_computed, request.num_computed_tokens)
        if self.state_managers:
            self.state_readers.record(request)
        if self.config.enable_caching and not delay_cache_blocks:
            self.cache_blocks(request, request.num_computed_tokens, sequence=sequence, start_tokens=num_computed)
        request.credit_tokens = self.credit_tokens(request)
        return new

    def take_refused_for_ever(self) -> bool:
        """Whether the most recent refusal was for more blocks than the session can ever hold. Forgets it."""
        found, self._slot_allocator.refused_for_ever = self._slot_allocator.refused_for_ever, False
        return found

    def _is_too_fresh(self, request: Request, computed: ComputedBlocks, sequence: ids.StepNumber) -> bool:
        """Whether a hit ends with a state that a recent step fills or, at the end of a prompt, reads.

        Recent are step `sequence` and those that are not certain to run before it. A step copies the states that it
        continues from before it runs. So it cannot continue from a state that its own run produces for another request.
        The other case needs no wait, but vLLM 0.32 waits, too.
        """
        if not self.state_managers or not computed.num_tokens:
            return False
        writer = request.session_number
        session = self.sessions.get(writer)  # none for a request of a program that uses this manager alone
        launched = max(session.launched_sequence, session.executed_sequence) if session else None
        launched = launched or ids.StepNumber(sequence - 1)
        is_read_after = self.state_readers.is_read_after
        return any(
            self.blocks.prefix_map.is_filled_after(manager.map_id(request), blocks[-1], launched, writer)
            or (session is not None and is_read_after(manager, request, len(blocks), launched))
            for manager in self.state_managers
            for blocks in [computed.block_ids[manager.group_id]]
        )

    def credit_tokens(self, request: Request) -> int:
        """Number of computed tokens that a request can reach without a change of the pool.

        Most decodes take a slot in a block that the request already holds, and change nothing else. The session counts
        them itself, and reports them with the next operation on the request. With slots in reserve, that operation also
        caches the blocks that they filled, and frees those that they left behind a window.
        """
        credit_tokens = self._max_credit_tokens
        for manager, table in zip(self._managers, request.tables, strict=True):
            bound_tokens = manager.slot_tokens(table) if request.reserve_tokens else manager.credit_tokens(table)
            if bound_tokens < credit_tokens:  # noqa: PLR1730 - min() takes longer than the rest of the loop
                credit_tokens = bound_tokens
        return credit_tokens

    def num_reserve_blocks(self, request: Request) -> int:
        """Number of blocks, of all groups, that a request holds after those of its computed tokens."""
        tables, num_tokens = request.tables, request.num_computed_tokens
        return sum(each.num_surplus_blocks(tables[each.group_id], num_tokens) for each in self._managers)

    def cache_blocks(
        self,
        request: Request,
        num_computed_tokens: int,
        *,
        sequence: ids.StepNumber,
        start_tokens: int | None = None,
    ) -> None:
        """Caches the full blocks of the request's first `num_computed_tokens` tokens, as far as tokens are known.

        `start_tokens` are those before the step that allocates their slots; None if it was an earlier step.
        """
        num_tokens = request.num_tokens
        if num_computed_tokens < num_tokens:  # noqa: PLR1730 - min() is slower
            num_tokens = num_computed_tokens
        for manager in self._caching_managers:
            if request.tables[manager.group_id].num_cached < num_tokens // manager.span_tokens:
                manager.cache_blocks(request, num_tokens, sequence)
            if manager.caches_tails:
                manager.cache_tail(request, num_tokens, start_tokens, sequence)

    def reserve(
        self, request: Request, num_tokens: int, *, may_take: bool, num_in_flight_tokens: int, sequence: ids.StepNumber
    ) -> tuple[Sequence[BlockId], ...]:
        """Does what a request's decodes on credit have left to do, and changes its reserve.

        Args:
            request: A request that holds blocks.
            num_tokens: Tokens after the computed ones for which it should hold slots. Blocks after these are freed.
            may_take: Whether it may take blocks.
            num_in_flight_tokens: See `AllocationOptions`.
            sequence: Number of the step.

        Returns:
            The new blocks, group by group; none if too few are left, see `SlotAllocator`.
        """
        num_computed = request.num_computed_tokens
        if self.config.enable_caching:
            self.cache_blocks(request, num_computed, sequence=sequence)  # before they are freed behind a window
        self._slot_allocator.free_behind_windows(request, num_computed - num_in_flight_tokens)
        self._slot_allocator.give_back(request, num_computed + num_tokens)
        new = self._slot_allocator.no_blocks
        if may_take:
            new = self._slot_allocator.reserve(request, num_computed + num_tokens)
        request.credit_tokens = self.credit_tokens(request)
        self.state_readers.record(request)
        return new

    def cache_prompt_states(self, request: Request, start_tokens: int, sequence: ids.StepNumber) -> None:
        """Caches the states at the start of a step that extends a prompt, if the longer prompt can be resumed there.

        They were not kept when the step before ended, because the prompt ended elsewhere.
        """
        for manager in self.state_managers if self.config.enable_caching else ():
            if not manager.caches_tails:  # otherwise `cache_blocks` does
                manager.cache_tail_state(request, start_tokens, sequence)

    def release_copies(self, session: Session, launched: ids.StepNumber, *, reports_launched: bool = True) -> None:
        """Releases the blocks of the copies that a session's steps up to `launched` make.

        They are freed group by group, as vLLM does when the scheduling round of their step ends. The steps of a session
        that reports neither launched nor executed ones have been executed.
        """
        if self.blocks.host and not (reports_launched or session.reports_execution):
            self.in_flight.release(session.session_number, session.sequence)
        num_due = bisect_right(session.copies, launched, key=attrgetter("sequence"))
        if not num_due:
            return
        due = sorted(session.copies[:num_due], key=attrgetter("group_id"))
        del session.copies[:num_due]
        blocks = [(each.group_id, block_id) for each in due for block_id in each.held_block_ids]
        if self.in_flight.is_keeping:
            for group_id, block_id in blocks:
                self.in_flight.keep_shared(group_id, [block_id])
        self.blocks.free_copied(blocks)
        if self.quotas.applies_to(session.holding):
            self.quotas.record_lost(session.holding, [block_id for _, block_id in blocks])

    def free(self, request: Request) -> None:
        """Frees the request's blocks, last block first. The caller removes the request or admits it again."""
        has_quota = self.quotas.applies_to(request.holding)
        if request.sampled and self.hit_curve and request.holds_blocks:
            self.hit_curve.record_freed(request.first_map, request.sampled)
        for manager, table in zip(self._managers, request.tables, strict=True):
            if self.in_flight.is_keeping:
                self.in_flight.keep_shared(manager.group_id, table.held_block_ids)
            freed = manager.free(table)
            if has_quota:
                self.quotas.record_lost(request.holding, freed[::-1])
        request.num_computed_tokens = request.credit_tokens = 0
        self.state_readers.record(request)

    def preempt(self, request: Request) -> None:
        """Frees the request's blocks, and counts a preemption if the request held any."""
        if request.holds_blocks:
            request.num_preemptions += 1
            self.num_preemptions += 1
        self.free(request)

    def reset_prefix_cache(self) -> bool:
        """Removes all hashes if no request holds a block and there are no sinks; returns whether it did."""
        if not self.blocks.reset_prefix_cache():
            return False
        self.stats.resets += 1
        self.recent_hit_rate.reset()
        if self.hit_curve:
            self.hit_curve.clear()
        return True

    def get_num_common_prefix_blocks(
        self, request: Request, running: Iterable[Request], max_blocks: int = MAX_BLOCKS
    ) -> tuple[int, ...]:
        """Number of leading blocks, group by group, that the request shares with all `running` requests.

        At most `max_blocks` of each group, because a table is compared with all others.
        Without caching no blocks are shared, and the result is 0 even for a request that runs alone.
        """
        if not self.config.enable_caching:
            return (0,) * len(self._managers)
        others = [other for other in running if other is not request]
        return tuple(
            manager.get_num_common_prefix_blocks(
                table, (other.tables[manager.group_id] for other in others), max_blocks
            )
            for manager, table in zip(self._managers, request.tables, strict=True)
        )

    def check_integrity(self, blocks: range | None = None, sessions: Iterable[Session] | None = None) -> None:
        """Checks that the pool agrees with itself; see `check_blocks`.

        Args:
            blocks: The blocks whose reference counts and hashes are checked; None for all.
            sessions: The open sessions; None for those of the pool.

        Raises:
            IntegrityError: An invariant is violated; the message names it.
        """
        sessions = self.sessions.values() if sessions is None else sessions
        uses = uses_by([*sessions, *(each.session for each in self.quarantine)])
        uses += waiting_for_steps(self.in_flight, self.quarantine)
        uses += [(manager.group_id, block_id) for manager in self._managers for block_id in manager.sink_blocks]
        check_blocks(self.blocks, uses, range(1, self.config.num_ids) if blocks is None else blocks)

    def evict_pending(self, session_number: SessionNumber) -> None:
        """Evicts the blocks that a session has cached or copied, and not reported as executed."""
        self.blocks.evict_blocks(self.blocks.prefix_map.pending.of(session_number))
        if self.blocks.host:
            self.blocks.evict_blocks(self.blocks.prefix_map.pending.of(copier(session_number)))

    def withdraw_pending(self, request: Request, launched: ids.StepNumber, *, reports_execution: bool) -> None:
        """Hides a request's cached blocks that were not reported as executed from all other sessions. O(its blocks).

        Args:
            request: A request that is about to be freed or preempted.
            launched: Blocks that steps up to this one fill are certain to be computed, and stay cached.
            reports_execution: Whether the session reports execution. If it does, these blocks are evicted, so that
                the session itself cannot hit them either. If it never did, it can still hit them, as a scheduler does
                that has its blocks to itself.
        """
        prefix_map = self.blocks.prefix_map
        if not prefix_map.pending.has_any(request.session_number):
            return
        pending = prefix_map.pending.steps
        held = [b for table in request.tables for b in table.held_block_ids]
        found = [b for b in held if not -launched <= pending.get(b, launched) <= launched]
        if reports_execution or launched:
            self.blocks.evict_blocks(found)
        else:
            prefix_map.pending.hide(request.session_number, found)

    def num_host_tokens(self, computed: ComputedBlocks) -> int:
        """Tokens of a hit in blocks of host memory, in the group that has most of them there; 0 without host memory."""
        host = self.blocks.host
        if not host:
            return 0
        counts = (
            len(host.places(computed.block_ids[each.group_id])) * each.span_tokens for each in self._caching_managers
        )
        return min(max(counts, default=0), computed.num_tokens)

    def _count_lookup(self, request: Request, computed: ComputedBlocks) -> None:
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
            if request.sampled and self.hit_curve:
                last = None if request.num_tokens % self.hash_block_size else request.hashes[-1]
                self.hit_curve.record_lookup(request.first_map, request.sampled, last)
        stats.shared_hits_tokens += computed.num_shared_tokens
        if self.blocks.host:
            stats.host_hits_tokens += self.num_host_tokens(computed)
        if computed.miss:
            group_id, reason, num_missed_tokens = computed.miss
            self.blocks.group_counters[group_id].count_miss(reason, num_missed_tokens)
