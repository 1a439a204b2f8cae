"""Application of a validated step, operation by operation, into a result.

1. After the first operation that finds too few blocks or would exceed the session's maximum, no operation of the step
   takes blocks, as a scheduler's loop stops there to preempt.
2. After MAX_STEP_WORK look-ups and block ids, operations that look up or take blocks are skipped; the client can send
   them again. The cost of an operation is known afterwards, so the operation that exceeds the limit is completed.
3. Appended and rejected tokens are recorded even if the operation itself fails.
4. When a request is freed or preempted, its cached blocks whose step was not reported as executed or launched lose
   their hashes, since that step may never run. If the session never reports execution, they only stay hidden from
   other sessions.
"""

from collections.abc import Callable, Sequence
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.execution.allocate_batch import AllocationBatch
from kvpool.core.execution.check import CheckedOperation, StepChecker
from kvpool.core.execution.deferred_caching import DeferredBlocks
from kvpool.core.ids import BlockId, StepNumber
from kvpool.core.sessions.quarantine import Quarantined
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import MAX_STEP_WORK, Operation, Outcome, Step, StepResult

BLOCKS_COMPARED_PER_HASH: Final = 64
"""Minimum number of block comparisons between two tables in the time of one hash look-up."""


def apply_step(pool: KVCacheManager, session: Session, step: Step, source: object = None) -> StepResult:
    """Validates and applies a step, or returns the earlier result if the step is a retry.

    Args:
        pool: The session's pool.
        session: The session.
        step: The step.
        source: The value to compare if the same sequence number is sent again; None for the step itself. Bytes are a
            digest, which needs none of the step's entries in memory.

    Raises:
        InvalidArgumentError: A field is malformed or out of range; nothing was changed.
        NotFoundError: A request is unknown; nothing was changed.
        WrongStateError: The step is out of sequence, or a request is not in the state for it; nothing was changed.
        UnavailableError: The pool is suspended; nothing was changed.
    """
    source = step if source is None else source
    before = session.remembered_result(step.sequence, source)
    if before is not None:
        pool.activity.retries += 1
        return before
    pool.check_serving()
    checked = StepChecker(pool, session, step).check()
    if pool.block_lifetimes:
        pool.block_lifetimes.now_seconds = session.last_seen_seconds
    mark_executed(pool, session, step.executed_sequence)
    session.launched_sequence = max(session.launched_sequence, StepNumber(step.launched_sequence))
    session.num_tokens += sum(step.num_appended_tokens)
    result = _Application(pool, session, step).run(checked)
    num_kept = 0 if isinstance(source, bytes) else step.num_entries
    session.remember(source, result, num_kept + result.num_entries)
    pool.activity.steps += 1
    pool.activity.operations += len(step.operations)
    pool.activity.allocations += step.num_credit_allocations
    return result


def mark_executed(pool: KVCacheManager, session: Session, executed_sequence: int) -> None:
    """Publishes the blocks that the session filled up to `executed_sequence`, which the caller has checked."""
    if executed_sequence > session.executed_sequence:
        session.executed_sequence = StepNumber(executed_sequence)
        pool.blocks.prefix_map.publish(session.session_number, session.executed_sequence)


def end_session(pool: KVCacheManager, session: Session) -> int:
    """Frees a session's requests, oldest first, and hides its cached blocks that were not reported as executed.

    Returns:
        The number of freed requests.
    """
    _hide_unexecuted(pool, session)
    return _free_requests(pool, session)


def quarantine_session(pool: KVCacheManager, session: Session, now_seconds: float, quarantine_seconds: float) -> None:
    """Ends a session whose last step may still run; its blocks are freed at once or after a quarantine.

    The quarantine lasts `quarantine_seconds`, or until all ranks have answered a fence if the pool's ranks fence.
    """
    due_seconds = float("inf") if pool.ranks_fence else now_seconds + quarantine_seconds
    if due_seconds <= now_seconds or not any(request.holds_blocks for request in session.requests.values()):
        end_session(pool, session)
        return
    _hide_unexecuted(pool, session)
    pool.quarantine.add(Quarantined(session, now_seconds, due_seconds))


def end_quarantine(pool: KVCacheManager, quarantined: Quarantined) -> None:
    """Frees the blocks of an ended session in quarantine."""
    pool.quarantine.remove(quarantined)
    _free_requests(pool, quarantined.session)


def _hide_unexecuted(pool: KVCacheManager, session: Session) -> None:
    """Hides the cached blocks of an ended session that were not reported as executed, and ends its quota."""
    pool.evict_unpublished(session.session_number)
    if session.holding:
        pool.quotas.end(session.holding, session.requests.values())
        session.holding = None


def _free_requests(pool: KVCacheManager, session: Session) -> int:
    requests = list(session.requests.values())
    for request in requests:
        pool.free(request)
        session.forget(request)
    return len(requests)


def _grow(row: CheckedOperation, request: Request) -> None:
    request.num_tokens += row.num_appended_tokens
    if row.hashes:
        request.hashes += row.hashes
    if row.token_ids:
        request.token_ids += row.token_ids


