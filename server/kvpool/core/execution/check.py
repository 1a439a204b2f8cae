"""Validation of a step: checks the whole step before any change, and resolves its requests.

1. Validation changes no pool, no session and no request in a session.
2. A step that passes can be applied without an error.
3. A request grows and allocates at most once per step, so that all operations can be checked in advance.
"""

from dataclasses import dataclass
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.errors import InvalidArgumentError, NotFoundError, WrongStateError, check_range
from kvpool.core.events import packed_token_ids
from kvpool.core.execution.allocate_batch import AllocationBatch
from kvpool.core.ids import MAX_BLOCKS, MAX_TOKENS, BlockHash, BlockId, RequestId, RequestNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, OPTION_COLUMNS, AllocationOptions
from kvpool.core.steps.columns import (
    MAX_CREDIT_ALLOCATIONS,
    MAX_ID_BYTES,
    MAX_OPERATION_GROUPS,
    MAX_OPERATIONS,
    MAX_REQUEST_NUMBER,
    Operation,
    Step,
)

_WITHOUT_REQUEST: Final = frozenset((Operation.EVICT, Operation.RESET))
_ALLOCATING: Final = frozenset((Operation.ADMIT, Operation.ALLOCATE))
_LOOKING_UP: Final = frozenset((Operation.LOOKUP, Operation.LOOKUP_UNCOUNTED, Operation.LOOKUP_COUNTED_ON_ADMIT))
_FREEING: Final = frozenset((Operation.FREE, Operation.PREEMPT))
_OPERATIONS: Final = {int(operation): operation for operation in Operation}
_COLUMNS: Final = (
    "request_numbers",
    "num_appended_tokens",
    "num_new_tokens",
    "num_taken_tokens",
    "num_rejected_tokens",
    "num_lookahead_tokens",
    "num_encoder_tokens",
    "delay_cache_blocks",
    *OPTION_COLUMNS,
)


class CheckedOperation:
    """One valid operation, ready to be applied.

    Attributes:
        operation: Kind of the operation.
        request: The request, if the operation has one; for ADD it is not yet in its session.
        num_appended_tokens: Tokens to append before the operation.
        hashes: Hashes of the blocks that these tokens fill.
        token_ids: The appended tokens, if the pool makes events.
        num_new_tokens: See `Step`.
        num_taken_tokens: See `Step`.
        num_rejected_tokens: See `Step`.
        num_lookahead_tokens: See `Step`.
        num_encoder_tokens: See `Step`.
        delay_cache_blocks: See `Step`.
        options: Options of the allocation.
        promised: ALLOCATE: the hit that an earlier look-up returned.
        block_ids: EVICT: the blocks.
    """

    # Class attributes as defaults, since most are never set.
    num_appended_tokens: int = 0
    hashes: list[BlockHash] | None = None
    token_ids: list[int] | None = None
    num_new_tokens: int = 0
    num_taken_tokens: int = 0
    num_rejected_tokens: int = 0
    num_lookahead_tokens: int = 0
    num_encoder_tokens: int = 0
    delay_cache_blocks: bool = False
    options: AllocationOptions = DEFAULT_OPTIONS
    promised: ComputedBlocks | None = None
    block_ids: list[BlockId] | None = None

    def __init__(self, operation: Operation, request: Request | None) -> None:
        self.operation = operation
        self.request = request


@dataclass(slots=True)
class _Seen:
    """The state of a request after the earlier operations of the step."""

    request: Request
    num_tokens: int
    num_computed_tokens: int
    holds_blocks: bool
    allocated: bool = False
    is_freed: bool = False
    is_repeated: bool = False

    @property
    def is_admitted(self) -> bool:
        """Whether the request has slots. With cross attention only, it can have slots without blocks."""
        return self.holds_blocks or self.num_computed_tokens > 0


