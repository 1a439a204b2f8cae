"""The replacement of vLLM's KV cache manager: the same methods, backed by the service.

Every result equals that of vLLM's own manager, block for block, unless other sessions use the pool. `StepBatcher`
decides which messages are sent, and when.
"""

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any, Final

from vllm.utils.math_utils import cdiv
from vllm.v1.core import kv_cache_utils
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request as EngineRequest
from vllm.v1.request import RequestStatus

from kvpool.client.request import Request
from kvpool.client.results import Answer
from kvpool.client.session import Session
from kvpool.client.vllm.blocks import KVCacheBlocks
from kvpool.client.vllm.connectors import Coordinator, DeferredFrees, UncertainLoads
from kvpool.client.vllm.engine_calls import EngineCalls
from kvpool.client.vllm.events import EventForwarder
from kvpool.client.vllm.promotions import Promotions, max_promoted_blocks
from kvpool.client.vllm.step_batcher import StepBatcher
from kvpool.client.vllm.versions import SPECS
from kvpool.client.vllm.weights import unknown_weights_version
from kvpool.core.errors import check_range
from kvpool.core.ids import NULL_BLOCK
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions

_RUNNING: Final = RequestStatus.RUNNING
_NOT_RUNNING: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class KVCacheManager:
    """The KV cache manager of an engine whose blocks come from a pool.

    Attributes:
        session: The engine's session.
        calls: Sends calls to the session.
        batcher: Predicts the calls of a round, and batches them.
        events: Publishes the pool's events, if the engine publishes events.
        empty_kv_cache_blocks: Represents no blocks.
        block_pool: Frees blocks later.
        loads: Loads of a KV connector; None without one, and if no other engine shares the memory.
        keeps_prefixes: Whether the next reset of the prefix cache leaves it as it is.
    """

    mamba_shared_prefix_checkpoint = False

    def __init__(
        self,
        session: Session,
        scheduler: Any,
        events: EventForwarder | None = None,
        *,
        shares_memory: bool = False,
        background_copy_mib: int = 0,
    ) -> None:
        config = session.config
        self.session = session
        self.events = events
        self.keeps_prefixes = False
        self._shares_memory = shares_memory
        self.enable_caching = config.enable_caching
        self.empty_kv_cache_blocks = KVCacheBlocks([()] * len(config.groups))
        self.prefix_cache_stats = PrefixCacheStats() if scheduler.log_stats else None
        self._has_connector = scheduler.connector is not None
        promotions = Promotions(max_promoted_blocks(scheduler, config, background_copy_mib))
        self.calls = EngineCalls(session, promotions, is_private=not (shares_memory or self._has_connector))
        self.batcher = StepBatcher(self.calls, scheduler)
        specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
        self.coordinator = Coordinator(config.spans_tokens, specs, self.calls.requests)
        self.coordinator.enable_partial_hash_hits = config.partial_hits
        self.block_pool = DeferredFrees()
        self.loads = UncertainLoads(self.calls) if self._has_connector and shares_memory else None
        self._cached_tokens: dict[str, int] = {}  # of requests whose contents a connector loads
        # Preempted requests that steps in flight may write, which the session knows until then: admitted again later.
        self._freed_later: set[str] = set()
        self._span_tokens, self._hit_tokens = config.hash_block_size, config.hit_alignment
        self._lookahead_tokens = config.hash_scheme.num_lookahead_tokens
        self._num_reprefillable = config.num_reprefillable_tokens
        self._zeroed_groups: list[int] = []
        if scheduler.needs_kv_cache_zeroing:
            self._zeroed_groups = [i for i, spec in enumerate(specs) if isinstance(spec, SPECS.AttentionSpec)]
        self._new_ids_to_zero: list[int] = []

    # ---- look-ups

    def get_computed_blocks(self, request: EngineRequest, max_cache_hit_length: None = None) -> tuple[Any, ...]:
        """Looks up the longest cached prefix, or admits the request at once if its calls can be predicted.

        Args:
            request: The request.
            max_cache_hit_length: No limit: vLLM sets one only for features that `check_supported` refuses.

        Returns:
            Blocks and tokens; and the shared prefix boundary, where the scheduler ends a step so that the states there
            are kept. Without such states it is 0: the service knows it.
        """
        del max_cache_hit_length
        self.calls.settle()
        blocks, num_tokens, boundary = self.empty_kv_cache_blocks, 0, 0
        if not request.skip_reading_prefix_cache and request.request_id not in self._freed_later:
            if request.request_id not in self.batcher.admitted:
                self.batcher.admit_waiting(request)
            admitted = self.batcher.admitted.get(request.request_id)
            if admitted is None and self.enable_caching:
                answer = self.batcher.lookup(request)
                num_tokens, boundary = answer.num_hit_tokens, answer.shared_prefix_boundary_tokens
                blocks = KVCacheBlocks(answer.hit_blocks, answer.computed) if num_tokens else blocks
            elif admitted and admitted.ok:
                blocks, num_tokens = KVCacheBlocks(admitted.hit_blocks), admitted.num_hit_tokens
        if self.events and num_tokens:
            self.events.publish_hit(request, blocks.block_ids)
        return blocks, num_tokens, boundary

    def get_computed_blocks_for_connector(
        self, request: EngineRequest, max_cache_hit_length: None = None
    ) -> tuple[Any, ...]:
        """Looks up as `get_computed_blocks`, for connectors that can complete hits of different lengths per group.

        Returns:
            The same, and False: the one group that connectors are supported with has one hit.
        """
        return (*self.get_computed_blocks(request, max_cache_hit_length), False)

    def _looks_up(self, request: EngineRequest) -> bool:
        return self.enable_caching and not request.skip_reading_prefix_cache

    # ---- allocation

    def allocate_slots(  # noqa: PLR0913, PLR0917 - vLLM's own parameters
        self,
        request: EngineRequest,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Allocates slots for new tokens; None if blocks are missing. Parameters are those of vLLM's manager."""
        del skip_zeroing_group_ids
        if request.request_id in self._freed_later:
            return None
        if request.status is _RUNNING:
            grant = self.batcher.take_grant(request, num_new_tokens)
            if grant:
                if grant[0] is None:
                    self._note_refused(request)
                return self._noted(grant[0]) if self._zeroed_groups else grant[0]
        computed = new_computed_blocks.computed if new_computed_blocks else None
        admitted = self.batcher.admitted.get(request.request_id)
        if admitted is not None:
            granted = (admitted.num_hit_tokens, admitted.num_new_tokens)
            if not admitted.ok or granted == (num_new_computed_tokens, num_new_tokens):
                del self.batcher.admitted[request.request_id]
                return self._new_blocks(admitted) if admitted.ok else None
            self.batcher.cancel_admission(request.request_id)
            computed = admitted.computed
        session_request = self.calls.session_request(request)
        watermark = self.batcher.watermark_blocks if has_scheduled_reqs and request.status in _NOT_RUNNING else 0
        options = AllocationOptions(
            num_external_computed_tokens,
            request.num_in_flight_tokens if self.batcher.windowed else 0,
            reserved_blocks,
            watermark,
            full_sequence_must_fit,
        )
        builder = self.calls.builder_for(session_request)
        # A model can return more tokens than it was scheduled for. They count as computed, and have no slots yet.
        num_computed_tokens = min(request.num_computed_tokens, session_request.num_computed_tokens)
        answer = builder.allocate_slots(
            session_request,
            num_new_tokens + request.num_computed_tokens - num_computed_tokens,
            computed=computed,
            num_computed_tokens=num_computed_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            num_encoder_tokens=num_encoder_tokens,
            delay_cache_blocks=delay_cache_blocks,
            options=DEFAULT_OPTIONS if options == DEFAULT_OPTIONS else options,
        )
        self.calls.send()
        if not answer.ok:
            self.batcher.note_refused(request.request_id, answer.outcome)
            self._note_refused(request)
            return None
        self.batcher.tokens_left -= num_new_tokens
        if delay_cache_blocks:
            self._cached_tokens[request.request_id] = num_new_computed_tokens
        else:
            self._cached_tokens.pop(request.request_id, None)
            if self.loads and num_external_computed_tokens:
                self.loads.note(request.request_id, num_new_computed_tokens // self._hit_tokens)
        return self._new_blocks(answer)

    def _note_refused(self, request: EngineRequest) -> None:
        """Records what is cached of a running request. The refused call has sent its newest tokens and cached none.

        vLLM does not preempt such a request while a KV connector may load into freed blocks: it waits for its output.
        """
        if self._has_connector and request.status is _RUNNING:
            num_known_tokens = request.num_computed_tokens - request.num_in_flight_tokens
            self._cached_tokens.setdefault(request.request_id, max(num_known_tokens, 0))

    def _new_blocks(self, answer: Answer) -> KVCacheBlocks | None:
        return self._noted(KVCacheBlocks(answer.new_blocks)) if any(answer.new_blocks) else self.empty_kv_cache_blocks

    def _noted(self, blocks: KVCacheBlocks | None) -> KVCacheBlocks | None:
        """Records new blocks that the engine must zero."""
        if blocks is not None:
            for group_id in self._zeroed_groups:
                self._new_ids_to_zero += blocks.block_ids[group_id]
        return blocks

    # ---- calls without an answer

    def free(self, request: EngineRequest) -> None:
        """Frees the blocks of a preempted or finished request, the last block first."""
        self.calls.promotions.end(request.request_id)
        session_request = self.calls.requests.get(request.request_id)
        if session_request is None:
            return
        if self.loads:
            self.loads.forget(session_request)
        if self._new_ids_to_zero:  # of a request that is preempted in the round that gave it blocks
            freed = {block_id for ids in session_request.block_ids for block_id in ids}
            self._new_ids_to_zero = [each for each in self._new_ids_to_zero if each not in freed]
        # vLLM hashes a preempted session again: the hash of a block can cover a token that its next input has replaced.
        is_hashed_again = self._lookahead_tokens and request.resumable
        if request.status is not _RUNNING or is_hashed_again:
            self.calls.free(session_request)
        elif session_request.declared:
            self.calls.deliver(lambda builder: builder.preempt(session_request), session_request)
        self.batcher.forget(request.request_id)  # only now, as the calls above can raise
        self._cached_tokens.pop(request.request_id, None)

    def pop_blocks_for_free(self, request: EngineRequest) -> list[Callable[[], None]]:
        """Forgets a request whose blocks may still be written by steps in flight.

        Returns:
            What `block_pool.free_blocks` calls later, in the place of blocks. By then the session may be another one.
        """
        self.batcher.forget(request.request_id)
        self._cached_tokens.pop(request.request_id, None)
        session_request = self.calls.requests.pop(request.request_id, None)
        if self.loads and session_request:
            self.loads.forget(session_request)
        if session_request is None or not session_request.declared:
            return []
        self._freed_later.add(request.request_id)
        return [partial(self._free_later, session_request)]

    def _free_later(self, session_request: Request) -> None:
        self._freed_later.discard(session_request.request_id)
        self.calls.free(session_request)

    def cache_blocks(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """Caches the full blocks of the first tokens that are not cached yet."""
        if not self.enable_caching or self.session.reserve_tokens:  # it reports what it has computed, see `reserves`
            return
        session_request = self.calls.requests[request.request_id]
        # Tokens without slots count as computed, see `allocate_slots`.
        num_computed_tokens = min(num_computed_tokens, session_request.num_computed_tokens)
        num_hashed_tokens = session_request.num_tokens - self._lookahead_tokens
        if min(num_computed_tokens, num_hashed_tokens) // self._span_tokens > self._num_cached_blocks(session_request):
            self.calls.builder_for(session_request).cache_blocks(session_request, num_computed_tokens)
            if session_request.request_id in self._cached_tokens:
                self._cached_tokens[session_request.request_id] = num_computed_tokens

    def _num_cached_blocks(self, session_request: Request) -> int:
        """Counts the hash blocks of a request that are or were cached."""
        num_sent = session_request.num_sent_tokens
        num_final = min(num_sent, session_request.num_computed_tokens) - self._num_reprefillable
        num_tokens = max(min(num_sent - self._lookahead_tokens, num_final), 0)
        return self._cached_tokens.get(session_request.request_id, num_tokens) // self._span_tokens

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Removes blocks from the prefix cache."""
        ids = sorted(set(block_ids) - {NULL_BLOCK})  # which has no hash
        for block_id in ids:
            check_range("block_ids", block_id, 1, self.session.config.num_blocks - 1)
        self.calls.deliver(lambda builder: builder.evict_blocks(ids))

    def remove_skipped_blocks(self, *_: object, **__: object) -> None:
        """Does nothing: the next allocation removes skipped blocks."""

    def new_step_starts(self) -> None:
        """Does nothing: `StepBatcher.begin` starts the round."""

    # ---- other calls of the scheduler

    def reset_prefix_cache(self) -> bool:
        """Clears the prefix cache; False if a request holds a block.

        Shared memory has the prefixes of other engines, too. There, this engine no longer hits what was cached before,
        as with other weights, and its requests that hold blocks continue, but cache no further ones.
        """
        if self.keeps_prefixes or self._shares_memory:
            self.calls.deliver_all()  # the blocks of preempted requests
        if self.keeps_prefixes:
            return True
        if self._shares_memory:
            forget_weights(self)
        else:
            answer = self.calls.builder.reset_prefix_cache()
            self.calls.send()
            if not answer.ok:
                return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    @property
    def usage(self) -> float:
        """Fraction of the pool's blocks that are not available to this engine, as of its last step; 0 before it."""
        unavailable = 1.0 - self.session.free_blocks / (self.session.config.num_blocks - 1)
        return unavailable if self.session.sequence else 0.0

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Returns all blocks of a request."""
        self.calls.settle()
        session_request = self.calls.requests.get(request_id)
        if session_request is None:
            return self.empty_kv_cache_blocks
        num_cached_blocks = self._num_cached_blocks(session_request) if self._has_connector else 0
        return KVCacheBlocks(session_request.block_ids, hashes=session_request.hashes[:num_cached_blocks])

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        """Copies the block ids of a request."""
        return self.get_blocks(request_id).get_block_ids()

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """Copies the ids of the blocks that hold computed tokens."""
        tables = self.get_blocks(request_id).block_ids
        spans = self.session.config.spans_tokens
        return tuple(list(ids[: cdiv(num_computed_tokens, span)]) for ids, span in zip(tables, spans, strict=True))

    def estimate_cached_tokens(self, request: EngineRequest) -> int:
        """Number of tokens of the request in blocks that all groups have cached."""
        session_request = self.calls.requests.get(request.request_id)
        if session_request is None or not self.enable_caching:
            return 0
        return self._num_cached_blocks(session_request) * self._span_tokens // self._hit_tokens * self._hit_tokens

    def record_prefix_cache_stats(self, request: EngineRequest, num_hits: int) -> None:
        """Counts the look-up of a request, when it is admitted."""
        if self.prefix_cache_stats is not None and self._looks_up(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0
            )

    def make_prefix_cache_stats(self) -> Any:
        """Returns the statistics since the last call."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def take_events(self) -> list[Any]:
        """Returns no events: `EventForwarder` publishes them as the service reports them."""
        return []

    def take_new_block_ids(self) -> list[int]:
        """Returns the new blocks since the last call that the engine must zero. It does so after copies fill others."""
        filled = self.calls.host_targets() if self._new_ids_to_zero else ()
        ids, self._new_ids_to_zero = [each for each in self._new_ids_to_zero if each not in filled], []
        return ids

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Returns the copies within the first tier to make before the step runs.

        It holds no blocks: the service keeps them a round long.
        """
        copies = sorted(self.calls.take_copies(), key=attrgetter("group_id"))  # as vLLM
        return [kv_cache_utils.KVCacheBlockCopy(copy.source, copy.target) for copy in copies], []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """Returns nothing: KV connectors are not supported with Mamba states."""
        return {}

    def finalize_partial_tail_offloads(self, request: EngineRequest) -> list[tuple[int, int, int]]:
        """Returns nothing: KV connectors are not supported with Mamba states."""
        del request
        return []


def forget_weights(manager: KVCacheManager) -> None:
    """Has an engine hit only what it computes from now on, until an operator states the weights version."""
    manager.calls.set_weights_version(unknown_weights_version())
    if manager.events:
        manager.events.publish_cleared()
