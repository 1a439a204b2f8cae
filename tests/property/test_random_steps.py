"""Random steps of several concurrent sessions, as sent by schedulers that keep their own state.

Each scheduler here knows only what step results contain. After every step its block tables must equal the pool's. Every
block of a hit must hold exactly the requested tokens, filled by the session itself or published, and all of them
computed with the weights that the session has now.
"""

import hashlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.core.blocks.integrity import waiting_for_steps
from kvpool.core.errors import AbortedError, KvpoolError
from kvpool.core.ids import BlockId, RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, OPTION_COLUMNS, AllocationOptions
from kvpool.core.steps.columns import Operation, Outcome, Step, StepResult
from support.core import World
from support.integrity import check_integrity
from support.refusals import refused

WITHOUT_REQUEST = (Operation.EVICT, Operation.RESET)
GROWING = (Operation.APPEND, Operation.ALLOCATE)
LOOKING_UP = (Operation.LOOKUP, Operation.LOOKUP_UNCOUNTED, Operation.LOOKUP_COUNTED_AT_ONCE)
BEFORE_BLOCKS = (*LOOKING_UP, Operation.ADMIT)
DECLARING = (*BEFORE_BLOCKS, *GROWING)
OFTEN = [Operation.ADMIT, Operation.ADMIT, Operation.LOOKUP, Operation.ALLOCATE, Operation.FREE]
POSSIBLE = {
    # An admission is skipped when the budget is used up.
    Operation.ADMIT: (Outcome.OK, Outcome.NO_BLOCKS, Outcome.NEVER_FITS, Outcome.SKIPPED),
    Operation.ALLOCATE: (Outcome.OK, Outcome.NO_BLOCKS, Outcome.NEVER_FITS, Outcome.HIT_CHANGED),
}
LEASE_SECONDS = 10.0
QUARANTINES = st.sampled_from([0.0, 3.0])


