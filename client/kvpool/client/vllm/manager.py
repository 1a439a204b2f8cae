"""What vLLM's scheduler calls in the place of its KV cache manager: the same calls, answered by the service.

Every answer is what vLLM's own manager would have given, block for block, as long as no other session takes part. What
is asked of the service, and when, is the business of `rounds`.
"""

from collections.abc import Iterable
from itertools import takewhile
from types import SimpleNamespace
from typing import Any, Final

from vllm.utils.math_utils import cdiv
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request as EngineRequest
from vllm.v1.request import RequestStatus

from kvpool.client.request import Request
from kvpool.client.results import Answer
from kvpool.client.session import Session
from kvpool.client.vllm.blocks import KVCacheBlocks
from kvpool.client.vllm.connectors import Coordinator
from kvpool.client.vllm.events import EventForwarder
from kvpool.client.vllm.step_batcher import StepBatcher
from kvpool.client.vllm.versions import COUNTS_ADMISSIONS, SPECS
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions

_RUNNING: Final = RequestStatus.RUNNING
_NOT_RUNNING: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class KVCacheManager:
    """The KV cache manager of an engine that has its blocks from a pool.

    Attributes:
        session: The engine's session.
        rounds: What is asked of it.
        events: What publishes the pool's events, if the engine does.
        empty_kv_cache_blocks: No blocks.
    """

    mamba_shared_prefix_checkpoint = False

    def __init__(self, session: Session, scheduler: Any, events: EventForwarder | None = None) -> None:
        config = session.config
        self.session = session
        self.events = events
        self.enable_caching = config.enable_caching
        self.log_stats = scheduler.log_stats
        self.max_model_len = config.max_model_len
        self.kv_cache_config = scheduler.kv_cache_config
        self.num_kv_cache_groups = len(config.groups)
        self.empty_kv_cache_blocks = KVCacheBlocks([()] * len(config.groups))
        self.prefix_cache_stats = PrefixCacheStats() if self.log_stats else None
        managers = [
            SimpleNamespace(block_size=span, kv_cache_spec=group.kv_cache_spec, kv_cache_group_id=i)
            for i, (span, group) in enumerate(
                zip(config.spans_tokens, self.kv_cache_config.kv_cache_groups, strict=True)
            )
        ]
        self.rounds = StepBatcher(session, scheduler)
        self.coordinator = Coordinator(managers, self.rounds.requests)
        self._has_connector = scheduler.connector is not None
        self._cached_tokens: dict[str, int] = {}  # of requests whose contents a connector is bringing
        self._span_tokens = config.hash_block_size
        zeroes = getattr(scheduler, "needs_kv_cache_zeroing", False)
        self._zeroed_groups = [
            i
            for i, group in enumerate(self.kv_cache_config.kv_cache_groups)
            if zeroes and isinstance(group.kv_cache_spec, SPECS.AttentionSpec)
        ]
        self._new_ids_to_zero: list[int] = []

    # ---- look-ups

    def get_computed_blocks(self, request: EngineRequest) -> tuple[Any, ...]:
        """Looks up the longest cached prefix, or admits the request at once, if what it will ask is foreseen.

        Returns:
            Blocks and tokens; where vLLM asks for it, 0 for the boundary that Mamba states are shared up to.
        """
        self.rounds.settle()
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self._looked_up(self.empty_kv_cache_blocks, 0)
        admitted = self.rounds.admitted
        if request.request_id not in admitted:
            self.rounds.ask_waiting(request)
        if request.request_id in admitted:
            answer = admitted[request.request_id][1]
            blocks, num_tokens = self.empty_kv_cache_blocks, 0
            if answer.ok:
                blocks, num_tokens = KVCacheBlocks(answer.hit_blocks), answer.num_hit_tokens
        else:
            blocks, num_tokens = self._lookup(request)
        if self.events and num_tokens and getattr(request, "kv_cache_report_mode", "") == "full":
            self.events.tell_found(request, blocks.block_ids)
        return self._looked_up(blocks, num_tokens)

    def _lookup(self, request: EngineRequest) -> tuple[KVCacheBlocks, int]:
        known, builder = self.rounds.known(request), self.rounds.builder
        answer = builder.find_computed_blocks(known) if COUNTS_ADMISSIONS else builder.get_computed_blocks(known)
        self.rounds.send()
        if not COUNTS_ADMISSIONS:
            self._count(request, answer.num_hit_tokens)
        if not answer.num_hit_tokens:
            return self.empty_kv_cache_blocks, 0
        return KVCacheBlocks(answer.hit_blocks, answer.computed), answer.num_hit_tokens

    @staticmethod
    def _looked_up(blocks: KVCacheBlocks, num_tokens: int) -> tuple[Any, ...]:
        return (blocks, num_tokens, 0) if COUNTS_ADMISSIONS else (blocks, num_tokens)

    # ---- room

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
        """Makes room for more tokens; None if there is too little: see vLLM's manager."""
        del skip_zeroing_group_ids
        if request.status is _RUNNING:
            given = self.rounds.answer(request, num_new_tokens)
            if given:
                return self._given(given[0]) if self._zeroed_groups else given[0]
        computed = new_computed_blocks.computed if new_computed_blocks else None
        if request.request_id in self.rounds.admitted:
            answer = self.rounds.admitted[request.request_id][1]
            got = (answer.num_hit_tokens, answer.num_new_tokens)
            if not answer.ok or got == (num_new_computed_tokens, num_new_tokens):
                del self.rounds.admitted[request.request_id]
                return self._new_blocks(answer) if answer.ok else None
            self.rounds.give_back(request.request_id)
            computed = answer.computed
        known = self.rounds.known(request)
        watermark = self.rounds.watermark_blocks if has_scheduled_reqs and request.status in _NOT_RUNNING else 0
        options = AllocationOptions(
            num_external_computed_tokens,
            getattr(request, "num_in_flight_tokens", 0) if self.rounds.windowed else 0,
            reserved_blocks,
            watermark,
            full_sequence_must_fit,
        )
        answer = self.rounds.builder_for(known).allocate_slots(
            known,
            num_new_tokens,
            computed=computed,
            num_computed_tokens=request.num_computed_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            num_encoder_tokens=num_encoder_tokens,
            delay_cache_blocks=delay_cache_blocks,
            options=DEFAULT_OPTIONS if options == DEFAULT_OPTIONS else options,
        )
        self.rounds.send()
        if not answer.ok:
            return None
        self.rounds.tokens_left -= num_new_tokens
        if delay_cache_blocks:
            self._cached_tokens[request.request_id] = num_new_computed_tokens
        else:
            self._cached_tokens.pop(request.request_id, None)
        return self._new_blocks(answer)

    def _new_blocks(self, answer: Answer) -> KVCacheBlocks | None:
        return self._given(KVCacheBlocks(answer.new_blocks)) if any(answer.new_blocks) else self.empty_kv_cache_blocks

    def _given(self, blocks: KVCacheBlocks | None) -> KVCacheBlocks | None:
        """Takes note of new blocks that the engine wants to be zeroed."""
        if blocks is not None:
            for group_id in self._zeroed_groups:
                self._new_ids_to_zero += blocks.block_ids[group_id]
        return blocks

    # ---- what needs no answer

    def free(self, request: EngineRequest) -> None:
        """Frees a request's blocks, the last first; it is preempted, or has ended."""
        known = self.rounds.forget_answers(request.request_id)
        self._cached_tokens.pop(request.request_id, None)
        if known is None:
            return
        if request.status is _RUNNING:
            if known.declared:
                self.rounds.builder.preempt(known)
        else:
            self.rounds.free(known)

    def cache_blocks(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """Caches the full blocks among the first tokens, those that are not yet."""
        if not self.enable_caching:
            return
        known = self.rounds.requests[request.request_id]
        if num_computed_tokens // self._span_tokens > self._num_cached_blocks(known):
            self.rounds.builder.cache_blocks(known, num_computed_tokens)
            if known.request_id in self._cached_tokens:
                self._cached_tokens[known.request_id] = num_computed_tokens

    def _num_cached_blocks(self, known: Request) -> int:
        """Counts the hash blocks of a request that are cached, or were."""
        num_tokens = min(known.num_sent_tokens, known.num_computed_tokens)
        return self._cached_tokens.get(known.request_id, num_tokens) // self._span_tokens

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Drops the hashes of blocks."""
        self.rounds.builder.evict_blocks(sorted(block_ids))

    def remove_skipped_blocks(self, *_: object, **__: object) -> None:
        """Nothing: the next call that makes room does it."""

    def new_step_starts(self) -> None:
        """Nothing: `StepBatcher.begin` does."""

    # ---- what the scheduler asks beside it

    def reset_prefix_cache(self) -> bool:
        """Drops all hashes; False if a request of any session holds a block."""
        answer = self.rounds.builder.reset_prefix_cache()
        self.rounds.send()
        if answer.ok and self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return answer.ok

    @property
    def usage(self) -> float:
        """Fraction of the pool's blocks that this engine cannot be given, as its last step left it."""
        if not self.session.sequence:  # nothing was answered yet
            return self.session.pool().usage
        return 1.0 - self.session.free_blocks / (self.session.config.num_blocks - 1)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request."""
        self.rounds.settle()
        known = self.rounds.requests.get(request_id)
        if known is None:
            return self.empty_kv_cache_blocks
        if not self._has_connector:
            return KVCacheBlocks(known.block_ids)
        return KVCacheBlocks(known.block_ids, hashes=known.hashes[: self._num_cached_blocks(known)])

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        """Copies of their ids."""
        return self.get_blocks(request_id).get_block_ids()

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """Copies of the ids of those that computed tokens stand in."""
        tables = self.get_blocks(request_id).block_ids
        spans = self.session.config.spans_tokens
        return tuple(list(ids[: cdiv(num_computed_tokens, span)]) for ids, span in zip(tables, spans, strict=True))

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Counts the leading blocks of each group of full attention that all requests share that hold blocks."""
        self.rounds.settle()
        counts = [0] * self.num_kv_cache_groups
        if not self.enable_caching:
            return counts
        tables = [known.block_ids for known in self.rounds.requests.values() if any(known.block_ids)]
        mine = self.rounds.requests[running_request_id].block_ids
        for i, group in enumerate(self.session.config.groups):
            if isinstance(group.spec, FullAttentionSpec):
                shared = zip(mine[i], *[table[i] for table in tables], strict=False)
                counts[i] = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, shared))
        return counts

    def estimate_cached_tokens(self, request: EngineRequest) -> int:
        """Tokens of the request that stand in cached blocks."""
        known = self.rounds.requests.get(request.request_id)
        if known is None or not self.enable_caching:
            return 0
        return self._num_cached_blocks(known) * self._span_tokens

    def record_prefix_cache_stats(self, request: EngineRequest, num_hits: int) -> None:
        """Counts the look-up of a request that was admitted."""
        if self.enable_caching and not request.skip_reading_prefix_cache:
            self._count(request, num_hits)

    def _count(self, request: EngineRequest, num_hits: int) -> None:
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0
            )

    def make_prefix_cache_stats(self) -> Any:
        """What was counted since the last call."""
        stats, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats() if self.log_stats else None
        return stats

    def take_events(self) -> list[Any]:
        """None here: they are published as the service tells them."""
        return []

    def take_new_block_ids(self) -> list[int]:
        """The new blocks since the last call that are to be zeroed."""
        ids, self._new_ids_to_zero = self._new_ids_to_zero, []
        return ids

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """No copies: hits are of whole blocks."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """None: connectors are served beside no Mamba states."""
        return {}

    def finalize_partial_tail_offloads(self, request: EngineRequest) -> list[tuple[int, int, int]]:
        """None: likewise."""
        del request
        return []
