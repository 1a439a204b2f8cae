"""Execution of a step: validates all of it, then applies its rows in order into a result.

1. After the first operation that finds too few blocks or would exceed the session's maximum, no operation of the step
   takes blocks, as a scheduler's loop stops there to preempt.
2. After MAX_STEP_WORK look-ups and block ids, operations that look up or take blocks are skipped; the client can send
   them again. The cost of an operation is known afterwards, so the operation that exceeds the limit is completed.
3. Appended and rejected tokens are recorded even if the operation itself fails.
4. When a request is freed or preempted, its cached blocks whose step was not reported as executed or launched lose
   their hashes, since that step may never run. If the session never reports execution, they only stay hidden from
   other sessions.
5. A step that reports launched steps first releases the blocks of their copies; without such reports, each step those
   of the steps before it.
6. What a step frees while earlier steps are in flight waits for them, see `StepsInFlight`.
7. A step that takes blocks of a pool with a second tier also orders copies of others to host memory, see `HostTier`.
8. What a request has computed on credit counts as filled by the step that reports it, which is later: so no session
   finds these blocks before they have their contents. When the request is freed, the steps that fill them are certain.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import Final, cast

from kvpool.core.blocks.free_list import NO_SESSION
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.errors import out_of_memory
from kvpool.core.execution.allocate_batch import allocate_plain_rows
from kvpool.core.execution.rows import PoolRow, Row, read_rows
from kvpool.core.ids import MAX_TOKENS, BlockId, StepNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import REMEMBERED_RESULTS, Session
from kvpool.core.steps.columns import LOOKING_UP, MAX_STEP_WORK, Operation, Outcome, Step, StepResult

_REQUEST_BYTES: Final = 1024
_BYTES_PER_HASH_BYTE: Final = 3
_ID_BYTES: Final = 40
"""Memory that a step can need per request, per byte of a hash, and per token or block id."""
BLOCKS_COMPARED_PER_HASH: Final = 64
"""Minimum number of block comparisons between two tables in the time of one hash look-up."""


def apply_step(pool: KVCacheManager, session: Session, step: Step, message: bytes = b"") -> StepResult:
    """Validates and applies a step, or returns the earlier result if the step is a retry.

    Args:
        pool: The session's pool.
        session: The session.
        step: The step.
        message: See `ApplyStep`.

    Raises:
        InvalidArgumentError: A field is malformed or out of range; nothing was changed.
        NotFoundError: A request is unknown; nothing was changed.
        WrongStateError: The step is out of sequence, or a request is not in the state for it; nothing was changed.
        UnavailableError: The pool is suspended; nothing was changed.
        ExhaustedError: The process has too little memory; nothing was changed.
    """
    before = session.remembered_result(step.sequence, message)
    if before is not None:
        pool.activity.retries += 1
        return before
    pool.check_serving()
    try:
        rows, num_admitted_tokens = read_rows(pool, session, step)
        _reserve_memory(pool, session, step, rows, num_admitted_tokens)
        if session.requests_copy:
            session.before_change(row.request for row in rows if isinstance(row, Row))
    except MemoryError:
        raise out_of_memory() from None
    if pool.block_lifetimes:
        pool.block_lifetimes.now_seconds = session.last_seen_seconds
    mark_executed(pool, session, step.executed_sequence)
    until = max(session.launched_sequence, StepNumber(step.launched_sequence))
    if until < step.sequence:
        session.launched_sequence = until
    free_list = pool.blocks.free_list
    free_list.user = session.session_number
    if until > session.executed_sequence:
        has_others = len(pool.sessions) > 1 or len(pool.quarantine) > 0
        pool.in_flight.begin_frees(until, has_others=has_others)
    session.num_tokens += sum(step.num_appended_tokens)
    if session.copies or pool.blocks.host:
        pool.release_copies(session, session.launched_sequence or session.sequence, reports_launched=until > 0)
    result = _Application(pool, session, step).run(rows)
    free_list.user = NO_SESSION
    if free_list.until:
        pool.in_flight.end_frees()
    if free_list.num_held or pool.in_flight.kept or session.waits_since_seconds < inf or pool.blocks.host:
        _note_wait(pool, session)
    session.remember(message, result)
    pool.activity.count_step(step, session.reserve_tokens)
    return result


def _reserve_memory(
    pool: KVCacheManager, session: Session, step: Step, rows: Sequence[Row | PoolRow], num_admitted_tokens: int
) -> None:
    """Reserves the memory and the blocks that a step can take, so that no lack of memory interrupts it. O(operations).

    Raises:
        MemoryError: There is too little memory; nothing was changed.
    """
    num_bytes = len(step.request_ids) * _REQUEST_BYTES + len(step.block_hashes) * _BYTES_PER_HASH_BYTE
    num_bytes += (len(step.token_ids) + len(step.block_ids)) * _ID_BYTES
    num_tokens = sum(step.num_new_tokens) + sum(step.num_lookahead_tokens) + num_admitted_tokens
    num_tokens += sum(step.num_encoder_tokens) + sum(step.num_external_tokens)
    num_tokens += session.reserve_tokens * len(rows)
    num_blocks = pool.max_new_blocks(num_tokens, len(rows))
    if num_blocks > MAX_STEP_WORK:  # the operation that exceeds this limit is the last
        most = max((pool.max_new_blocks(_max_new_tokens(row), 1) for row in rows if isinstance(row, Row)), default=0)
        num_blocks = min(num_blocks, MAX_STEP_WORK + most)
    pool.blocks.reserve_memory(num_blocks, num_bytes)


def _max_new_tokens(row: Row) -> int:
    """Upper bound of the tokens that get slots by an operation."""
    if row.operation not in (Operation.ADMIT, Operation.ALLOCATE, Operation.RESERVE):
        return 0
    known = row.num_tokens if row.operation is Operation.ADMIT else 0
    new = row.num_new_tokens + row.num_lookahead_tokens + row.options.num_external_tokens + row.request.reserve_tokens
    return known + new + row.num_encoder_tokens


def mark_executed(pool: KVCacheManager, session: Session, executed_sequence: int) -> None:
    """Publishes the blocks that the session filled up to `executed_sequence`, which the caller has checked.

    Releases the blocks that waited for these steps.
    """
    if executed_sequence > session.executed_sequence:
        session.executed_sequence = StepNumber(executed_sequence)
        pool.blocks.prefix_map.pending.publish(session.session_number, session.executed_sequence)
        blocks = pool.blocks
        if blocks.free_list.num_held or pool.in_flight.kept or session.waits_since_seconds < inf or blocks.host:
            pool.in_flight.release(session.session_number, session.executed_sequence)
            _begin_wait(pool, session)


def _note_wait(pool: KVCacheManager, session: Session) -> None:
    """Records whether blocks wait for the session's steps, after a step; an earlier begin of the wait stays."""
    if _is_waiting(pool, session) != (session.waits_since_seconds < inf):
        _begin_wait(pool, session)


