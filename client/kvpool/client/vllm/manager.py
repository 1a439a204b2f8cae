"""What vLLM's scheduler calls in the place of its KV cache manager: the same calls, answered by the service.

1. Every answer is what vLLM's own manager would have given, block for block, as long as no other session takes part.
2. A round asks with few messages: what it is sure to ask is foreseen and asked together, and what needs no answer
   (frees, blocks to cache) goes with the next message that does, before it, in the order in which it came.
3. What was foreseen and is not asked for is given back when the round ends. It should not happen.
4. Steps run in the order in which they are scheduled. What the steps of earlier rounds fill may be found by this engine
   at once, by other sessions when the step's output is there.
"""

import logging
from collections.abc import Iterable
from itertools import takewhile
from types import SimpleNamespace
from typing import Any, Final

from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request as EngineRequest
from vllm.v1.request import RequestStatus

from kvpool.client.request import Request
from kvpool.client.results import Answer
from kvpool.client.session import Session
from kvpool.client.step_builder import StepBuilder
from kvpool.client.vllm.ahead import Ahead
from kvpool.client.vllm.blocks import KVCacheBlocks
from kvpool.client.vllm.foresight import Foresight
from kvpool.client.vllm.versions import COUNTS_ADMISSIONS, SPECS
from kvpool.server.core.errors import AbortedError
from kvpool.server.core.pool import ComputedBlocks
from kvpool.server.core.specs import FullAttentionSpec
from kvpool.server.core.step import Outcome
from kvpool.server.core.terms import USUAL_TERMS, Terms
from kvpool.server.core.types import BlockId