class StepChecker:
    """Validates one step against its session and pool."""

    def __init__(self, pool: KVCacheManager, session: Session, step: Step) -> None:
        self._pool = pool
        self._session = session
        self._step = step
        self._seen: dict[int, _Seen | CheckedOperation] = {}
        self._max_tokens = pool.config.max_model_len
        self._hash_size_bytes = pool.config.hash_scheme.hash_size_bytes if pool.config.enable_caching else 0
        self._makes_events = pool.config.makes_events
        self._has_options = any([getattr(step, name) for name in OPTION_COLUMNS])  # noqa: C419 - a generator is slower
        self._ids: dict[RequestId, bool] = {}
        self._hash_at = 0
        self._token_at = 0
        self._id_at = 0
        self._block_at = 0

    def check(self) -> list[CheckedOperation | AllocationBatch]:
        """Validates the step.

        Returns:
            The operations, in order. Consecutive plain allocations are one `AllocationBatch`.

        Raises:
            InvalidArgumentError: A field is malformed or out of range.
            NotFoundError: A request is unknown.
            WrongStateError: A request holds blocks where it must not, or holds none where it must.
        """
        step = self._step
        count = len(step.operations)
        groups = len(self._pool.config.groups)
        check_range("operations", count, 0, min(MAX_OPERATIONS, MAX_OPERATION_GROUPS // groups))
        for name in _COLUMNS:
            column = getattr(step, name)
            if column and len(column) != count:
                raise InvalidArgumentError(name, f"{len(column)} entries for {count} operations; needs 0 or {count}")
        wanted = count * groups
        if step.num_block_ids and len(step.num_block_ids) != wanted:
            raise InvalidArgumentError("num_block_ids", f"{len(step.num_block_ids)} entries; needs 0 or {wanted}")
        self._session.check_executed(step.executed_sequence, self._session.sequence)
        self._session.check_launched(step.launched_sequence)
        check_range("admission_budget_tokens", step.admission_budget_tokens, 0, MAX_TOKENS)
        check_range("num_credit_allocations", step.num_credit_allocations, 0, MAX_CREDIT_ALLOCATIONS)

        at = step.operations.index(Operation.ALLOCATE) if Operation.ALLOCATE in step.operations else count
        checked: list[CheckedOperation | AllocationBatch] = [*self._check_rows(0, at)]
        batch = AllocationBatch.from_step(self._pool, self._session, step, at, self._hash_at)
        if batch:
            checked.append(batch)
            self._hash_at += batch.num_hash_bytes
            at += len(batch)
        checked += self._check_rows(at, count)
        self._check_all_used()
        return checked

    def _check_rows(self, first: int, last: int) -> list[CheckedOperation]:
        """Checks the operations [first, last) one by one."""
        if first == last:
            return []
        step, zeros = self._step, [0] * (last - first)
        rows = zip(
            step.operations[first:last],
            step.request_numbers[first:last] or zeros,
            step.num_appended_tokens[first:last] or zeros,
            step.num_new_tokens[first:last] or zeros,
            step.num_taken_tokens[first:last] or zeros,
            step.num_rejected_tokens[first:last] or zeros,
            step.num_lookahead_tokens[first:last] or zeros,
            step.num_encoder_tokens[first:last] or zeros,
            step.delay_cache_blocks[first:last] or [False] * (last - first),
            strict=True,
        )
        is_plain = not (
            step.num_block_ids
            or step.num_rejected_tokens
            or step.num_lookahead_tokens
            or step.num_encoder_tokens
            or step.delay_cache_blocks
            or self._has_options
        )
        check = self._check_plain if is_plain else self._check_row
        return [check(i, *row) for i, row in enumerate(rows, first)]

    def _check_plain(  # noqa: PLR0913, PLR0917 - one parameter per column
        self, i: int, code: int, number: int, appended: int, new: int, taken: int, *_: int
    ) -> CheckedOperation:
        """Checks an operation of a step that has no other columns; most are decodes, with a short check."""
        request = self._session.by_number.get(number)  # type: ignore[call-overload]  # a call of NewType is slow
        if (
            code != Operation.ALLOCATE
            or request is None
            or number in self._seen
            or not request.num_computed_tokens
            or not 1 <= new <= self._max_tokens - request.num_computed_tokens - taken
        ):
            return self._check_row(i, code, number, appended, new, taken, 0, 0, 0, delay=False)
        row = CheckedOperation(Operation.ALLOCATE, request)
        if appended:
            self._check_growth(i, row, request.num_tokens, appended)
        if taken:
            self._check_taken(i, row, request, taken)
        row.num_new_tokens = new
        self._seen[number] = row
        return row

    def _check_row(  # noqa: PLR0913, PLR0917 - one parameter per column
        self,
        i: int,
        code: int,
        number: int,
        appended: int,
        new: int,
        taken: int,
        rejected: int,
        lookahead: int,
        encoder: int,
        delay: bool,  # noqa: FBT001 - a column
    ) -> CheckedOperation:
        operation = _OPERATIONS.get(code)
        if operation is None:
            raise InvalidArgumentError(f"operations[{i}]", f"{code} is not an operation")
        block_ids = self._take_block_ids(i, operation) if self._step.num_block_ids else ()
        if operation in _WITHOUT_REQUEST:
            if number or appended or taken or rejected:
                raise InvalidArgumentError(f"request_numbers[{i}]", f"{operation.name} names no request")
            row = CheckedOperation(operation, None)
            row.block_ids = block_ids[0] if block_ids else []
            return row

        seen = self._add(i, number) if operation is Operation.ADD else self._resolve(i, number)
        row = CheckedOperation(operation, seen.request)
        if appended or taken or rejected:
            self._check_growth_columns(i, row, seen, appended, taken, rejected)
        if operation in _ALLOCATING:
            if self._has_options:
                row.options = self._options_of(i, operation, seen)
            maximum = self._max_tokens
            minimum = 1 if operation is Operation.ALLOCATE and not row.options.num_external_tokens else 0
            if not minimum <= new <= maximum:  # the field name is formatted only for an error
                check_range(f"num_new_tokens[{i}]", new, minimum, maximum)
            if lookahead or encoder:
                check_range(f"num_lookahead_tokens[{i}]", lookahead, 0, maximum)
                check_range(f"num_encoder_tokens[{i}]", encoder, 0, MAX_TOKENS)
                row.num_lookahead_tokens, row.num_encoder_tokens = lookahead, encoder
            row.num_new_tokens, row.delay_cache_blocks = new, delay
            self._check_allocation(i, row, seen, block_ids)
        else:
            self._check_other(i, row, seen, new)
        return row

    def _check_growth_columns(  # noqa: PLR0913, PLR0917 - one parameter per column
        self, i: int, row: CheckedOperation, seen: _Seen, appended: int, taken: int, rejected: int
    ) -> None:
        """Checks the columns that change a request before its operation."""
        if appended:
            if seen.num_tokens != seen.request.num_tokens:
                raise InvalidArgumentError(f"num_appended_tokens[{i}]", "the request already grew in this step")
            self._check_growth(i, row, seen.num_tokens, appended)
            seen.num_tokens += appended
        if taken:
            if seen.is_repeated:
                raise InvalidArgumentError(f"num_taken_tokens[{i}]", "an earlier operation names the request")
            self._check_taken(i, row, seen.request, taken)
            seen.num_computed_tokens += taken
        if rejected:
            self._check_rejected(i, row, seen, rejected)

    def _check_other(self, i: int, row: CheckedOperation, seen: _Seen, new: int) -> None:
        operation = row.operation
        if operation is Operation.CACHE:
            row.num_new_tokens = check_range(f"num_new_tokens[{i}]", new, 0, seen.num_computed_tokens)
        elif operation in _LOOKING_UP and seen.is_admitted:
            raise _holds_blocks(i, seen.request)
        elif operation in _FREEING:
            seen.holds_blocks = False
            seen.num_computed_tokens = 0
            seen.is_freed = operation is Operation.FREE
            if seen.is_freed:
                self._ids[seen.request.request_id] = False

    def _add(self, i: int, number: int) -> _Seen:
        if number >= 0:  # negative: chosen by the server, for a request that steps cannot name
            check_range(f"request_numbers[{i}]", number, 1, MAX_REQUEST_NUMBER)
        earlier = self._earlier(number)
        if not earlier.is_freed if earlier else RequestNumber(number) in self._session.by_number:
            raise InvalidArgumentError(f"request_numbers[{i}]", f"{number} is in use", reason="REQUEST_NUMBER_IN_USE")
        at, step = self._id_at, self._step
        if at >= len(step.request_ids):
            raise InvalidArgumentError("request_ids", f"{len(step.request_ids)} ids, the operations need more")
        request_id = RequestId(step.request_ids[at])
        check_range(f"request_ids[{at}]", len(request_id.encode("utf-8", "surrogatepass")), 1, MAX_ID_BYTES)
        if self._ids.get(request_id, request_id in self._session.requests):
            raise InvalidArgumentError(f"request_ids[{at}]", f"{request_id!r} is in use", reason="REQUEST_ID_IN_USE")
        lora_name = None
        if step.lora_names:
            if at >= len(step.lora_names):
                raise InvalidArgumentError("lora_names", "needs 0 entries or one for each added request")
            lora_name = step.lora_names[at] or None
            check_range(f"lora_names[{at}]", len((lora_name or "").encode("utf-8", "surrogatepass")), 0, MAX_ID_BYTES)
        self._id_at += 1
        self._ids[request_id] = True
        request = Request(
            request_id,
            RequestNumber(number),
            self._session.session_number,
            self._pool.new_tables(),
            lora_name=lora_name,
            holding=self._session.holding,
        )
        seen = self._seen[number] = _Seen(request, 0, 0, holds_blocks=False)
        return seen

    def _earlier(self, number: int) -> _Seen | None:
        """The state of a request after the earlier operations of the step; None if they do not name it."""
        seen = self._seen.get(number)
        if isinstance(seen, CheckedOperation) and seen.request:
            request = seen.request
            num_computed = request.num_computed_tokens + seen.num_taken_tokens + seen.num_new_tokens
            num_tokens = request.num_tokens + seen.num_appended_tokens
            seen = self._seen[number] = _Seen(request, num_tokens, num_computed, holds_blocks=True, allocated=True)
        return seen  # type: ignore[return-value]

    def _resolve(self, i: int, number: int) -> _Seen:
        seen = self._earlier(number)
        if seen is None:
            request = self._session.by_number.get(RequestNumber(number))
            if request is not None:
                seen = _Seen(request, request.num_tokens, request.num_computed_tokens, request.holds_blocks)
                self._seen[number] = seen
        else:
            seen.is_repeated = True
        if seen is None or seen.is_freed:
            raise NotFoundError(
                "REQUEST_NOT_FOUND",
                f"the session has no request {number}",
                field=f"request_numbers[{i}]",
            )
        return seen

    def _check_growth(self, i: int, row: CheckedOperation, before: int, appended: int) -> None:
        step, hash_block_size = self._step, self._pool.hash_block_size
        if not 0 <= appended <= self._max_tokens - before:
            check_range(f"num_appended_tokens[{i}]", appended, 0, self._max_tokens - before)
        row.num_appended_tokens = appended
        size_bytes = self._hash_size_bytes
        count = (before + appended) // hash_block_size - before // hash_block_size if size_bytes else 0
        if count:
            joined, at = step.block_hashes, self._hash_at
            self._hash_at = end = at + count * size_bytes
            if end > len(joined):
                message = f"{len(joined)} bytes; the operations need more, {size_bytes} a hash"
                raise InvalidArgumentError("block_hashes", message)
            if count == 1:
                row.hashes = [joined[at:end]]  # type: ignore[list-item]
            else:
                row.hashes = [joined[j : j + size_bytes] for j in range(at, end, size_bytes)]  # type: ignore[misc]
        if self._makes_events:
            end = self._token_at + appended
            if end > len(step.token_ids):
                raise InvalidArgumentError("token_ids", f"{len(step.token_ids)} ids; the appended tokens are more")
            row.token_ids = step.token_ids[self._token_at : end]
            try:
                packed_token_ids(row.token_ids)
            except (OverflowError, TypeError):
                raise InvalidArgumentError("token_ids", "an id is not in [0, 2^32)") from None
            self._token_at = end

    def _check_taken(self, i: int, row: CheckedOperation, request: Request, taken: int) -> None:
        limit = self._pool.max_tokens_on_credit(request) - request.num_computed_tokens
        if not 0 <= taken <= limit:
            check_range(f"num_taken_tokens[{i}]", taken, 0, max(limit, 0))
        row.num_taken_tokens = taken

    def _check_rejected(self, i: int, row: CheckedOperation, seen: _Seen, rejected: int) -> None:
        where = f"num_rejected_tokens[{i}]"
        if seen.allocated:
            raise InvalidArgumentError(where, "the request allocated in this step, which has not run yet")
        check_range(where, rejected, 0, seen.num_computed_tokens)
        seen.num_computed_tokens -= rejected
        if not self._pool.can_reject(seen.request, seen.num_computed_tokens):
            raise InvalidArgumentError(where, f"{rejected} tokens reach back behind a window whose blocks are freed")
        row.num_rejected_tokens = rejected

    def _check_allocation(
        self, i: int, row: CheckedOperation, seen: _Seen, promised: tuple[list[BlockId], ...] | tuple[()]
    ) -> None:
        admit = row.operation is Operation.ADMIT
        if seen.allocated:
            raise InvalidArgumentError(f"request_numbers[{i}]", "the request already allocated in this step")
        if seen.is_admitted and (admit or any(promised)):
            raise _holds_blocks(i, seen.request)
        if admit:
            check_range(f"num_appended_tokens[{i}]", seen.num_tokens, 1, self._max_tokens)
            seen.num_computed_tokens = seen.num_tokens  # the maximum; apply bounds a later CACHE
        else:
            hit_tokens = 0
            if any(promised):
                groups = len(promised)
                hit_tokens = self._pool.check_computed_blocks(lambda j: f"num_block_ids[{i * groups + j}]", promised)
                check_range(f"num_block_ids[{i}]", hit_tokens, 0, seen.num_tokens - 1)
                row.promised = ComputedBlocks(promised, hit_tokens)
            hit_tokens += row.options.num_external_tokens
            check_range(f"num_external_tokens[{i}]", hit_tokens, 0, self._max_tokens - seen.num_computed_tokens)
            left = self._max_tokens - seen.num_computed_tokens - hit_tokens
            if row.num_new_tokens > left:
                check_range(f"num_new_tokens[{i}]", row.num_new_tokens, 1, left)
            seen.num_computed_tokens += hit_tokens + row.num_new_tokens
        seen.allocated = seen.holds_blocks = True

    def _options_of(self, i: int, operation: Operation, seen: _Seen) -> AllocationOptions:
        values = {name: column[i] for name in OPTION_COLUMNS if (column := getattr(self._step, name))}
        if not any(values.values()):
            return DEFAULT_OPTIONS
        options = AllocationOptions(**values)
        if options.num_external_tokens and (operation is Operation.ADMIT or seen.is_admitted):
            raise InvalidArgumentError(
                f"num_external_tokens[{i}]", "allowed only in an allocation for a request without blocks"
            )
        check_range(f"num_external_tokens[{i}]", options.num_external_tokens, 0, self._max_tokens)
        check_range(f"num_in_flight_tokens[{i}]", options.num_in_flight_tokens, 0, self._max_tokens)
        check_range(f"num_reserved_blocks[{i}]", options.num_reserved_blocks, 0, MAX_BLOCKS)
        check_range(f"num_watermark_blocks[{i}]", options.num_watermark_blocks, 0, MAX_BLOCKS)
        return options

    def _take_block_ids(self, i: int, operation: Operation) -> tuple[list[BlockId], ...]:
        step, groups = self._step, len(self._pool.config.groups)
        counts = step.num_block_ids[i * groups : (i + 1) * groups]
        if not any(counts):
            return ()
        if operation not in (Operation.ALLOCATE, Operation.EVICT):
            raise InvalidArgumentError(f"num_block_ids[{i * groups}]", f"{operation.name} takes no blocks")
        taken = []
        for j, count in enumerate(counts):
            end = self._block_at + count
            if count < 0 or end > len(step.block_ids):
                raise InvalidArgumentError(
                    f"num_block_ids[{i * groups + j}]", f"{count} ids, block_ids holds {len(step.block_ids)}"
                )
            lowest, num_blocks = int(operation is Operation.EVICT), self._pool.blocks.num_blocks
            if lowest:
                check_range(f"num_block_ids[{i * groups + j}]", count, 0, num_blocks)
            block_ids: list[BlockId] = step.block_ids[self._block_at : end]  # type: ignore[assignment]
            if block_ids and not lowest <= min(block_ids) <= max(block_ids) < num_blocks:
                for at, block_id in enumerate(block_ids, self._block_at):
                    check_range(f"block_ids[{at}]", block_id, lowest, num_blocks - 1)
            taken.append(block_ids)
            self._block_at = end
        return tuple(taken)

    def _check_all_used(self) -> None:
        step = self._step
        for name, used, given in (
            ("block_hashes", self._hash_at, len(step.block_hashes)),
            ("token_ids", self._token_at, len(step.token_ids)),
            ("request_ids", self._id_at, len(step.request_ids)),
            ("lora_names", self._id_at if step.lora_names else 0, len(step.lora_names)),
            ("block_ids", self._block_at, len(step.block_ids)),
        ):
            if used != given:
                unit = "bytes" if name == "block_hashes" else "entries"
                raise InvalidArgumentError(name, f"{given} {unit} given, the operations take {used}")


def _holds_blocks(i: int, request: Request) -> WrongStateError:
    return WrongStateError(
        "REQUEST_HOLDS_BLOCKS",
        f"request {request.request_id!r} holds blocks already and cannot take a hit",
        field=f"request_numbers[{i}]",
    )