def _begin_wait(pool: KVCacheManager, session: Session) -> None:
    session.waits_since_seconds = session.last_seen_seconds if _is_waiting(pool, session) else inf


def _is_waiting(pool: KVCacheManager, session: Session) -> bool:
    """Whether blocks wait for steps of a session that were launched: those that it reports, and all but the newest."""
    num_newest = REMEMBERED_RESULTS if session.launched_sequence else 1
    launched = max(session.launched_sequence, StepNumber(session.sequence - num_newest))
    return pool.in_flight.has_waiting(session.session_number, launched)


class _Application:
    """The application of one step; collects the columns of the result. A column stays empty until an entry is not 0."""

    def __init__(self, pool: KVCacheManager, session: Session, step: Step) -> None:
        self._pool = pool
        self._session = session
        self._sequence = StepNumber(step.sequence)
        self._launched = step.launched_sequence
        self._budget_tokens = step.admission_budget_tokens or pool.config.max_model_len * (len(step.operations) + 1)
        self._step = step
        self._gives_credit = pool.gives_credit or session.reserve_tokens > 0
        self._out_of_blocks = False
        self._work = 0
        self._num_rows, self._groups = len(step.operations), len(pool.config.groups)
        self._result = StepResult(self._sequence)

    def run(self, rows: Sequence[Row | PoolRow]) -> StepResult:
        result, i, pool, host = self._result, 0, self._pool, self._pool.blocks.host
        num_allocated = pool.blocks.num_allocated if host else 0
        if self._session.reserve_tokens:
            self._pool.set_reserve_floor()
        for is_plain, consecutive in groupby(rows, key=attrgetter("is_plain")):
            if is_plain:
                i += self._allocate_batch(i, cast("list[Row]", list(consecutive)))
                continue
            for row in consecutive:
                if isinstance(row, PoolRow):
                    self._change_pool(i, row)
                else:
                    was_running = row.request.num_computed_tokens > 0
                    self._record_growth(row)
                    _HANDLERS[row.operation](self, i, row)
                    self._session.num_running += (row.request.num_computed_tokens > 0) - was_running
                    self._put_credit(i, [row])
                i += 1
        if pool.config.partial_hits or host:
            self._put_copies()
        if host:
            host.counters.copying_out_microseconds += self._step.copying_out_microseconds
            host.counters.copying_in_microseconds += self._step.copying_in_microseconds
            num_taken = pool.blocks.num_allocated - num_allocated
            for order in host.clean(num_taken, self._session.session_number, self._sequence):
                result.copied_block_ids += order
        result.reserve_wanted, self._session.owes_reserve = self._session.owes_reserve, False
        result.free_blocks = self._pool.quotas.num_free_for(self._session.holding)
        return result

    def _record_growth(self, row: Row) -> None:
        request = row.request
        if row.is_new:
            request.num_prompt_tokens = row.num_tokens
            self._session.add(request)
        if row.num_prompt_tokens:
            request.num_prompt_tokens = row.num_prompt_tokens
        request.num_tokens = row.num_tokens
        if row.hashes:
            request.hashes += row.hashes
            if row.sampled and self._pool.hit_curve:
                num_left = self._pool.hit_curve.max_sampled(len(request.hashes)) - len(request.sampled)
                request.sampled += row.sampled[: max(num_left, 0)]
        if row.token_ids:
            request.token_ids += row.token_ids
        request.num_computed_tokens = row.num_computed_tokens
        if row.has_taken:
            request.filling_sequence = StepNumber(self._sequence - 1)
        if self._pool.state_managers:
            self._pool.state_readers.record(request)

    def _allocate_batch(self, first: int, rows: Sequence[Row]) -> int:
        """Allocates slots for consecutive plain rows, together or one by one, and returns the number of rows."""
        for row in rows:
            self._record_growth(row)
        allocated = None
        if not self._is_refusing:
            max_blocks = MAX_STEP_WORK - self._work - 1
            allocated = allocate_plain_rows(self._pool, self._session, rows, self._sequence, max_blocks)
        if allocated:
            counts, block_ids = allocated
            if block_ids:
                self._column("num_new_blocks")[first : first + len(rows)] = counts
                self._result.block_ids += block_ids
                self._work += len(block_ids)
        else:
            for i, row in enumerate(rows, first):
                self.allocate(i, row)
        self._put_credit(first, rows)
        return len(rows)

    @property
    def _is_refusing(self) -> bool:
        """Whether operations that take blocks are skipped."""
        return self._out_of_blocks or self._work >= MAX_STEP_WORK

    def allocate(self, i: int, row: Row) -> None:
        pool, request, promised = self._pool, row.request, row.promised
        if self._is_refusing:
            self._put_outcome(i, Outcome.SKIPPED)
            return
        if promised:
            self._work += sum(map(len, promised.block_ids))
            if not pool.is_still_cached(request, promised):
                self._put_outcome(i, Outcome.HIT_CHANGED)
                self._put_promise(i, request, pool.find_longest_cache_hit(request))
                return
        if row.has_taken and pool.state_managers and pool.config.enable_caching:  # each a step that has kept its state
            pool.cache_blocks(request, request.num_computed_tokens, sequence=self._sequence)
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
            return
        if row.num_prompt_tokens:
            pool.cache_prompt_states(request, row.num_computed_tokens, self._sequence)
        if promised and (held := pool.promoted(request, promised)) is not promised:
            self._put_blocks("num_prefix_blocks", i, held.block_ids)
        self._put_blocks("num_new_blocks", i, new)

    def admit(self, i: int, row: Row) -> None:
        if self._is_refusing or not self._budget_tokens:
            self._put_outcome(i, Outcome.SKIPPED)
            return
        request = row.request
        had_uncounted_lookup = request.has_uncounted_lookup
        request.has_uncounted_lookup = False  # an admission counts its own look-up
        admission = self._pool.admit(
            request,
            row.num_new_tokens or MAX_TOKENS,
            row.num_lookahead_tokens,
            budget_tokens=self._budget_tokens,
            max_promoted_blocks=self._step.max_promoted_blocks,
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
        self._column("num_new_tokens")[i] = admission.num_new_tokens
        self._put_hit(i, request, admission.computed)
        self._put_blocks("num_new_blocks", i, admission.new_blocks)

    def reserve(self, i: int, row: Row) -> None:
        new = self._pool.reserve(
            row.request,
            row.num_lookahead_tokens,
            may_take=not self._is_refusing,
            num_in_flight_tokens=row.options.num_in_flight_tokens,
            sequence=self._sequence,
        )
        self._put_blocks("num_new_blocks", i, new)

    def lookup(self, i: int, row: Row) -> None:
        if self._work >= MAX_STEP_WORK:
            self._put_outcome(i, Outcome.SKIPPED)
            return
        is_counted_now = row.operation is Operation.LOOKUP_COUNTED_AT_ONCE
        find = self._pool.get_computed_blocks if is_counted_now else self._pool.find_longest_cache_hit
        self._put_promise(i, row.request, find(row.request))
        row.request.has_uncounted_lookup = row.operation is Operation.LOOKUP

    def cache(self, _: int, row: Row) -> None:
        if self._pool.config.enable_caching:
            session, sequence, request = self._session, self._sequence, row.request
            if session.launched_sequence:  # every step is reported, also the one that filled these blocks
                sequence = request.filling_sequence
            self._pool.cache_blocks(request, row.num_new_tokens, sequence=sequence)
            if sequence <= session.executed_sequence:
                self._pool.blocks.prefix_map.pending.publish(session.session_number, session.executed_sequence)
            if request.holds_blocks:
                request.credit_tokens = self._pool.credit_tokens(request)

    def preempt(self, _: int, row: Row) -> None:
        self._withdraw_pending(row.request)
        self._pool.preempt(row.request)

    def free(self, _: int, row: Row) -> None:
        pool, request = self._pool, row.request
        is_cached = row.has_taken and request.reserve_tokens and pool.config.enable_caching
        # Work on credit has no number of its own. All of it was launched, also what a later step than that reported.
        if not (is_cached and self._launched):
            self._withdraw_pending(request)
        if is_cached and (self._launched or not self._session.reports_execution):
            pool.cache_blocks(request, row.num_computed_tokens, sequence=self._sequence)
        pool.free(request)
        self._session.forget(request)

    def _withdraw_pending(self, request: Request) -> None:
        session = self._session
        self._pool.withdraw_pending(request, session.launched_sequence, reports_execution=session.reports_execution)

    def append(self, _: int, row: Row) -> None:
        """Does nothing: the growth of every row is recorded."""

    def common_prefix(self, i: int, row: Row) -> None:
        if self._work >= MAX_STEP_WORK:
            self._put_outcome(i, Outcome.SKIPPED)
            return
        requests = self._session.requests.values()
        max_blocks = MAX_STEP_WORK // len(requests) * BLOCKS_COMPARED_PER_HASH
        num_blocks = sum(min(len(table.block_ids), max_blocks) for table in row.request.tables)
        self._work += len(requests) * (1 + num_blocks // BLOCKS_COMPARED_PER_HASH)
        running = (other for other in requests if other.holds_blocks)
        counts = self._pool.get_num_common_prefix_blocks(row.request, running, max_blocks)
        if any(counts):
            self._column("num_prefix_blocks", self._groups)[i * self._groups : (i + 1) * self._groups] = counts

    def _change_pool(self, i: int, row: PoolRow) -> None:
        if row.operation is Operation.EVICT:
            host = self._pool.blocks.host
            self._pool.blocks.evict_blocks([*row.block_ids, *host.copies_of(row.block_ids)] if host else row.block_ids)
        elif not self._pool.reset_prefix_cache():
            self._put_outcome(i, Outcome.IN_USE)

    def _refuse(self, i: int) -> None:
        holding = self._session.holding
        outcome = Outcome.OVER_QUOTA if holding and holding.is_over else Outcome.NO_BLOCKS
        if holding:
            holding.is_over = False  # another refusal may have another reason
        outcome = Outcome.NEVER_FITS if self._pool.take_refused_for_ever() else outcome
        self._put_outcome(i, outcome)
        if outcome is Outcome.NO_BLOCKS:
            for other in self._pool.sessions.values():
                other.owes_reserve |= other.reserve_tokens > 0 and other is not self._session
        self._out_of_blocks = True

    def _put_promise(self, i: int, request: Request, computed: ComputedBlocks) -> None:
        """Writes a hit that a later step can name by its blocks; the request keeps the other data of the hit."""
        request.shared_prefix_boundary_tokens = computed.shared_prefix_boundary_tokens or 0
        request.miss = computed.miss
        if self._pool.config.partial_hits:
            request.num_found_tokens = computed.num_tokens
        if computed.shared_prefix_boundary_tokens and self._pool.state_managers:
            self._column("shared_prefix_boundary_tokens")[i] = computed.shared_prefix_boundary_tokens
        self._put_hit(i, request, computed)

    def _put_hit(self, i: int, request: Request, computed: ComputedBlocks) -> None:
        if computed.num_tokens:
            self._column("num_hit_tokens")[i] = computed.num_tokens
        if computed.num_shared_tokens:
            self._column("num_shared_hit_tokens")[i] = computed.num_shared_tokens
        if self._pool.blocks.host:  # else a call, which each step pays
            num_host_tokens = computed.num_host_tokens or self._pool.num_host_tokens(computed)
            if num_host_tokens:
                self._column("num_host_hit_tokens")[i] = num_host_tokens
        self._work += computed.num_probes
        if self._pool.hit_curve:
            self._work += self._pool.hit_curve.max_sampled(len(request.hashes))
        self._put_blocks("num_prefix_blocks", i, computed.block_ids)

    def _put_blocks(self, name: str, i: int, blocks: Sequence[Sequence[BlockId]]) -> None:
        for j, block_ids in enumerate(blocks):
            if block_ids:
                self._column(name, self._groups)[i * self._groups + j] = len(block_ids)
                self._result.block_ids += block_ids
                self._work += len(block_ids)

    def _put_copies(self) -> None:
        """Writes the copies that the step makes."""
        copies = self._session.copies
        for copy in copies[bisect_left(copies, self._sequence, key=attrgetter("sequence")) :]:
            self._result.copied_block_ids += (copy.group_id, copy.source, copy.target)

    def _put_outcome(self, i: int, outcome: Outcome) -> None:
        self._column("outcomes")[i] = outcome

    def _put_credit(self, first: int, rows: Sequence[Row]) -> None:
        credit_tokens = [row.request.credit_tokens for row in rows]
        if self._gives_credit and any(credit_tokens):
            self._column("credit_tokens")[first : first + len(rows)] = credit_tokens

    def _column(self, name: str, num_per_row: int = 1) -> list[int]:
        """Returns a column of the result, with an entry for each row, or for each row and group."""
        column: list[int] = getattr(self._result, name)
        if not column:
            column += [0] * (self._num_rows * num_per_row)
        return column


_HANDLERS: Final[dict[Operation, Callable[[_Application, int, Row], None]]] = {
    **dict.fromkeys(LOOKING_UP, _Application.lookup),
    Operation.ADMIT: _Application.admit,
    Operation.ALLOCATE: _Application.allocate,
    Operation.RESERVE: _Application.reserve,
    Operation.CACHE: _Application.cache,
    Operation.FREE: _Application.free,
    Operation.PREEMPT: _Application.preempt,
    Operation.APPEND: _Application.append,
    Operation.COMMON_PREFIX: _Application.common_prefix,
}