_log = logging.getLogger("kvpool.client.vllm")
_FIRST_LOOK_AHEAD: Final = 4
_MOST_LOOK_AHEAD: Final = 64
_NOT_RUNNING: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class KVCacheManager:
    """The KV cache manager of an engine that has its blocks from a pool.

    Attributes:
        session: The engine's session.
        empty_kv_cache_blocks: No blocks.
    """

    mamba_shared_prefix_checkpoint = False

    def __init__(self, session: Session, scheduler: Any) -> None:
        config = session.config
        self.session = session
        self.enable_caching = config.enable_caching
        self.log_stats = scheduler.log_stats
        self.max_model_len = config.max_model_len
        self.kv_cache_config = scheduler.kv_cache_config
        self.num_kv_cache_groups = len(config.groups)
        self.watermark_blocks = int(getattr(scheduler.scheduler_config, "watermark", 0.0) * config.num_blocks)
        self.empty_kv_cache_blocks = KVCacheBlocks([()] * len(config.groups))
        self.prefix_cache_stats = PrefixCacheStats() if self.log_stats else None
        managers = [
            SimpleNamespace(block_size=span, kv_cache_spec=group.kv_cache_spec, kv_cache_group_id=i)
            for i, (span, group) in enumerate(
                zip(config.spans_tokens, self.kv_cache_config.kv_cache_groups, strict=True)
            )
        ]
        self.coordinator = SimpleNamespace(single_type_managers=managers, enable_partial_hash_hits=False)
        self._scheduler = scheduler
        self._foresight = Foresight(scheduler)
        self._reserves_sequence = bool(getattr(scheduler, "scheduler_reserve_full_isl", False))
        self._windowed = any(not room.keeps_all for room in (group.spec for group in config.groups))
        self._span_tokens = config.hash_block_size
        self._requests: dict[str, Request] = {}
        self._builder = StepBuilder()
        self._executed = self._told = self._launched = 0  # numbers of steps
        self._answers: dict[str, KVCacheBlocks | None] = {}  # of running requests, foreseen
        self._admitted: dict[str, tuple[Request, Answer]] = {}
        self._tokens_left = 0
        self._look_ahead = _FIRST_LOOK_AHEAD
        zeroes = getattr(scheduler, "needs_kv_cache_zeroing", False)
        self._zeroed_groups = [
            i
            for i, group in enumerate(self.kv_cache_config.kv_cache_groups)
            if zeroes and isinstance(group.kv_cache_spec, SPECS.AttentionSpec)
        ]
        self._new_ids_to_zero: list[int] = []

    # ---- a round, as the scheduler above begins and ends it

    def begin_round(self) -> None:
        """Asks for what the round that begins is sure to ask."""
        self._tokens_left = self._foresight.most_tokens
        ahead = Ahead()
        is_all = self._run_ahead(ahead, 0)
        if is_all and ahead.num_tokens < self._tokens_left:
            self._admit_ahead(ahead)
        self._send_ahead(ahead)

    def end_round(self) -> int:
        """Gives back what was foreseen and not asked for, and sends what others wait for.

        Returns:
            Number of the step that the round ends with: what it scheduled has run when that has.
        """
        if self._admitted:
            _log.warning("admissions foreseen wrongly", extra={"requests": len(self._admitted)})
            for request_id in list(self._admitted):
                self._give_back(request_id)
        self._answers.clear()
        self.flush()
        self._launched = self.session.sequence
        return self._launched

    def flush(self) -> None:
        """Sends what others wait for: what was freed, and what has run."""
        if self._builder.rows or self._builder.quiet or self._executed > self._told:
            self._send()

    def check_lease(self) -> None:
        """Raises AbortedError if the blocks may have been given to others: what was scheduled must not run."""
        if self.session.lease_left_seconds <= 0:
            message = "the service was not heard of for as long as the lease; the blocks may be others': start anew"
            raise AbortedError("LEASE_EXPIRED", message)

    def note_executed(self, sequence: int) -> None:
        """Takes note that the outputs of a round are there, which ended with a step of this number."""
        self._executed = max(self._executed, sequence)

    # ---- look-ups

    def get_computed_blocks(self, request: EngineRequest) -> tuple[Any, ...]:
        """Looks up the longest cached prefix, or admits the request at once, if what it will ask is foreseen.

        Returns:
            Blocks and tokens; where vLLM asks for it, 0 for the boundary that Mamba states are shared up to.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self._looked_up(self.empty_kv_cache_blocks, 0)
        if COUNTS_ADMISSIONS and request.request_id not in self._admitted:
            self._ask_waiting(request)
        if request.request_id in self._admitted:
            answer = self._admitted[request.request_id][1]
            if not answer.ok:
                return self._looked_up(self.empty_kv_cache_blocks, 0)
            return self._looked_up(KVCacheBlocks(answer.hit_blocks, admission=answer), answer.num_hit_tokens)
        return self._look_up(request)

    def _look_up(self, request: EngineRequest) -> tuple[Any, ...]:
        known = self._known(request)
        if COUNTS_ADMISSIONS:
            answer = self._builder.find_computed_blocks(known)
        else:
            answer = self._builder.get_computed_blocks(known)
        self._send()
        if not COUNTS_ADMISSIONS:
            self._count(request, answer.num_hit_tokens)
        if not answer.num_hit_tokens:
            return self._looked_up(self.empty_kv_cache_blocks, 0)
        ids = tuple([BlockId(block_id) for block_id in group] for group in answer.hit_blocks)
        blocks = KVCacheBlocks(ids, ComputedBlocks(ids, answer.num_hit_tokens))
        return self._looked_up(blocks, answer.num_hit_tokens)

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
        request_id = request.request_id
        if request_id in self._answers:
            return self._answers.pop(request_id)
        computed = new_computed_blocks.computed if new_computed_blocks else None
        if request_id in self._admitted:
            answer = self._admitted[request_id][1]
            gave = (answer.num_hit_tokens, answer.num_new_tokens)
            if not answer.ok or gave == (num_new_computed_tokens, num_new_tokens):
                del self._admitted[request_id]
                return self._new_blocks(answer) if answer.ok else None
            self._give_back(request_id)
            ids = tuple([BlockId(block_id) for block_id in group] for group in answer.hit_blocks)
            computed = ComputedBlocks(ids, answer.num_hit_tokens)
        if request.status is RequestStatus.RUNNING and self._ask_running(self._scheduler.running.index(request)):
            return self._answers.pop(request_id)
        known = self._known(request)
        watermark = self.watermark_blocks if has_scheduled_reqs and request.status in _NOT_RUNNING else 0
        terms = Terms(
            num_external_computed_tokens,
            getattr(request, "num_in_flight_tokens", 0) if self._windowed else 0,
            reserved_blocks,
            watermark,
            full_sequence_must_fit,
        )
        answer = self._builder.allocate_slots(
            known,
            num_new_tokens,
            computed=computed,
            num_computed_tokens=request.num_computed_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            num_encoder_tokens=num_encoder_tokens,
            delay_cache_blocks=delay_cache_blocks,
            terms=USUAL_TERMS if terms == USUAL_TERMS else terms,
        )
        self._send()
        if not answer.ok:
            return None
        self._tokens_left -= num_new_tokens
        return self._new_blocks(answer)

    def _ask_running(self, first: int) -> bool:
        """Asks for the running requests from a place on, as far as that is foreseen; whether the first is answered."""
        ahead = Ahead()
        self._run_ahead(ahead, first)
        self._send_ahead(ahead)
        return self._scheduler.running[first].request_id in self._answers

    def _run_ahead(self, ahead: Ahead, first: int) -> bool:
        """Adds the running requests from a place on, as far as that is foreseen; whether they are all that will ask."""
        foreseen, is_all = self._foresight.running(first, self._tokens_left)
        asked: list[tuple[EngineRequest, Request, int]] = []
        for request, num_tokens in foreseen:
            known = self._requests.get(request.request_id)
            if request.request_id in self._answers:
                continue
            if known is None or known.num_computed_tokens != request.num_computed_tokens:
                is_all = False
                break
            asked.append((request, known, num_tokens))
        if asked and not all([self._builder.can_decode(known) for _, known, _ in asked]):  # noqa: C419 - a generator is slower
            self._send()
        together: list[tuple[EngineRequest, Request]] = []
        for request, known, num_tokens in asked:
            if num_tokens == 1 and not self._windowed:
                together.append((request, known))
            else:
                ahead.decode(self._builder, together)
                together = []
                ahead.allocate(self._builder, request, known, num_tokens)
        ahead.decode(self._builder, together)
        return is_all

    def _ask_waiting(self, request: EngineRequest) -> None:
        """Admits a request and those behind it, in one message, if what they will ask is foreseen."""
        ahead = Ahead()
        if self._tokens_left > 0:
            self._admit_ahead(ahead, request)
        self._send_ahead(ahead)

    def _admit_ahead(self, ahead: Ahead, first: EngineRequest | None = None) -> None:
        """Adds the admissions that are foreseen; only those from `first` on, if that is given."""
        if not (COUNTS_ADMISSIONS and self.enable_caching):
            return
        foreseen = list(self._foresight.admissions(self._look_ahead))
        if not foreseen or first not in (None, foreseen[0]):
            return
        reserves, watermark = self._reserves_sequence, self.watermark_blocks
        terms = [Terms(num_watermark_blocks=watermark, full_sequence_must_fit=reserves)] * len(foreseen)
        if not self._scheduler.running:  # the first of all may go below the watermark
            terms[0] = Terms(full_sequence_must_fit=reserves)
        known = [(request, self._known(request)) for request in foreseen]
        most_tokens = self._foresight.long_prefill_tokens()
        ahead.admit(self._builder, known, self._tokens_left - ahead.num_tokens, most_tokens, terms)

    def _send_ahead(self, ahead: Ahead) -> None:
        """Sends what is asked ahead, if it needs an answer, and takes note of the answers."""
        if self._builder.rows:
            self._send()
        for request_id, blocks, num_tokens in ahead.given(self.empty_kv_cache_blocks):
            if blocks is None:
                self._answers[request_id] = None
            else:
                self._answers[request_id] = self._given(blocks)
                self._tokens_left -= num_tokens
        num_admitted = 0
        for request_id, known, answer in ahead.admissions:
            if answer.outcome is Outcome.SKIPPED:
                break
            self._admitted[request_id] = (known, answer)
            if answer.ok:
                num_admitted += 1
                self._tokens_left -= answer.num_new_tokens
        if ahead.admissions:
            more = 2 * self._look_ahead if num_admitted == len(ahead.admissions) else num_admitted + 1
            self._look_ahead = min(more, _MOST_LOOK_AHEAD)

    def _give_back(self, request_id: str) -> None:
        known, answer = self._admitted.pop(request_id)
        if answer.ok:
            self._builder.free(known)
            del self._requests[request_id]

    def _new_blocks(self, answer: Answer) -> KVCacheBlocks:
        return self._given(KVCacheBlocks(answer.new_blocks)) if any(answer.new_blocks) else self.empty_kv_cache_blocks

    def _given(self, blocks: KVCacheBlocks) -> KVCacheBlocks:
        """Takes note of new blocks that the engine wants to be zeroed."""
        for group_id in self._zeroed_groups:
            self._new_ids_to_zero += blocks.block_ids[group_id]
        return blocks

    # ---- what needs no answer

    def free(self, request: EngineRequest) -> None:
        """Frees a request's blocks, the last first; it is preempted, or has ended."""
        request_id = request.request_id
        if request_id in self._admitted:
            self._give_back(request_id)
            return
        self._answers.pop(request_id, None)
        known = self._requests.get(request_id)
        if known is None:
            return
        if request.status is RequestStatus.RUNNING:
            if known.declared:
                self._builder.preempt(known)
        else:
            self._builder.free(known)
            del self._requests[request_id]

    def cache_blocks(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """Caches the full blocks among the first tokens, those that are not yet."""
        if not self.enable_caching:
            return
        known = self._requests[request.request_id]
        cached_tokens = min(known.num_sent_tokens, known.num_computed_tokens)
        if num_computed_tokens // self._span_tokens > cached_tokens // self._span_tokens:
            self._builder.cache_blocks(known, num_computed_tokens)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Drops the hashes of blocks."""
        self._builder.evict_blocks(sorted(block_ids))

    def remove_skipped_blocks(self, *_: object, **__: object) -> None:
        """Nothing: the next call that makes room does it."""

    def new_step_starts(self) -> None:
        """Nothing: `begin_round` does."""

    # ---- what the scheduler asks beside it

    def reset_prefix_cache(self) -> bool:
        """Drops all hashes; False if a request of any session holds a block."""
        answer = self._builder.reset_prefix_cache()
        self._send()
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
        known = self._requests.get(request_id)
        return KVCacheBlocks(known.block_ids) if known else self.empty_kv_cache_blocks

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        """Copies of their ids."""
        return self.get_blocks(request_id).get_block_ids()

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Counts the leading blocks of each group of full attention that all requests share that hold blocks."""
        counts = [0] * self.num_kv_cache_groups
        if not self.enable_caching:
            return counts
        tables = [known.block_ids for known in self._requests.values() if any(known.block_ids)]
        mine = self._requests[running_request_id].block_ids
        for i, group in enumerate(self.session.config.groups):
            if isinstance(group.spec, FullAttentionSpec):
                shared = zip(mine[i], *[table[i] for table in tables], strict=False)
                counts[i] = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, shared))
        return counts

    def estimate_cached_tokens(self, request: EngineRequest) -> int:
        """Tokens of the request that stand in cached blocks."""
        known = self._requests.get(request.request_id)
        if known is None or not self.enable_caching:
            return 0
        num_tokens = min(known.num_sent_tokens, known.num_computed_tokens)
        return num_tokens // self._span_tokens * self._span_tokens

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
        """No events: the service publishes those of the pool."""
        return []

    def take_new_block_ids(self) -> list[int]:
        """The new blocks since the last call that are to be zeroed."""
        ids, self._new_ids_to_zero = self._new_ids_to_zero, []
        return ids

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """No copies: hits are of whole blocks."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """None: there is no connector."""
        return {}

    def _known(self, request: EngineRequest) -> Request:
        known = self._requests.get(request.request_id)
        if known is None:
            lora_name = request.lora_request.lora_name if request.lora_request else None
            known = self.session.request_hashed_elsewhere(
                request.request_id,
                request._all_token_ids,  # noqa: SLF001 - the list itself: its constant view takes long to measure
                request.block_hashes,
                lora_name=lora_name,
            )
            self._requests[request.request_id] = known
        return known

    def _send(self) -> None:
        builder, self._builder = self._builder, StepBuilder()
        builder.executed_sequence, builder.launched_sequence = self._executed, self._launched
        before = self.session.sequence
        self.session.send(builder)
        if self.session.sequence > before:
            self._told = builder.executed_sequence
