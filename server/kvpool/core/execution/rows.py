"""The rows of a step: its columns cut into one row per operation, each validated against the state.

1. Validation changes nothing. A step that passes can be applied without an error.
2. A step names a request at most once. Each row can therefore be validated against the state before the step. When it
   could name one several times, validation simulated the earlier operations, and their rules stood here and in `apply`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Generic, TypeAlias, TypeVar

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.errors import InvalidArgumentError, NotFoundError, WrongStateError, check_range
from kvpool.core.events import packed_token_ids
from kvpool.core.ids import MAX_BLOCKS, MAX_TOKENS, BlockHash, BlockId, RequestId, RequestNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, OPTION_COLUMNS, AllocationOptions
from kvpool.core.steps.columns import (
    DECLARING,
    LEAVING,
    LOOKING_UP,
    MAX_COPYING_MICROSECONDS,
    MAX_CREDIT_ALLOCATIONS,
    MAX_ID_BYTES,
    MAX_OPERATION_GROUPS,
    MAX_OPERATIONS,
    MAX_REQUEST_NUMBER,
    TRACE_CONTEXT_BYTES,
    Operation,
    Step,
)

_WITHOUT_REQUEST: Final = frozenset((Operation.EVICT, Operation.RESET))
_OPERATIONS: Final = {int(operation): operation for operation in Operation}
_COLUMNS: Final = (
    "request_numbers",
    "declares",
    "num_appended_tokens",
    "num_new_tokens",
    "num_taken_tokens",
    "num_rejected_tokens",
    "num_lookahead_tokens",
    "num_encoder_tokens",
    "delay_cache_blocks",
)
"""Columns that every row reads, in the order of the parameters of `_StepReader._row`."""

_BlockIds: TypeAlias = tuple[list[BlockId], ...]
_EntriesT = TypeVar("_EntriesT", bytes, list[int], list[str])


@dataclass(slots=True)
class PoolRow:
    """A valid operation on the pool.

    Attributes:
        operation: EVICT or RESET.
        block_ids: EVICT: the blocks.
        is_plain: See `Row`.
    """

    operation: Operation
    block_ids: Sequence[BlockId]
    is_plain: bool = False


class Row:
    """A valid operation on a request.

    Attributes:
        operation: Kind of the operation.
        request: The request.
        is_plain: Whether it is an allocation for a running request without a hit, options or encoder tokens, such as a
            decode.
        is_new: Whether the operation declares the request, which is not yet in its session.
        num_tokens: Known tokens of the request, the appended ones included.
        num_prompt_tokens: See `Step`.
        num_computed_tokens: Its computed tokens before the operation, without rejected ones.
        has_taken: Whether the request took tokens on credit since it was last named.
        hashes: Hashes of the blocks that the appended tokens fill.
        sampled: Those of the hashes that the pool's `HitCurve` samples.
        token_ids: The appended tokens, if the pool makes events.
        num_new_tokens: See `Step`.
        num_lookahead_tokens: See `Step`.
        num_encoder_tokens: See `Step`.
        delay_cache_blocks: See `Step`.
        options: Options of the allocation.
        promised: ALLOCATE: the hit that an earlier look-up returned.
    """

    # Class attributes as defaults, since most are never set.
    is_plain: bool = False
    is_new: bool = False
    has_taken: bool = False
    hashes: Sequence[BlockHash] = ()
    sampled: Sequence[BlockHash] = ()
    token_ids: Sequence[int] = ()
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_lookahead_tokens: int = 0
    num_encoder_tokens: int = 0
    delay_cache_blocks: bool = False
    options: AllocationOptions = DEFAULT_OPTIONS
    promised: ComputedBlocks | None = None

    def __init__(self, operation: Operation, request: Request) -> None:
        self.operation = operation
        self.request = request
        self.num_tokens = request.num_tokens
        self.num_computed_tokens = request.num_computed_tokens


def read_rows(pool: KVCacheManager, session: Session, step: Step) -> tuple[list[Row | PoolRow], int]:
    """Cuts a step into its rows, and validates them.

    Returns:
        The rows, and the known tokens of the requests that ADMIT names, together.

    Raises:
        InvalidArgumentError: A field is malformed or out of range.
        NotFoundError: A request is unknown.
        WrongStateError: A request holds blocks where it must not.
    """
    reader = _StepReader(pool, session, step)
    return reader.rows(), reader.num_admitted_tokens


class _Queue(Generic[_EntriesT]):
    """The entries of a queue of a step, taken in the order of the operations.

    Attributes:
        name: Name of the field.
        entries: The entries.
        at: Number of entries that were taken.
    """

    __slots__ = ("at", "entries", "name")

    def __init__(self, name: str, entries: _EntriesT) -> None:
        self.name = name
        self.entries: _EntriesT = entries
        self.at = 0

    def take(self, count: int) -> _EntriesT:
        """Takes the next entries.

        Raises:
            InvalidArgumentError: The queue is too short.
        """
        end = self.at + count
        if end > len(self.entries):
            raise InvalidArgumentError(self.name, f"{self.given}; the operations need more")
        taken: _EntriesT = self.entries[self.at : end]
        self.at = end
        return taken

    @property
    def given(self) -> str:
        """How many entries there are, for an error."""
        return f"{len(self.entries)} {'bytes' if isinstance(self.entries, bytes) else 'entries'}"


class _StepReader:
    """Reads one step.

    Attributes:
        num_admitted_tokens: See `read_rows`.
    """

    def __init__(self, pool: KVCacheManager, session: Session, step: Step) -> None:
        self._pool = pool
        self._session = session
        self._step = step
        self._by_number: dict[int, Request] = session.by_number  # type: ignore[assignment]  # NewType is slow to call
        self._max_tokens = pool.config.max_model_len
        self._hash_block_size = pool.hash_block_size
        self._hash_size_bytes = pool.hash_size_bytes
        self._hit_curve = pool.hit_curve
        self._lookahead_tokens = pool.config.hash_scheme.num_lookahead_tokens
        self._makes_events = pool.blocks.contents is not None
        self._has_options = any([getattr(step, name) for name in OPTION_COLUMNS])  # noqa: C419 - a generator is slower
        self.num_admitted_tokens = 0
        self._is_in_use: dict[RequestId, bool] = {}
        """Whether ids that earlier rows declare or free are in use."""
        self._hashes = _Queue("block_hashes", step.block_hashes)
        self._token_ids = _Queue("token_ids", step.token_ids)
        self._request_ids = _Queue("request_ids", step.request_ids)
        self._lora_names = _Queue("lora_names", step.lora_names)
        self._block_ids = _Queue("block_ids", step.block_ids)

    def rows(self) -> list[Row | PoolRow]:
        step, count = self._step, len(self._step.operations)
        self._check_header(count)
        columns = self._columns(count)
        repeated = self._first_repeated()
        entries = enumerate(zip(step.operations, *columns, strict=True))
        # Rows before a repeated one are read first, so that the error reported is that of the first row at fault.
        rows = [self._row(i, *values) for i, values in islice(entries, repeated)]
        if repeated is not None:
            message = f"{step.request_numbers[repeated]} is named twice; a step names a request at most once"
            raise InvalidArgumentError(f"request_numbers[{repeated}]", message, reason="REQUEST_NAMED_TWICE")
        if step.num_prompt_tokens:
            self._read_prompts(rows)
        for queue in (self._hashes, self._token_ids, self._request_ids, self._lora_names, self._block_ids):
            if queue.at != len(queue.entries):
                raise InvalidArgumentError(queue.name, f"{queue.given}; the operations take {queue.at}")
        return rows

    def _read_prompts(self, rows: Sequence[Row | PoolRow]) -> None:
        """Reads the lengths of prompts, a column that is mostly empty."""
        for i, (row, num_tokens) in enumerate(zip(rows, self._step.num_prompt_tokens, strict=True)):
            most = 0 if isinstance(row, PoolRow) or row.operation in LEAVING else row.num_tokens
            check_range(f"num_prompt_tokens[{i}]", num_tokens, 0, most)
            if isinstance(row, Row) and num_tokens:
                row.num_prompt_tokens, row.is_plain = num_tokens, False

    def _check_header(self, count: int) -> None:
        step, groups = self._step, len(self._pool.config.groups)
        check_range("operations", count, 0, min(MAX_OPERATIONS, MAX_OPERATION_GROUPS // groups))
        wanted = count * groups
        if step.num_block_ids and len(step.num_block_ids) != wanted:
            raise InvalidArgumentError("num_block_ids", f"{len(step.num_block_ids)} entries; needs 0 or {wanted}")
        for name, value, most in (
            ("executed_sequence", step.executed_sequence, self._session.sequence),
            ("launched_sequence", step.launched_sequence, self._session.sequence + 1),
            ("admission_budget_tokens", step.admission_budget_tokens, MAX_TOKENS),
            ("num_credit_allocations", step.num_credit_allocations, MAX_CREDIT_ALLOCATIONS),
            ("max_promoted_blocks", step.max_promoted_blocks, MAX_TOKENS),
            ("copying_out_microseconds", step.copying_out_microseconds, MAX_COPYING_MICROSECONDS),
            ("copying_in_microseconds", step.copying_in_microseconds, MAX_COPYING_MICROSECONDS),
        ):
            if not 0 <= value <= most:  # mostly true, and a call takes longer
                check_range(name, value, 0, most)
        if step.trace_contexts and len(step.trace_contexts) != len(step.request_ids) * TRACE_CONTEXT_BYTES:
            message = f"{len(step.trace_contexts)} bytes for {len(step.request_ids)} requests"
            raise InvalidArgumentError("trace_contexts", f"{message}; needs none, or {TRACE_CONTEXT_BYTES} for each")

    def _columns(self, count: int) -> list[Sequence[int]]:
        """Returns `_COLUMNS`, with zeros for those that are empty. Checks the length of these, and of the options."""
        step, zeros, columns = self._step, [0] * count, []
        names = (*_COLUMNS, *OPTION_COLUMNS) if self._has_options else _COLUMNS
        for name in (*names, "num_prompt_tokens") if step.num_prompt_tokens else names:
            column = getattr(step, name) or zeros
            if len(column) != count:
                raise InvalidArgumentError(name, f"{len(column)} entries for {count} operations; needs 0 or {count}")
            columns.append(column)
        return columns[: len(_COLUMNS)]

    def _first_repeated(self) -> int | None:
        """Returns the first row that names the request of an earlier row; None if no row does."""
        numbers = self._step.request_numbers
        if len(set(numbers)) == len(numbers):
            return None
        named = set[int]()
        for i, number in enumerate(numbers):
            if number in named:
                return i
            if number:
                named.add(number)
        return None

    def _row(  # noqa: PLR0913, PLR0917 - one parameter per column
        self,
        i: int,
        code: int,
        number: int,
        declares: bool,  # noqa: FBT001 - a column
        appended: int,
        new: int,
        taken: int,
        rejected: int,
        lookahead: int,
        encoder: int,
        delay: bool,  # noqa: FBT001 - a column
    ) -> Row | PoolRow:
        operation = _OPERATIONS.get(code)
        if operation is None:
            raise InvalidArgumentError(f"operations[{i}]", f"{code} is not an operation")
        block_ids = self._take_block_ids(i, operation) if self._step.num_block_ids else ()
        if operation in _WITHOUT_REQUEST:
            if number or declares or appended or taken or rejected:
                raise InvalidArgumentError(f"request_numbers[{i}]", f"{operation.name} names no request")
            return PoolRow(operation, [block_id for ids in block_ids for block_id in ids])

        request = self._declare(i, operation, number) if declares else self._by_number.get(number)
        if request is None:
            message = f"the session has no request {number}"
            raise NotFoundError("REQUEST_NOT_FOUND", message, field=f"request_numbers[{i}]")
        row = Row(operation, request)
        row.is_new = declares
        row.num_new_tokens, row.num_lookahead_tokens = new, lookahead
        row.num_encoder_tokens, row.delay_cache_blocks = encoder, delay
        if delay and request.reserve_tokens:  # a report would cache them
            raise InvalidArgumentError(f"delay_cache_blocks[{i}]", "needs a session without reserve_tokens")
        if appended:
            self._read_appended(i, row, appended)
        if taken:
            self._read_taken(i, row, taken)
        if rejected:
            self._read_rejected(i, row, rejected)
        check = _CHECKS.get(operation)
        if check:
            check(self, i, row, block_ids)
        return row

    def _declare(self, i: int, operation: Operation, number: int) -> Request:
        if operation not in DECLARING:
            raise InvalidArgumentError(f"declares[{i}]", f"{operation.name} declares no request")
        if number >= 0:  # negative: chosen by the server, for a request that steps cannot name
            check_range(f"request_numbers[{i}]", number, 1, MAX_REQUEST_NUMBER)
        if RequestNumber(number) in self._session.by_number:
            raise InvalidArgumentError(f"request_numbers[{i}]", f"{number} is in use", reason="REQUEST_NUMBER_IN_USE")
        at = self._request_ids.at
        request_id = RequestId(self._request_ids.take(1)[0])
        check_range(f"request_ids[{at}]", len(request_id.encode("utf-8", "surrogatepass")), 1, MAX_ID_BYTES)
        # A step may free a request and declare another one with the same id, in this order.
        if self._is_in_use.get(request_id, request_id in self._session.requests):
            raise InvalidArgumentError(f"request_ids[{at}]", f"{request_id!r} is in use", reason="REQUEST_ID_IN_USE")
        self._is_in_use[request_id] = True
        lora_name = self._lora_names.take(1)[0] if self._step.lora_names else ""
        check_range(f"lora_names[{at}]", len(lora_name.encode("utf-8", "surrogatepass")), 0, MAX_ID_BYTES)
        trace_context = self._step.trace_contexts[at * TRACE_CONTEXT_BYTES : (at + 1) * TRACE_CONTEXT_BYTES]
        return Request(
            request_id,
            RequestNumber(number),
            self._session.session_number,
            self._pool.new_tables(),
            lora_name=lora_name or None,
            trace_context=trace_context,
            holding=self._session.holding,
            first_map=self._session.first_map,
            copies=self._session.copies,
            reserve_tokens=self._session.reserve_tokens,
        )

    def _read_appended(self, i: int, row: Row, appended: int) -> None:
        before, size_bytes = row.num_tokens, self._hash_size_bytes
        if not 0 <= appended <= self._max_tokens - before:
            check_range(f"num_appended_tokens[{i}]", appended, 0, self._max_tokens - before)
        row.num_tokens = before + appended
        # One hash per hash block that [before, before + appended) completes; it may have begun earlier. A hash that
        # also covers tokens after its block comes with the last of these.
        first, end, lookahead = before, row.num_tokens, self._lookahead_tokens
        if lookahead:
            first, end = max(first - lookahead, 0), max(end - lookahead, 0)
        count = end // self._hash_block_size - first // self._hash_block_size
        if count and size_bytes:
            joined = self._hashes.take(count * size_bytes)
            if count == 1:  # the usual case of a decode
                row.hashes = [joined]  # type: ignore[list-item]  # NewType is slow to call
                if self._hit_curve and self._hit_curve.marks[joined[self._hit_curve.at]]:
                    row.sampled = self._hit_curve.sample(joined)
            else:
                row.hashes = [joined[at : at + size_bytes] for at in range(0, len(joined), size_bytes)]  # type: ignore[misc]  # as above
                if self._hit_curve:
                    row.sampled = self._hit_curve.sample(joined)
        if self._makes_events:
            row.token_ids = self._token_ids.take(appended)
            try:
                packed_token_ids(row.token_ids)
            except (OverflowError, TypeError):
                raise InvalidArgumentError("token_ids", "an id is not in [0, 2^32)") from None

    def _read_taken(self, i: int, row: Row, taken: int) -> None:
        left = row.request.credit_tokens - row.num_computed_tokens
        if not 0 <= taken <= left:  # the field name is formatted only for an error
            check_range(f"num_taken_tokens[{i}]", taken, 0, max(left, 0))
        row.num_computed_tokens += taken
        row.has_taken = True

    def _read_rejected(self, i: int, row: Row, rejected: int) -> None:
        where = f"num_rejected_tokens[{i}]"
        check_range(where, rejected, 0, row.num_computed_tokens)
        row.num_computed_tokens -= rejected
        if not self._pool.can_reject(row.request, row.num_computed_tokens):
            message = f"{rejected} tokens reach back behind a window whose blocks are freed, or before a cached state"
            raise InvalidArgumentError(where, message)

    def check_admission(self, i: int, row: Row, _: _BlockIds) -> None:
        self._read_options(i, row)
        check_range(f"num_new_tokens[{i}]", row.num_new_tokens, 0, self._max_tokens)
        _check_without_blocks(i, row)
        check_range(f"num_appended_tokens[{i}]", row.num_tokens, 1, self._max_tokens)
        self.num_admitted_tokens += row.num_tokens

    def check_allocation(self, i: int, row: Row, promised: _BlockIds) -> None:
        #   0                                            num_before                   max_model_len
        #   |--- computed, or the promised hit ---|--- external ---|--- new ---|--- look-ahead
        #
        # Look-ahead slots are cut at max_model_len, as in vLLM; everything before them must fit.
        num_before, lowest = row.num_computed_tokens, 1
        if self._has_options or row.num_lookahead_tokens or row.num_encoder_tokens:
            self._read_options(i, row)
        if promised:
            _check_without_blocks(i, row)
            groups = len(promised)
            hit_tokens = self._pool.check_computed_blocks(
                lambda j: f"num_block_ids[{i * groups + j}]", promised, row.request.num_found_tokens
            )
            # The last token is always computed: its output is the next token.
            check_range(f"num_block_ids[{i}]", hit_tokens, 0, row.num_tokens - 1)
            row.promised = ComputedBlocks(promised, hit_tokens)
            num_before, lowest = num_before + hit_tokens, 0
        num_external = row.options.num_external_tokens
        if num_external:
            check_range(f"num_external_tokens[{i}]", num_external, 0, self._max_tokens - num_before)
            num_before, lowest = num_before + num_external, 0
        if not lowest <= row.num_new_tokens <= self._max_tokens - num_before:
            check_range(f"num_new_tokens[{i}]", row.num_new_tokens, lowest, self._max_tokens - num_before)
        is_running, has_options = row.num_computed_tokens > 0, row.options is not DEFAULT_OPTIONS
        row.is_plain = is_running and not (has_options or row.num_encoder_tokens or row.delay_cache_blocks)

    def _check_external(self, i: int, row: Row) -> None:
        message = ""
        if row.operation is Operation.ADMIT or _is_admitted(row):
            message = "allowed only in an allocation for a request without blocks"
        elif self._pool.state_managers:
            message = "not allowed where only states at the ends of steps are kept"
        if message:
            raise InvalidArgumentError(f"num_external_tokens[{i}]", message)

    def _read_options(self, i: int, row: Row) -> None:
        """Reads the options of an allocation, and checks them and the tokens that it needs besides the new ones."""
        values = {}
        if self._has_options:
            values = {name: column[i] for name in OPTION_COLUMNS if (column := getattr(self._step, name))}
        if any(values.values()):
            options = row.options = AllocationOptions(**values)
            if options.num_external_tokens:
                self._check_external(i, row)
            check_range(f"num_external_tokens[{i}]", options.num_external_tokens, 0, self._max_tokens)
            check_range(f"num_in_flight_tokens[{i}]", options.num_in_flight_tokens, 0, self._max_tokens)
            check_range(f"num_reserved_blocks[{i}]", options.num_reserved_blocks, 0, MAX_BLOCKS)
            check_range(f"num_watermark_blocks[{i}]", options.num_watermark_blocks, 0, MAX_BLOCKS)
        if row.num_lookahead_tokens or row.num_encoder_tokens:
            check_range(f"num_lookahead_tokens[{i}]", row.num_lookahead_tokens, 0, self._max_tokens)
            check_range(f"num_encoder_tokens[{i}]", row.num_encoder_tokens, 0, MAX_TOKENS)

    def check_reserve(self, i: int, row: Row, _: _BlockIds) -> None:
        if not self._session.reserve_tokens:
            raise InvalidArgumentError(f"operations[{i}]", "RESERVE needs a session with reserve_tokens")
        self._read_options(i, row)
        check_range(f"num_new_tokens[{i}]", row.num_new_tokens, 0, 0)
        if not _is_admitted(row):
            message = f"request {row.request.request_id!r} holds no blocks, so it holds none in reserve"
            raise WrongStateError("REQUEST_HOLDS_NO_BLOCKS", message, field=f"request_numbers[{i}]")

    def check_cache(self, i: int, row: Row, _: _BlockIds) -> None:
        check_range(f"num_new_tokens[{i}]", row.num_new_tokens, 0, row.num_computed_tokens)

    def check_lookup(self, i: int, row: Row, _: _BlockIds) -> None:
        _check_without_blocks(i, row)

    def note_free(self, _: int, row: Row, __: _BlockIds) -> None:
        self._is_in_use[row.request.request_id] = False

    def _take_block_ids(self, i: int, operation: Operation) -> _BlockIds:
        groups, num_ids = len(self._pool.config.groups), self._pool.config.num_ids
        counts = self._step.num_block_ids[i * groups : (i + 1) * groups]
        if not any(counts):
            return ()
        if operation not in (Operation.ALLOCATE, Operation.EVICT):
            raise InvalidArgumentError(f"num_block_ids[{i * groups}]", f"{operation.name} takes no blocks")
        lowest = int(operation is Operation.EVICT)
        taken = []
        for j, count in enumerate(counts, i * groups):
            first = self._block_ids.at
            maximum = min(num_ids if lowest else MAX_BLOCKS, len(self._step.block_ids) - first)
            check_range(f"num_block_ids[{j}]", count, 0, maximum)
            block_ids: list[BlockId] = self._block_ids.take(count)  # type: ignore[assignment]  # NewType is slow to call
            if block_ids and not lowest <= min(block_ids) <= max(block_ids) < num_ids:
                for at, block_id in enumerate(block_ids, first):
                    check_range(f"block_ids[{at}]", block_id, lowest, num_ids - 1)
            taken.append(block_ids)
        return tuple(taken)


def _is_admitted(row: Row) -> bool:
    """Whether the request has slots. With cross attention only, it can have slots without blocks."""
    return row.num_computed_tokens > 0 or row.request.holds_blocks


def _check_without_blocks(i: int, row: Row) -> None:
    if _is_admitted(row):
        raise WrongStateError(
            "REQUEST_HOLDS_BLOCKS",
            f"request {row.request.request_id!r} holds blocks already and cannot take a hit",
            field=f"request_numbers[{i}]",
        )


_CHECKS: Final[dict[Operation, Callable[[_StepReader, int, Row, _BlockIds], None]]] = {
    Operation.ADMIT: _StepReader.check_admission,
    Operation.ALLOCATE: _StepReader.check_allocation,
    Operation.CACHE: _StepReader.check_cache,
    Operation.RESERVE: _StepReader.check_reserve,
    Operation.FREE: _StepReader.note_free,
    **dict.fromkeys(LOOKING_UP, _StepReader.check_lookup),
}
"""The checks of an operation after its growth, with its block ids per group."""
