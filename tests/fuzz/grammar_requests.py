"""Generates steps with many operations, and the new parts of requests."""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

from fuzz.configs import block_hash
from fuzz.served import Served
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, OPTION_COLUMNS, AllocationOptions
from kvpool.core.steps.columns import Operation
from kvpool.v1 import allocator_pb2, step_pb2

_NUM_DOCUMENTS: Final = 3
_MAX_REQUESTS: Final = 12
_MAX_OPERATIONS: Final = 8
_MAX_UINT32: Final = 2**32 - 1
_NO_ROOM_TOKENS: Final = (1, 4, 2**31, _MAX_UINT32)
_OF_NEW: Final = (
    Operation.LOOKUP,
    Operation.LOOKUP_UNCOUNTED,
    Operation.LOOKUP_COUNTED_AT_ONCE,
    *(Operation.ADMIT,) * 3,
    *(Operation.ALLOCATE,) * 2,
    Operation.APPEND,
)
_OF_RUNNING: Final = (
    *(Operation.ALLOCATE,) * 6,
    Operation.CACHE,
    Operation.FREE,
    Operation.FREE,
    Operation.PREEMPT,
    Operation.COMMON_PREFIX,
    Operation.APPEND,
)


def hashes_of(pool: KVCacheManager, request_id: str, before: int, after: int) -> bytes:
    """Hashes of the blocks filled from `before` to `after` tokens; the request's id determines its tokens."""
    if not pool.config.enable_caching:
        return b""
    size_bytes = pool.config.hash_scheme.hash_size_bytes
    document = sum(request_id.encode("utf-8", "surrogatepass")) % _NUM_DOCUMENTS
    return b"".join(block_hash(document, i, size_bytes) for i in range(*map(pool.config.num_hashes, (before, after))))


@dataclass(slots=True)
class _Row:
    """An operation of a step, with the fields of the columns."""

    operation: Operation
    request: Request | None = None
    number: int = 0
    declares: bool = False
    appended: int = 0
    new: int = 0
    taken: int = 0
    rejected: int = 0
    lookahead: int = 0
    encoder: int = 0
    delay: bool = False
    options: AllocationOptions = DEFAULT_OPTIONS
    block_ids: tuple[tuple[int, ...], ...] = ()