_COLUMNS: Final = tuple(
    (name, f"_{name}")
    for name in (
        "outcomes",
        "num_hit_tokens",
        "num_shared_hit_tokens",
        "num_new_tokens",
        "num_prefix_blocks",
        "num_new_blocks",
    )
)
"""Columns of a result, and the attributes of `_Application` that collect them."""


class _Application:
    """The application of one step; collects the columns of the result."""

    def __init__(self, pool: KVCacheManager, session: Session, step: Step) -> None:
        self._pool = pool
        self._session = session
        self._sequence = StepNumber(step.sequence)
        self._budget_tokens = step.admission_budget_tokens or pool.config.max_model_len * (len(step.operations) + 1)
        self._out_of_blocks = False
        self._work = 0
        count, groups = len(step.operations), len(pool.config.groups)
        self._groups = groups
        self._outcomes = [0] * count
        self._num_hit_tokens = [0] * count
        self._num_shared_hit_tokens = [0] * count
        self._num_new_tokens = [0] * count
        self._num_prefix_blocks = [0] * (count * groups)
        self._num_new_blocks = [0] * (count * groups)
        self._block_ids: list[BlockId] = []

    def run(self, checked: list[CheckedOperation | AllocationBatch]) -> StepResult:
        self._record_growth(checked)
        i = 0
        for row in checked:
            if isinstance(row, AllocationBatch):
                self._allocate_batch(i, row)
                i += len(row)
                continue
            if row.request is None:
                self._on_pool(i, row)
            else:
                if not row.num_taken_tokens:  # otherwise it already grew
                    _grow(row, row.request)
                row.request.num_computed_tokens -= row.num_rejected_tokens
                handler = _HANDLERS.get(row.operation)
                if handler:
                    handler(self, i, row, row.request)
            i += 1
        free_blocks = self._pool.quotas.num_free_for(self._session.holding)
        result = StepResult(self._sequence, free_blocks, block_ids=list(self._block_ids))
        for name, attribute in _COLUMNS:
            column: list[int] = getattr(self, attribute)
            if any(column):
                setattr(result, name, column)
        return result

    def _record_growth(self, checked: list[CheckedOperation | AllocationBatch]) -> None:
        """Records the tokens taken on credit since the previous step, and caches the blocks that they filled."""
        filled, before = DeferredBlocks(self._pool, self._session), StepNumber(self._sequence - 1)
        for row in checked:
            if isinstance(row, AllocationBatch):
                row.record_growth(filled, before)
                continue
            request = row.request
            if request and row.num_taken_tokens:
                _grow(row, request)
                request.num_computed_tokens += row.num_taken_tokens
                request.filling_sequence = before
                if request.num_computed_tokens > request.credit_tokens:
                    num_tokens = min(request.num_tokens, request.num_computed_tokens)
                    filled.add(request, num_tokens // self._pool.hash_block_size)
                    request.credit_tokens = self._pool.credit_tokens(request)
        filled.cache(before)

    def _allocate_batch(self, first: int, batch: AllocationBatch) -> None:
        work = self._work + batch.num_missing_blocks
        if self._out_of_blocks or work >= MAX_STEP_WORK or batch.num_missing_blocks > self._pool.blocks.num_free_blocks:
            for i, (request, num_new_tokens) in enumerate(batch.operations(), first):
                row = CheckedOperation(Operation.ALLOCATE, request)
                row.num_new_tokens = num_new_tokens
                self.allocate(i, row, request)
            return
        counts, block_ids = batch.apply(self._sequence)
        if counts:
            self._num_new_blocks[first : first + len(batch)] = counts
            self._block_ids += block_ids
            self._work = work

    def _on_pool(self, i: int, row: CheckedOperation) -> None:
        if row.operation is Operation.EVICT:
            self._pool.blocks.evict_blocks(row.block_ids or ())
        else:
            self._outcomes[i] = Outcome.OK if self._pool.reset_prefix_cache() else Outcome.IN_USE

    def add(self, _i: int, _row: CheckedOperation, request: Request) -> None:
        request.num_prompt_tokens = request.num_tokens
        self._session.add(request)

    def lookup(self, i: int, row: CheckedOperation, request: Request) -> None:
        if self._is_work_exhausted:
            self._outcomes[i] = Outcome.SKIPPED
            return
        find = (
            self._pool.get_computed_blocks if row.operation is Operation.LOOKUP else self._pool.find_longest_cache_hit
        )
        self._put_promise(i, request, find(request))
        request.has_uncounted_lookup = row.operation is Operation.LOOKUP_COUNTED_ON_ADMIT

    def cache(self, _i: int, row: CheckedOperation, request: Request) -> None:
        if self._pool.config.enable_caching:
            num_tokens = min(row.num_new_tokens, request.num_computed_tokens)
            session, sequence = self._session, self._sequence
            if session.launched_sequence:  # every step is reported, also the one that filled these blocks
                sequence = request.filling_sequence
            self._pool.cache_blocks(request, num_tokens, sequence=sequence)
            if sequence <= session.executed_sequence:
                self._pool.blocks.prefix_map.publish(session.session_number, session.executed_sequence)
            request.credit_tokens = self._pool.credit_tokens(request)

    def preempt(self, _i: int, _row: CheckedOperation, request: Request) -> None:
        self._pool.withdraw_unpublished(
            request, self._session.launched_sequence, reports_execution=self._session.reports_execution
        )
        self._pool.preempt(request)

    def free(self, _i: int, _row: CheckedOperation, request: Request) -> None:
        self._pool.withdraw_unpublished(
            request, self._session.launched_sequence, reports_execution=self._session.reports_execution
        )
        self._pool.free(request)
        self._session.forget(request)

    def common_prefix(self, i: int, _row: CheckedOperation, request: Request) -> None:
        if self._is_work_exhausted:
            self._outcomes[i] = Outcome.SKIPPED
            return
        requests = self._session.requests.values()
        num_blocks = sum(len(table.block_ids) for table in request.tables)
        self._work += len(requests) * (1 + num_blocks // BLOCKS_COMPARED_PER_HASH)
        running = (other for other in requests if other.holds_blocks)
        counts = self._pool.get_num_common_prefix_blocks(request, running)
        self._num_prefix_blocks[i * self._groups : (i + 1) * self._groups] = counts

    def allocate(self, i: int, row: CheckedOperation, request: Request) -> None:
        pool, promised = self._pool, row.promised
        if self._out_of_blocks or self._work >= MAX_STEP_WORK:
            self._outcomes[i] = Outcome.SKIPPED
            return
        if promised:
            self._work += sum(map(len, promised.block_ids))
            if not pool.is_still_cached(request, promised):
                self._outcomes[i] = Outcome.HIT_CHANGED
                self._put_promise(i, request, pool.find_longest_cache_hit(request))
                return
        new = pool.allocate_slots(
            request,
            row.num_new_tokens,
            row.num_lookahead_tokens,
            promised,
            num_encoder_tokens=row.num_encoder_tokens,
            delay_cache_blocks=row.delay_cache_blocks,
            options=row.options,
            sequence=self._sequence,
        )
        if new is None:
            self._refuse(i)
        else:
            self._put(self._num_new_blocks, i, new)

    def admit(self, i: int, row: CheckedOperation, request: Request) -> None:
        if self._out_of_blocks or self._is_work_exhausted or not self._budget_tokens:
            self._outcomes[i] = Outcome.SKIPPED
            return
        had_uncounted_lookup = request.has_uncounted_lookup
        request.has_uncounted_lookup = False  # an admission counts its own look-up
        admission = self._pool.admit(
            request,
            min(row.num_new_tokens or self._budget_tokens, self._budget_tokens),
            row.num_lookahead_tokens,
            num_encoder_tokens=row.num_encoder_tokens,
            delay_cache_blocks=row.delay_cache_blocks,
            options=row.options,
            sequence=self._sequence,
        )
        if admission is None:
            request.has_uncounted_lookup = had_uncounted_lookup
            self._refuse(i)
            return
        self._budget_tokens -= admission.num_new_tokens
        self._num_new_tokens[i] = admission.num_new_tokens
        self._put_hit(i, admission.computed)
        self._put(self._num_new_blocks, i, admission.new_blocks)

    @property
    def _is_work_exhausted(self) -> bool:
        return self._work >= MAX_STEP_WORK

    def _refuse(self, i: int) -> None:
        holding = self._session.holding
        self._outcomes[i] = Outcome.OVER_QUOTA if holding and holding.is_over else Outcome.NO_BLOCKS
        self._out_of_blocks = True

    def _put_promise(self, i: int, request: Request, computed: ComputedBlocks) -> None:
        """Writes a hit that a later step can name by its blocks; the request keeps the other data of the hit."""
        request.shared_prefix_boundary_tokens = computed.shared_prefix_boundary_tokens or 0
        self._put_hit(i, computed)

    def _put_hit(self, i: int, computed: ComputedBlocks) -> None:
        self._num_hit_tokens[i] = computed.num_tokens
        self._num_shared_hit_tokens[i] = computed.num_shared_tokens
        self._work += computed.num_probes
        self._put(self._num_prefix_blocks, i, computed.block_ids)

    def _put(self, column: list[int], i: int, blocks: Sequence[Sequence[BlockId]]) -> None:
        for j, block_ids in enumerate(blocks):
            if block_ids:
                column[i * self._groups + j] = len(block_ids)
                self._block_ids.extend(block_ids)
                self._work += len(block_ids)


_HANDLERS: Final[dict[Operation, Callable[[_Application, int, CheckedOperation, Request], None]]] = {
    Operation.ADD: _Application.add,
    Operation.LOOKUP: _Application.lookup,
    Operation.LOOKUP_UNCOUNTED: _Application.lookup,
    Operation.LOOKUP_COUNTED_ON_ADMIT: _Application.lookup,
    Operation.ADMIT: _Application.admit,
    Operation.ALLOCATE: _Application.allocate,
    Operation.CACHE: _Application.cache,
    Operation.FREE: _Application.free,
    Operation.PREEMPT: _Application.preempt,
    Operation.COMMON_PREFIX: _Application.common_prefix,
}