@dataclass(frozen=True)
class Row:
    """One operation, on a new request or on one that is chosen later.

    A tame operation is adapted to one that the request allows; a wild one is sent unchanged, and may name a request
    again.
    """

    operation: Operation
    is_new: bool
    pick: int
    length: int
    bits: int
    new: int
    extra: tuple[int, int, bool]
    ids: tuple[int, ...]
    options: AllocationOptions
    wild: bool

    @property
    def tokens(self) -> list[int]:
        """Tokens from a small alphabet, so that prefixes are shared."""
        return [self.bits >> (i // 4) & 1 for i in range(self.length)]


@dataclass(frozen=True)
class Round:
    """The operations of one scheduler in one step."""

    which: int
    rows: list[Row]
    not_executed: int
    not_launched: int
    budget: int


@dataclass
class Known:
    """A request as its scheduler knows it."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_hit: int = 0
    computed: int = 0
    hit_to_allocate: list[int] = field(default_factory=list)
    weights_version: str = ""
    num_pure: int | None = None

    def version(self, end: int) -> str | None:
        """The weights of its first `end` computed tokens; None for those of several versions."""
        return self.weights_version if self.num_pure is None or end <= self.num_pure else None


@dataclass
class FilledBlock:
    """The contents that a block's slots were last allocated for, with the weights, the session and the step."""

    content: tuple[int, ...]
    weights_version: str | None
    session_number: int
    sequence: int


@dataclass
class Scheduler:
    """A session, its requests by number, the steps that it sent, and what keeps its lease."""

    session: Session
    seen_seconds: float
    num_streams: int = 0
    requests: dict[int, Known] = field(default_factory=dict)
    sent: list[tuple[Step, StepResult]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """One operation of a step, and its result."""

    operation: Operation
    number: int
    num_appended: int
    num_rejected: int
    num_external: int
    num_lookahead: int
    hit_allocated: list[int]
    outcome: Outcome
    num_prefix: int
    num_hit_tokens: int
    num_new_tokens: int
    hit: list[int]
    new: list[int]


def answers(step: Step, result: StepResult) -> Iterator[Answer]:
    """Yields one answer per operation of a step."""
    zeros = [0] * len(step.operations)
    named, given = iter(step.block_ids), iter(result.block_ids)
    for i, code in enumerate(step.operations):
        operation, num_prefix = Operation(code), (result.num_prefix_blocks or zeros)[i]
        num_new = result.num_new_tokens or zeros if operation is Operation.ADMIT else step.num_new_tokens
        yield Answer(
            operation,
            step.request_numbers[i],
            step.num_appended_tokens[i],
            step.num_rejected_tokens[i],
            (step.num_external_tokens or zeros)[i],
            step.num_lookahead_tokens[i],
            take(named, step.num_block_ids[i]),
            Outcome((result.outcomes or zeros)[i]),
            num_prefix,
            (result.num_hit_tokens or zeros)[i],
            num_new[i],
            take(given, 0 if operation is Operation.COMMON_PREFIX else num_prefix),
            take(given, (result.num_new_blocks or zeros)[i]),
        )
    assert next(given, None) is None


def take(ids: Iterator[int], num: int) -> list[int]:
    return [next(ids) for _ in range(num)]


def num_common(tables: Sequence[list[int]]) -> int:
    """Number of leading blocks that all tables share."""
    return next(
        (i for i, column in enumerate(zip(*tables, strict=False)) if len(set(column)) > 1), min(map(len, tables))
    )


OPTIONS = st.builds(
    AllocationOptions,
    num_external_tokens=st.sampled_from([0, 1, 4, 7, 9, 300]),
    num_in_flight_tokens=st.sampled_from([0, 0, 1, 9, 256]),
    num_reserved_blocks=st.sampled_from([0, 0, 0, 1, 3, 2**20]),
    num_watermark_blocks=st.sampled_from([0, 0, 0, 2]),
    full_sequence_must_fit=st.booleans(),
)

rows = st.builds(
    Row,
    operation=st.sampled_from([*Operation, *OFTEN * 3]),
    is_new=st.sampled_from([False, False, True]),
    pick=st.integers(0, 3),
    length=st.sampled_from([9, 8, 13, 5, 4, 2, 1, 0]),
    bits=st.sampled_from([0, 0, 0, 1, 2]),
    new=st.sampled_from([0, 0, 0, 1, 2, 7]),
    extra=st.sampled_from([(0, 0, False)] * 4 + [(2, 0, False), (0, 3, False), (0, 0, True), (1, 2, True)]),
    ids=st.sampled_from([(1,), (2,), (1, 2), (3, 1), (5,), (7, 8, 9), (0,)]),
    options=st.one_of(st.just(DEFAULT_OPTIONS), st.just(DEFAULT_OPTIONS), OPTIONS),
    wild=st.sampled_from([False] * 15 + [True]),
)

rounds = st.builds(
    Round,
    which=st.integers(0, 2),
    rows=st.lists(rows, min_size=1, max_size=5),
    not_executed=st.sampled_from([0, 0, 1, 3]),
    not_launched=st.sampled_from([0, 1, 2, 100]),
    budget=st.sampled_from([0, 0, 0, 3, 9]),
)


def tamed(row: Row, known: Known | None, reserve_tokens: int = 0) -> Operation:
    """Returns an operation that the request allows; None for a new request."""
    operation = row.operation
    if known is None:
        return operation if operation in DECLARING and row.tokens else Operation.APPEND
    if operation is Operation.RESERVE and not (known.computed and reserve_tokens):
        return Operation.APPEND
    if operation in BEFORE_BLOCKS and known.blocks:
        return Operation.ALLOCATE if operation is Operation.ADMIT else Operation.COMMON_PREFIX
    if operation is Operation.ADMIT and (known.hit_to_allocate or not known.tokens):
        return Operation.ALLOCATE if known.hit_to_allocate else Operation.APPEND
    return operation


class RandomSteps(RuleBasedStateMachine):
    """Schedulers of one pool, with a clock that the test sets."""

    @initialize(
        num_blocks=st.sampled_from([16, 12, 9, 7, 5, 3, 2]),
        block_size=st.integers(2, 4),
        order=st.sampled_from(ReuseOrder),
        caching=st.sampled_from([True] * 7 + [False]),
        eagle=st.sampled_from([False, False, True]),
    )
    def start(self, *, num_blocks: int, block_size: int, order: ReuseOrder, caching: bool, eagle: bool) -> None:
        self.world = World(
            num_blocks, block_size=block_size, reuse_order=order, enable_caching=caching, use_eagle=eagle
        )
        self.size = block_size
        self.schedulers: list[Scheduler] = []
        self.filled: dict[int, FilledBlock] = {}
        self.executed: dict[int, int] = {}
        self.numbers = count(1)
        self.kept: list[tuple[float, set[int]]] = []
        self.open_session()

    @precondition(lambda self: len(self.schedulers) < 3)
    @rule(reserve_tokens=st.sampled_from([0, 3, 9]))
    def open_session(self, reserve_tokens: int = 0) -> None:
        session = self.world.open(LEASE_SECONDS, reserve_tokens=reserve_tokens)
        self.schedulers.append(Scheduler(session, self.world.now_seconds))

    @precondition(lambda self: self.schedulers)
    @rule(which=st.integers(0, 2), opens=st.booleans())
    def open_or_end_stream(self, which: int, *, opens: bool) -> None:
        """A lease does not run while a stream is open. It runs from the end of the last one."""
        scheduler = self.touch_session(which)
        if opens:
            self.world.allocator.attach_stream(scheduler.session)
            scheduler.num_streams += 1
        elif scheduler.num_streams:
            self.world.allocator.detach_stream(scheduler.session, self.world.now_seconds)
            scheduler.num_streams -= 1
            scheduler.seen_seconds = self.world.now_seconds

    @precondition(lambda self: self.schedulers)
    @rule(which=st.integers(0, 2))
    def keep_alive(self, which: int) -> None:
        scheduler = self.touch_session(which)
        self.world.allocator.touch_session(scheduler.session.session_id, self.world.now_seconds)
        scheduler.seen_seconds = self.world.now_seconds

    @precondition(lambda self: self.schedulers)
    @rule(round_=st.lists(rounds, min_size=1, max_size=6))
    def send(self, round_: list[Round]) -> None:
        for sent in round_:
            scheduler = self.touch_session(sent.which)
            step, requests = self.build(scheduler, sent)
            before = self.world.snapshot()
            try:
                result = self.world.apply(scheduler.session, step)
            except KvpoolError:
                assert self.world.snapshot() == before
                continue
            self.read(scheduler, step, result, requests)
            scheduler.sent.append((step, result))
            self.books_balance()

    @precondition(lambda self: any(s.sent for s in self.schedulers))
    @rule(which=st.integers(0, 2), back=st.integers(1, 16))
    def send_again(self, which: int, back: int) -> None:
        """Rule 2 of session: a step sent again gets the same result again, and changes nothing."""
        senders = [s for s in self.schedulers if s.sent]
        scheduler = senders[which % len(senders)]
        step, result = scheduler.sent[-min(back, len(scheduler.sent))]
        before, activity = self.world.snapshot(), self.world.pool.activity
        assert self.world.apply(scheduler.session, deepcopy(step)) == result
        activity.retries -= 1  # the only change
        assert self.world.snapshot() == before

    @precondition(lambda self: self.schedulers)
    @rule(which=st.integers(0, 2), weights_version=st.sampled_from(["", "1", "2"]))
    def set_weights_version(self, which: int, weights_version: str) -> None:
        """Between two steps, the engine of a session loads other weights. Its requests continue."""
        scheduler = self.schedulers[which % len(self.schedulers)]
        before = self.world.snapshot()
        is_new = scheduler.session.weights_version != weights_version
        assert self.world.allocator.set_weights_version(scheduler.session, weights_version) is is_new
        if not is_new:
            assert self.world.snapshot() == before
            return
        number = scheduler.session.session_number
        for filled in self.filled.values():
            if filled.session_number == number and filled.sequence > self.executed.get(number, 0):
                filled.weights_version = None  # the step may run with either weights
        for known in scheduler.requests.values():
            if known.blocks:
                known.num_pure = min(known.computed, known.computed if known.num_pure is None else known.num_pure)

    @precondition(lambda self: len(self.schedulers) > 1)
    @rule(which=st.integers(0, 2))
    def close(self, which: int) -> None:
        scheduler = self.touch_session(which)
        _, count = self.world.allocator.close_session(scheduler.session.session_id, self.world.now_seconds)
        assert count == len(scheduler.requests)
        self.schedulers.remove(scheduler)

    @precondition(lambda self: len(self.schedulers) > 1)
    @rule(which=st.integers(0, 2), quarantine_seconds=QUARANTINES)
    def evict(self, which: int, quarantine_seconds: float) -> None:
        scheduler = self.schedulers[which % len(self.schedulers)]
        session, now_seconds = scheduler.session, self.world.now_seconds
        ended = self.world.allocator.evict_session(
            "m", session.session_number, now_seconds, quarantine_seconds=quarantine_seconds
        )
        assert ended[1] is session
        self.keep([scheduler], quarantine_seconds)
        with pytest.raises(AbortedError, match="operator"):
            self.world.allocator.sessions.find(session.session_id, self.world.now_seconds)
        self.schedulers.remove(scheduler)

    @rule(seconds=st.sampled_from([1.0, 2.0, 6.0]), quarantine_seconds=QUARANTINES)
    def wait(self, seconds: float, quarantine_seconds: float) -> None:
        self.world.now_seconds += seconds
        allocator, now_seconds = self.world.allocator, self.world.now_seconds
        assert len(allocator.end_due_quarantines(now_seconds)) == sum(1 for due, _ in self.kept if due <= now_seconds)
        self.kept = [(due, blocks) for due, blocks in self.kept if due > now_seconds]
        due = [s for s in self.schedulers if not s.num_streams and s.seen_seconds <= now_seconds - LEASE_SECONDS]
        self.check_expired(due, has_ended=False)
        expired = allocator.expire(now_seconds, quarantine_seconds=quarantine_seconds)
        assert [session for _, session, _ in expired] == [s.session for s in due]
        self.check_expired(due, has_ended=True)
        self.keep(due, quarantine_seconds)
        self.schedulers = [s for s in self.schedulers if s not in due]

    def check_expired(self, due: list[Scheduler], *, has_ended: bool) -> None:
        """Rule 3 of session: a lease has expired for all that ask, before the session is ended and after it."""
        allocator, now_seconds = self.world.allocator, self.world.now_seconds
        for session_id in (scheduler.session.session_id for scheduler in due):
            assert allocator.sessions.is_overdue(session_id, now_seconds) != has_ended
            with refused(AbortedError, reason="LEASE_EXPIRED"):
                allocator.touch_session(session_id, now_seconds)

    def keep(self, ended: list[Scheduler], quarantine_seconds: float) -> None:
        """Records the blocks of ended schedulers, which must not be allocated until their quarantine ends."""
        for scheduler in ended:
            blocks = {block_id for known in scheduler.requests.values() for block_id in known.blocks}
            if blocks and quarantine_seconds:
                self.kept.append((self.world.now_seconds + quarantine_seconds, blocks))

    @invariant()
    def books_balance(self) -> None:
        check_integrity(self.world.pool, [s.session for s in self.schedulers])
        holders: dict[BlockId, tuple[int, Known]] = {}
        for scheduler in self.schedulers:
            assert len(scheduler.session.requests) == len(scheduler.requests)
            for number, known in scheduler.requests.items():
                request = scheduler.session.by_number[RequestNumber(number)]
                table = request.tables[0].block_ids
                assert (table, request.num_computed_tokens) == (known.blocks, known.computed)
                assert 0 <= known.computed <= len(table) * self.size
                for i, block_id in enumerate(table):
                    index, other = holders.setdefault(block_id, (i, known))
                    assert index == i, "shared at different places"
                    assert known is other or self.content(known, i) == self.content(other, i), "shared, but different"

    def touch_session(self, which: int) -> Scheduler:
        scheduler = self.schedulers[which % len(self.schedulers)]
        found = self.world.allocator.sessions.find(scheduler.session.session_id, self.world.now_seconds)
        assert found == (self.world.pool, scheduler.session)
        return scheduler

    def content(self, known: Known, block: int) -> tuple[int, ...]:
        return tuple(known.tokens[: (block + 1) * self.size])

    def build(self, scheduler: Scheduler, round_: Round) -> tuple[Step, dict[int, Known]]:
        """Builds a step for existing requests; returns it with the tokens that they will have."""
        step = Step(scheduler.session.sequence + 1, admission_budget_tokens=round_.budget)
        step.executed_sequence = max(scheduler.session.sequence - round_.not_executed, 0)
        step.launched_sequence = max(scheduler.session.sequence - round_.not_launched, 0)
        requests = deepcopy(scheduler.requests)
        for row in round_.rows:
            there = sorted(requests.keys() if row.wild else requests.keys() - set(step.request_numbers))
            if row.operation in WITHOUT_REQUEST:
                self.put(step, row, row.operation, 0, Known())
            elif row.is_new or not there:
                number = next(self.numbers)
                step.request_ids.append(f"r{number}")
                operation = row.operation if row.wild else tamed(row, None)
                self.put(step, row, operation, number, requests.setdefault(number, Known()), is_new=True)
            else:
                number = there[row.pick % len(there)]
                reserve_tokens = scheduler.session.reserve_tokens
                operation = row.operation if row.wild else tamed(row, requests[number], reserve_tokens)
                self.put(step, row, operation, number, requests[number])
        if scheduler.session.reserve_tokens:
            step.delay_cache_blocks.clear()
        return step, requests

    def put(  # noqa: PLR0913 - what a row is
        self, step: Step, row: Row, operation: Operation, number: int, known: Known, *, is_new: bool = False
    ) -> None:
        tame, before = not row.wild, len(known.tokens)
        step.block_hashes += self.grow(known, row.tokens if is_new or operation in GROWING else [])
        rejected, lookahead, delay = row.extra
        if tame:
            rejected = min(rejected, max(known.computed - before, 0))
        ids: list[int] = []
        if operation is Operation.EVICT or (row.wild and operation is Operation.ALLOCATE):
            ids = [1 + block_id % (self.world.pool.blocks.num_blocks - 1) for block_id in row.ids]
        elif operation is Operation.ALLOCATE and not known.blocks:
            ids = known.hit_to_allocate
        new = row.new
        if tame and operation is Operation.RESERVE:
            new = 0
        if tame and operation is Operation.CACHE:
            new = min(new, known.computed - rejected)
        options = row.options
        if tame and (operation is not Operation.ALLOCATE or known.blocks or known.computed):
            options = replace(options, num_external_tokens=0)
        if tame and operation is Operation.ALLOCATE and not options.num_external_tokens:
            new = max(new, 1)
        step.operations.append(operation)
        step.request_numbers.append(number)
        step.declares.append(is_new)
        step.num_appended_tokens.append(len(known.tokens) - before)
        step.num_new_tokens.append(new)
        step.num_rejected_tokens.append(rejected if number else 0)
        step.num_lookahead_tokens.append(lookahead)
        step.delay_cache_blocks.append(delay)
        step.num_block_ids.append(len(ids))
        step.block_ids += ids
        for name in OPTION_COLUMNS:
            getattr(step, name).append(getattr(options, name))

    def grow(self, known: Known, tokens: Sequence[int]) -> bytes:
        before = len(known.tokens) // self.size
        known.tokens += tokens
        blocks = range(before, len(known.tokens) // self.size) if self.world.pool.config.enable_caching else ()
        return b"".join(hashlib.sha256(repr(self.content(known, block)).encode()).digest() for block in blocks)

    def read(self, scheduler: Scheduler, step: Step, result: StepResult, requests: dict[int, Known]) -> None:
        """Reads a result as a scheduler does, operation by operation, with its earlier state."""
        session_number = scheduler.session.session_number
        self.executed[session_number] = max(self.executed.get(session_number, 0), step.executed_sequence)
        length = {number: len(known.tokens) for number, known in scheduler.requests.items()}
        scheduler.requests = requests
        out_of_blocks = False
        for answer in answers(step, result):
            if answer.operation is Operation.RESET:
                assert answer.outcome == (Outcome.IN_USE if self.held() else Outcome.OK)
            if not answer.number:
                continue
            known = requests[answer.number]
            length[answer.number] = length.get(answer.number, 0) + answer.num_appended
            known.computed -= answer.num_rejected
            self.check_hit(scheduler, known, answer.hit)
            assert answer.num_hit_tokens == len(answer.hit) * self.size
            if answer.operation in POSSIBLE:
                possible = (Outcome.SKIPPED,) if out_of_blocks else POSSIBLE[answer.operation]
                assert answer.outcome in possible
                out_of_blocks = out_of_blocks or answer.outcome in (Outcome.NO_BLOCKS, Outcome.NEVER_FITS)
            self.follow(scheduler, known, answer, step.sequence)
            self.fill(known, length[answer.number], session_number, step.sequence)
        assert not step.admission_budget_tokens or sum(result.num_new_tokens) <= step.admission_budget_tokens
        pool, blocks = self.world.pool, self.world.pool.blocks
        waiting = {block_id for _, block_id in waiting_for_steps(pool.in_flight, pool.quarantine)}
        num_free = blocks.num_blocks - 1 - len(self.held() | waiting)
        assert result.free_blocks <= num_free
        assert result.free_blocks == num_free or blocks.free_list.num_held

    def follow(self, scheduler: Scheduler, known: Known, answer: Answer, sequence: int) -> None:
        """Applies an answer to the scheduler's request."""
        match answer.operation, answer.outcome:
            case Operation.FREE, _:
                del scheduler.requests[answer.number]
            case Operation.PREEMPT, _:
                known.blocks, known.num_hit, known.computed, known.hit_to_allocate = [], 0, 0, []
            case Operation.RESERVE, _:
                del known.blocks[-(-(known.computed + answer.num_lookahead) // self.size) :]
                known.blocks += answer.new
            case Operation.COMMON_PREFIX, _:
                tables = [other.blocks for other in scheduler.requests.values() if other.blocks]
                caching = self.world.pool.config.enable_caching
                assert answer.num_prefix == (num_common([known.blocks, *tables]) if caching else 0)
            case (Operation.LOOKUP | Operation.LOOKUP_UNCOUNTED | Operation.LOOKUP_COUNTED_AT_ONCE, _) | (
                _,
                Outcome.HIT_CHANGED,
            ):
                assert answer.hit != answer.hit_allocated or not answer.hit
                known.hit_to_allocate = answer.hit
            case Operation.ADMIT | Operation.ALLOCATE, Outcome.OK:
                self.check_hit(scheduler, known, answer.hit_allocated)
                if not known.blocks:
                    known.weights_version, known.num_pure = scheduler.session.weights_version, None
                hit_blocks = answer.hit_allocated + answer.hit
                known.blocks += hit_blocks + answer.new
                known.num_hit += len(hit_blocks)
                known.computed += len(hit_blocks) * self.size + answer.num_external + answer.num_new_tokens
                known.hit_to_allocate = []
                for block_id in answer.new:
                    self.filled[block_id] = FilledBlock((), None, scheduler.session.session_number, sequence)

    def held(self) -> set[int]:
        held = {block_id for s in self.schedulers for known in s.requests.values() for block_id in known.blocks}
        return held.union(*(blocks for _, blocks in self.kept))

    def fill(self, known: Known, length: int, session_number: int, sequence: int) -> None:
        """Records that full blocks which the request did not hit hold its tokens."""
        for i in range(known.num_hit, min(known.computed, length) // self.size):
            filled = self.filled[known.blocks[i]]
            if filled.content != self.content(known, i):
                version = known.version((i + 1) * self.size)
                self.filled[known.blocks[i]] = FilledBlock(self.content(known, i), version, session_number, sequence)

    def check_hit(self, scheduler: Scheduler, known: Known, hit: Sequence[int]) -> None:
        assert len(hit) * self.size < max(len(known.tokens), 1), "a hit of the last token"
        session_number = scheduler.session.session_number
        for i, block_id in enumerate(hit):
            filled = self.filled[block_id]
            assert filled.content == self.content(known, i), "a hit of other contents"
            assert filled.weights_version == scheduler.session.weights_version, "a hit of other weights"
            assert filled.session_number == session_number or filled.sequence <= self.executed.get(
                filled.session_number, 0
            ), "not computed yet"

    def teardown(self) -> None:
        """After all sessions have ended, every block is free."""
        if hasattr(self, "world"):
            for scheduler in self.schedulers:
                for _ in range(scheduler.num_streams):
                    self.world.allocator.detach_stream(scheduler.session, self.world.now_seconds)
            self.world.allocator.expire(self.world.now_seconds + LEASE_SECONDS)
            self.world.allocator.end_due_quarantines(float("inf"))
            check_integrity(self.world.pool, [])
            assert self.world.pool.blocks.usage == 0.0


RandomSteps.TestCase.settings = settings(
    report_multiple_bugs=False,
    max_examples=settings().max_examples * 3,
    stateful_step_count=30,
    derandomize=True,
)
TestRandomSteps = RandomSteps.TestCase