class RequestGrammar:
    """Generates messages for any open session."""

    def __init__(self, rng: Random, served: Served) -> None:
        self.rng = rng
        self.served = served
        self._last_number = 0

    def session(self) -> tuple[KVCacheManager, Session] | None:
        """Any open session."""
        sessions = list(self.served.state.sessions)
        return self.rng.choice(sessions) if sessions else None

    def step(self, session_id: str = "") -> step_pb2.Step | None:
        """The next step of a session, or of any session if it does not exist."""
        found = next((pair for pair in self.served.state.sessions if pair[1].session_id == session_id), None)
        found = found or self.session()
        return self._step(*found) if found else None

    def _step(self, pool: KVCacheManager, session: Session) -> step_pb2.Step:
        step = step_pb2.Step(
            session_id=session.session_id,
            sequence=session.sequence + 1,
            executed_sequence=max(session.sequence - self.rng.choice((0, 1, 4, 1000)), 0),
            launched_sequence=max(session.sequence - self.rng.choice((0, 1, 1000, 1000)), 0),
            admission_budget_tokens=self.rng.choice((0, 0, 0, 16, 64)),
            num_credit_allocations=self.rng.choice((0, 1, 7, 2**24)) if self.rng.random() < 0.98 else _MAX_UINT32,
        )
        requests = [request for request in session.requests.values() if request.number > 0]
        self.rng.shuffle(requests)
        for _ in range(self.rng.randrange(_MAX_OPERATIONS)):
            if self.rng.random() < 0.05:
                self._put(step, pool, self._on_pool(pool))
            elif requests and (len(session.requests) >= _MAX_REQUESTS or self.rng.random() < 0.6):
                self._put(step, pool, self._on_request(pool, requests.pop()))
            else:
                self._declare(step, pool)
        return step

    def _declare(self, step: step_pb2.Step, pool: KVCacheManager) -> None:
        """The first operation of a new request, which declares it; sometimes without the declaration."""
        number, request_id = self._new()
        tokens = self.rng.randint(1, min(60, pool.config.max_model_len))
        step.request_ids.append(request_id)
        operation = self.rng.choice(_OF_NEW)
        row = _Row(operation, number=number, appended=tokens, declares=self.rng.random() < 0.99)
        row.lookahead, row.delay = self.rng.choice((0, 0, 2)), self.rng.random() < 0.1
        row.new = tokens if operation is Operation.ALLOCATE else self.rng.choice((0, 0, 8))
        if operation in (Operation.ADMIT, Operation.ALLOCATE):
            row.options = self._options_of(operation, holds_blocks=False)
            row.new = max(row.new - row.options.num_external_tokens, int(operation is Operation.ALLOCATE))
            if self.has_encoder(pool):
                row.encoder = 7
        self._put(step, pool, row, self._growth(pool, request_id, 0, tokens))

    def _options_of(self, operation: Operation, *, holds_blocks: bool) -> AllocationOptions:
        """Options of an allocation: default ones, other valid ones, and sometimes invalid ones."""
        rng = self.rng
        if rng.random() < 0.6:
            return DEFAULT_OPTIONS
        can_bring = operation is Operation.ALLOCATE and not holds_blocks
        return AllocationOptions(
            num_external_tokens=rng.choice((0, 1, 8, 20)) if can_bring or rng.random() < 0.02 else 0,
            num_in_flight_tokens=rng.choice((0, 1, 7, 96)),
            num_reserved_blocks=rng.choice((0, 0, 0, 5, 2**20)),
            num_watermark_blocks=rng.choice((0, 0, 2)) if rng.random() < 0.98 else _MAX_UINT32,
            full_sequence_must_fit=rng.random() < 0.3,
        )

    def _on_pool(self, pool: KVCacheManager) -> _Row:
        if self.rng.random() < 0.3:
            return _Row(Operation.RESET)
        empty: tuple[tuple[int, ...], ...] = ((),) * (len(pool.config.groups) - 1)
        return _Row(Operation.EVICT, block_ids=(tuple(self.any_blocks(pool)), *empty))

    def _on_request(self, pool: KVCacheManager, request: Request) -> _Row:
        operation = self.rng.choice(_OF_RUNNING if request.holds_blocks else (*_OF_NEW, Operation.FREE))
        row = _Row(operation, request, request.number)
        room = pool.config.max_model_len - request.num_tokens
        if operation not in (Operation.FREE, Operation.PREEMPT, Operation.COMMON_PREFIX):
            row.appended = min(self.rng.choice((0, 1, 1, 5)), max(room, 0))
        row.taken = self._taken(request)
        num_computed = request.num_computed_tokens + row.taken
        if operation is Operation.CACHE:
            row.new = min(num_computed, _MAX_UINT32)
        elif operation is Operation.ALLOCATE:
            row.rejected = min(self.rng.choice((0, 0, 0, 1)), num_computed)
            hit = 0
            if not request.holds_blocks:
                promise = pool.find_longest_cache_hit(request)
                row.block_ids, hit = tuple(map(tuple, promise.block_ids)), promise.num_tokens
            computed = num_computed - row.rejected + hit
            row.new = max(request.num_tokens + row.appended - computed, 1)
            row.lookahead = self.rng.choice((0, 0, 0, 4))
            row.options = self._options_of(operation, holds_blocks=request.holds_blocks)
            if row.options.num_external_tokens:
                row.new = max(row.new - row.options.num_external_tokens, 0)
        if not request.holds_blocks and operation in (Operation.ADMIT, Operation.ALLOCATE) and self.has_encoder(pool):
            row.encoder = 7
        return row

    def _taken(self, request: Request) -> int:
        """A number of tokens within the credit; sometimes more."""
        room = max(request.credit_tokens - request.num_computed_tokens, 0)
        if self.rng.random() < 0.02:
            return min(room + self.rng.choice(_NO_ROOM_TOKENS), _MAX_UINT32)
        return min(self.rng.choice((0, 0, 1, 2, room)), room)

    def _put(
        self, step: step_pb2.Step, pool: KVCacheManager, row: _Row, growth: tuple[bytes, Iterable[int]] | None = None
    ) -> None:
        if row.request:
            before = row.request.num_tokens
            growth = self._growth(pool, row.request.request_id, before, before + row.appended)
        hashes, token_ids = growth or (b"", ())
        step.operations.append(int(row.operation))  # type: ignore[arg-type]
        step.request_numbers.append(row.number)
        step.declares.append(row.declares)
        step.num_appended_tokens.append(row.appended)
        num_tokens = row.appended + (row.request.num_tokens if row.request else 0)
        step.num_prompt_tokens.append(self.rng.randint(0, num_tokens) if self.rng.random() < 0.1 else 0)
        step.num_new_tokens.append(row.new)
        step.num_taken_tokens.append(row.taken)
        step.num_rejected_tokens.append(row.rejected)
        step.num_lookahead_tokens.append(row.lookahead)
        step.num_encoder_tokens.append(row.encoder)
        step.delay_cache_blocks.append(row.delay)
        for name in OPTION_COLUMNS:
            getattr(step, name).append(getattr(row.options, name))
        for block_ids in row.block_ids or ((),) * len(pool.config.groups):
            step.num_block_ids.append(len(block_ids))
            step.block_ids.extend(block_ids)
        step.block_hashes += hashes
        step.token_ids.extend(token_ids)

    def update_of(self, pool: KVCacheManager, session: Session, request: Request | None) -> allocator_pb2.RequestUpdate:
        """The new part of a request; None for an unknown request."""
        if request is None:
            number, request_id = self._new()
            before, appended = 0, self.rng.randint(1, min(60, pool.config.max_model_len))
            if len(session.requests) >= _MAX_REQUESTS:
                request_id = next(iter(session.requests))
        else:
            number, request_id, before = 0, request.request_id, request.num_tokens
            appended = min(self.rng.choice((0, 0, 1, 4)), max(pool.config.max_model_len - before, 0))
        hashes, token_ids = self._growth(pool, request_id, before, before + appended)
        return allocator_pb2.RequestUpdate(
            request_id=request_id,
            request_number=number if self.rng.random() < 0.5 else 0,
            num_appended_tokens=appended,
            block_hashes=hashes,
            token_ids=token_ids,
            lora_name=self.rng.choice(("", "", "lora")) if request is None else "",
        )

    def _growth(self, pool: KVCacheManager, request_id: str, before: int, after: int) -> tuple[bytes, Iterable[int]]:
        token_ids = range(before, after) if pool.config.makes_events else ()
        return hashes_of(pool, request_id, before, after), token_ids

    def _new(self) -> tuple[int, str]:
        self._last_number = self._last_number % 2**20 + 1
        return self._last_number, f"q{self._last_number}"

    def any_blocks(self, pool: KVCacheManager) -> list[int]:
        return [self.rng.randrange(1, pool.blocks.num_blocks) for _ in range(self.rng.randrange(6))]

    @staticmethod
    def has_encoder(pool: KVCacheManager) -> bool:
        return pool.config.name == "p5"
