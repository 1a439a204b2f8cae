"""Random sessions on one pool: the books balance after every step, refusals change nothing, hits are true.

Besides the pool's own books the machine keeps a model of memory: what each block's slots were last given to hold, and
who has said so. Every hit must be of blocks that hold the very prefix asked for, computed by the asker or published.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.server.core.apply import apply_step, end_session
from kvpool.server.core.config import ReuseOrder
from kvpool.server.core.errors import KvpoolError
from kvpool.server.core.integrity import check_integrity
from kvpool.server.core.session import Session
from kvpool.server.core.step import Operation, Outcome, Step, StepResult
from kvpool.server.core.types import BlockId
from support_core import BLOCK_SIZE, World

MAX_PROMPT_TOKENS = 14


@dataclass
class Model:
    """A request as its scheduler sees it."""

    number: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    promise: list[int] | None = None

    def prefix(self, block: int) -> tuple[int, ...]:
        return tuple(self.tokens[: (block + 1) * BLOCK_SIZE])


@dataclass
class Scheduler:
    """A session and its requests."""

    session: Session
    requests: dict[int, Model] = field(default_factory=dict)
    last_step: Step | None = None
    last_result: StepResult | None = None
    added: int = 0


def hash_of(prefix: Sequence[int]) -> bytes:
    return hashlib.sha256(repr(tuple(prefix)).encode()).digest()


class CoreMachine(RuleBasedStateMachine):
    """Interleaved sessions of one pool."""

    @initialize(
        num_blocks=st.sampled_from([2, 3, 5, 7, 9, 12, 16]),
        order=st.sampled_from(ReuseOrder),
        caching=st.sampled_from([True, True, True, True, False]),
        eagle=st.sampled_from([False, False, True]),
    )
    def start(self, num_blocks: int, order: ReuseOrder, caching: bool, eagle: bool) -> None:  # noqa: FBT001
        self.world = World(num_blocks, reuse_order=order, enable_caching=caching, use_eagle=eagle)
        self.schedulers: list[Scheduler] = []
        # By block: the prefix that its slots hold or will hold, by whom, with which change.
        self.contents: dict[int, tuple[tuple[int, ...], int, int]] = {}
        self.executed: dict[int, int] = {}
        self.open()

    @property
    def caching(self) -> bool:
        return self.world.pool.config.enable_caching

    @precondition(lambda self: len(self.schedulers) < 3)
    @rule()
    def open(self) -> None:
        self.schedulers.append(Scheduler(self.world.open(lease_seconds=10.0)))

    def pick(self, data: st.DataObject) -> Scheduler:
        return data.draw(st.sampled_from(self.schedulers))

    def pick_request(self, data: st.DataObject, scheduler: Scheduler) -> Model:
        return scheduler.requests[data.draw(st.sampled_from(sorted(scheduler.requests)))]

    def step(self, scheduler: Scheduler, operations: list[Operation], executed: int = 0, **columns: Any) -> StepResult:
        step = Step(
            scheduler.session.sequence + 1,
            executed_sequence=executed,
            operations=[int(operation) for operation in operations],
            **columns,
        )
        result = apply_step(self.world.pool, scheduler.session, step)
        scheduler.last_step, scheduler.last_result = step, result
        return result

    def check_hit(self, scheduler: Scheduler, request: Model, block_ids: Sequence[int], num_tokens: int) -> None:
        assert num_tokens == len(block_ids) * BLOCK_SIZE < len(request.tokens)
        writer = scheduler.session.writer
        for i, block_id in enumerate(block_ids):
            prefix, filler, change = self.contents[block_id]
            assert prefix == request.prefix(i), "a hit of other contents"
            assert filler == writer or change <= self.executed.get(filler, 0), "a hit of what was not computed"

    def take(self, scheduler: Scheduler, request: Model, hit: Sequence[int], new: Sequence[int], computed: int) -> None:
        request.blocks += [*hit, *new]
        request.promise = None
        request.computed = computed
        assert len(set(request.blocks)) == len(request.blocks)
        for block_id in new:
            self.contents.pop(block_id, None)
        self.fill(scheduler, request)

    def fill(self, scheduler: Scheduler, request: Model) -> None:
        """Full blocks get the request's contents; those it did not hit are filled by it, now."""
        writer, change = scheduler.session.writer, scheduler.session.sequence
        for i, block_id in enumerate(request.blocks):
            known = self.contents.get(block_id)
            full = (i + 1) * BLOCK_SIZE <= min(request.computed, len(request.tokens))
            if known is None or known[0] != request.prefix(i) or not full:
                holds = request.prefix(i) if full else ()
                self.contents[block_id] = (holds, writer, change)

    @rule(data=st.data(), length=st.integers(1, MAX_PROMPT_TOKENS), seed=st.integers(0, 1), budget=st.integers(0, 12))
    def admit_new(self, data: st.DataObject, length: int, seed: int, budget: int) -> None:
        tokens = [seed] * min(length, 8) + [seed * data.draw(st.integers(0, 1))] * (length - min(length, 8))
        self.admit_new_tokens(self.pick(data), tokens, budget)

    def admit_new_tokens(self, scheduler: Scheduler, tokens: list[int], budget: int) -> None:
        request, result = self.add(scheduler, tokens, Operation.ADMIT, budget)
        self.read_admission(scheduler, request, result, 1)

    @rule(data=st.data())
    def execute_all(self, data: st.DataObject) -> None:
        for scheduler in self.schedulers:
            if data.draw(st.booleans()):
                self.say_executed(scheduler, scheduler.session.sequence)

    @rule(data=st.data(), length=st.integers(5, MAX_PROMPT_TOKENS), seed=st.integers(0, 1))
    def look_up_new(self, data: st.DataObject, length: int, seed: int) -> None:
        scheduler = self.pick(data)
        request, result = self.add(scheduler, [seed] * length, Operation.LOOK_UP, 0)
        self.check_hit(scheduler, request, result.block_ids, sum(result.num_hit_tokens))
        request.promise = result.block_ids
        meddle, allocate = data.draw(st.tuples(st.booleans(), st.booleans()))
        if request.promise and meddle:
            self.take_what_was_promised(data, fill=data.draw(st.booleans()))
        if self.promised() and allocate:
            self.allocate_what_was_promised(data, 1)

    def add(
        self, scheduler: Scheduler, tokens: list[int], operation: Operation, budget: int
    ) -> tuple[Model, StepResult]:
        scheduler.added += 1
        request = Model(scheduler.added, tokens)
        hashes = [hash_of(request.prefix(i)) for i in range(len(tokens) // BLOCK_SIZE)] if self.caching else []
        scheduler.requests[request.number] = request
        result = self.step(
            scheduler,
            [Operation.ADD, operation],
            request_numbers=[request.number] * 2,
            num_appended_tokens=[len(tokens), 0],
            num_new_tokens=[0, budget],
            block_hashes=b"".join(hashes),
            request_ids=[f"r{request.number}"],
        )
        return request, result

    @precondition(lambda self: any(s.requests for s in self.schedulers))
    @rule(data=st.data())
    def admit_waiting(self, data: st.DataObject) -> None:
        scheduler = self.pick_busy(data)
        request = self.pick_request(data, scheduler)
        if not request.blocks:
            result = self.step(scheduler, [Operation.ADMIT], request_numbers=[request.number])
            self.read_admission(scheduler, request, result, 0)

    def pick_busy(self, data: st.DataObject) -> Scheduler:
        return data.draw(st.sampled_from([s for s in self.schedulers if s.requests]))

    def read_admission(self, scheduler: Scheduler, request: Model, result: StepResult, row: int) -> None:
        if result.outcomes:
            assert result.outcomes[row] == Outcome.NO_BLOCKS
            return
        num_hit = result.num_prefix_blocks[row] if result.num_prefix_blocks else 0
        hit_tokens = result.num_hit_tokens[row] if result.num_hit_tokens else 0
        hit, new = result.block_ids[:num_hit], result.block_ids[num_hit:]
        self.check_hit(scheduler, request, hit, hit_tokens)
        self.take(scheduler, request, hit, new, hit_tokens + result.num_new_tokens[row])

    @precondition(lambda self: any(s.requests for s in self.schedulers))
    @rule(data=st.data())
    def look_up(self, data: st.DataObject) -> None:
        scheduler = self.pick_busy(data)
        request = self.pick_request(data, scheduler)
        if request.blocks:
            return
        operation = data.draw(st.sampled_from([Operation.LOOK_UP, Operation.PEEK]))
        result = self.step(scheduler, [operation], request_numbers=[request.number])
        self.check_hit(scheduler, request, result.block_ids, sum(result.num_hit_tokens))
        request.promise = result.block_ids

    def promised(self) -> list[tuple[Scheduler, Model]]:
        return [(s, r) for s in self.schedulers for r in s.requests.values() if r.promise]

    def take_what_was_promised(self, data: st.DataObject, *, fill: bool) -> None:
        """Somebody else has a promised block evicted, and perhaps filled with other contents."""
        _, request = data.draw(st.sampled_from(self.promised()))
        block_id = data.draw(st.sampled_from(request.promise or []))
        self.step(self.pick(data), [Operation.EVICT], num_block_ids=[1], block_ids=[block_id])
        if fill:
            self.admit_new_tokens(
                self.pick(data), [3] * MAX_PROMPT_TOKENS, data.draw(st.integers(1, MAX_PROMPT_TOKENS))
            )

    def allocate_what_was_promised(self, data: st.DataObject, new: int) -> None:
        scheduler, request = data.draw(st.sampled_from(self.promised()))
        promise = request.promise or []
        hash_now = self.world.pool.blocks.prefix_map.hash_of
        kept = all(hash_now(BlockId(b)) == hash_of(request.prefix(i)) for i, b in enumerate(promise))
        result = self.step(
            scheduler, [Operation.ALLOCATE], request_numbers=[request.number], num_new_tokens=[new],
            num_block_ids=[len(promise)], block_ids=promise,
        )  # fmt: skip
        if not result.outcomes:
            assert kept, "a promised block was used that lost its hash"
            self.check_hit(scheduler, request, promise, len(promise) * BLOCK_SIZE)
            self.take(scheduler, request, promise, result.block_ids, len(promise) * BLOCK_SIZE + new)
        elif result.outcomes == [Outcome.HIT_CHANGED]:
            self.check_hit(scheduler, request, result.block_ids, sum(result.num_hit_tokens))
            assert result.block_ids != promise
            request.promise = result.block_ids

    @precondition(lambda self: any(r.blocks for s in self.schedulers for r in s.requests.values()))
    @rule(data=st.data(), grown=st.integers(0, 3), lookahead=st.integers(0, 5), delay=st.booleans())
    def decode(self, data: st.DataObject, grown: int, lookahead: int, delay: bool) -> None:  # noqa: FBT001
        """All running requests of a session in one step, some cached only later."""
        scheduler = data.draw(
            st.sampled_from([s for s in self.schedulers if any(r.blocks for r in s.requests.values())])
        )
        running = [r for r in scheduler.requests.values() if r.blocks]
        hashes = []
        for request in running:
            before = len(request.tokens)
            request.tokens += [data.draw(st.integers(0, 1)) for _ in range(grown)]
            blocks = range(before // BLOCK_SIZE, len(request.tokens) // BLOCK_SIZE)
            hashes += [hash_of(request.prefix(i)) for i in blocks] if self.caching else []
        count = len(running)
        result = self.step(
            scheduler, [Operation.ALLOCATE] * count, request_numbers=[r.number for r in running],
            num_appended_tokens=[grown] * count, num_new_tokens=[1] * count, num_lookahead_tokens=[lookahead] * count,
            delay_cache_blocks=[delay] * count, block_hashes=b"".join(hashes),
        )  # fmt: skip
        ids = iter(result.block_ids)
        refused = False
        for i, request in enumerate(running):
            outcome = result.outcomes[i] if result.outcomes else Outcome.OK
            assert outcome in ((Outcome.SKIPPED,) if refused else (Outcome.OK, Outcome.NO_BLOCKS))
            refused = refused or outcome != Outcome.OK
            if outcome == Outcome.OK:
                num_new = result.num_new_blocks[i] if result.num_new_blocks else 0
                self.take(scheduler, request, [], [next(ids) for _ in range(num_new)], request.computed + 1)
        assert next(ids, None) is None

    @precondition(lambda self: any(r.blocks for s in self.schedulers for r in s.requests.values()))
    @rule(data=st.data(), rejected=st.integers(0, 4))
    def reject_drafts(self, data: st.DataObject, rejected: int) -> None:
        candidates = [(s, r) for s in self.schedulers for r in s.requests.values() if r.blocks]
        scheduler, request = data.draw(st.sampled_from(candidates))
        drafts = max(request.computed - len(request.tokens), 0)
        rejected = min(rejected, drafts)
        result = self.step(
            scheduler, [Operation.ALLOCATE], request_numbers=[request.number], num_new_tokens=[2],
            num_rejected_tokens=[rejected],
        )  # fmt: skip
        request.computed -= rejected
        if not result.outcomes:
            self.take(scheduler, request, [], result.block_ids, request.computed + 2)

    @precondition(lambda self: any(r.blocks for s in self.schedulers for r in s.requests.values()))
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        candidates = [(s, r) for s in self.schedulers for r in s.requests.values() if r.blocks]
        scheduler, request = data.draw(st.sampled_from(candidates))
        up_to = data.draw(st.integers(0, request.computed))
        self.step(scheduler, [Operation.CACHE], request_numbers=[request.number], num_new_tokens=[up_to])
        self.fill(scheduler, request)

    @precondition(lambda self: any(s.requests for s in self.schedulers))
    @rule(data=st.data(), operation=st.sampled_from([Operation.FREE, Operation.PREEMPT]))
    def free(self, data: st.DataObject, operation: Operation) -> None:
        scheduler = self.pick_busy(data)
        request = self.pick_request(data, scheduler)
        self.step(scheduler, [operation], request_numbers=[request.number])
        request.blocks, request.computed, request.promise = [], 0, None
        if operation is Operation.FREE:
            del scheduler.requests[request.number]

    @rule(data=st.data(), chore=st.sampled_from(["evict", "reset", "execute", "send_again", "end", "common_prefix"]))
    def do_chores(self, data: st.DataObject, chore: str) -> None:
        """What is rare in life shares one rule, so that the others get their turn."""
        if chore == "evict":
            self.evict(data)
        elif chore == "reset":
            self.reset(data)
        elif chore == "execute":
            self.execute(data)
        elif chore == "send_again" and any(s.last_step for s in self.schedulers):
            self.send_again(data)
        elif chore == "end" and len(self.schedulers) > 1:
            self.end(data, expire=data.draw(st.booleans()))
        elif chore == "common_prefix" and any(s.requests for s in self.schedulers):
            self.common_prefix(data)

    def evict(self, data: st.DataObject) -> None:
        scheduler = self.pick(data)
        last = self.world.pool.config.num_blocks - 1
        ids = data.draw(st.lists(st.integers(1, last), max_size=4))
        self.step(scheduler, [Operation.EVICT], num_block_ids=[len(ids)], block_ids=ids)

    def reset(self, data: st.DataObject) -> None:
        held = any(r.blocks for s in self.schedulers for r in s.requests.values())
        result = self.step(self.pick(data), [Operation.RESET])
        assert result.outcomes == ([Outcome.IN_USE] if held else [])

    def common_prefix(self, data: st.DataObject) -> None:
        scheduler = self.pick_busy(data)
        request = self.pick_request(data, scheduler)
        result = self.step(scheduler, [Operation.COMMON_PREFIX], request_numbers=[request.number])
        tables = [r.blocks for r in scheduler.requests.values() if r.blocks]
        common = 0
        while all(len(t) > common for t in [request.blocks, *tables]):
            if len({t[common] for t in [request.blocks, *tables]}) > 1:
                break
            common += 1
        assert sum(result.num_prefix_blocks) == (common if self.world.pool.config.enable_caching else 0)

    def execute(self, data: st.DataObject) -> None:
        scheduler = self.pick(data)
        self.say_executed(scheduler, data.draw(st.integers(0, scheduler.session.sequence)))

    def say_executed(self, scheduler: Scheduler, executed: int) -> None:
        self.step(scheduler, [], executed=executed)
        writer = scheduler.session.writer
        self.executed[writer] = max(self.executed.get(writer, 0), executed)

    def send_again(self, data: st.DataObject) -> None:
        scheduler = data.draw(st.sampled_from([s for s in self.schedulers if s.last_step]))
        assert scheduler.last_step
        before = self.world.snapshot()
        assert apply_step(self.world.pool, scheduler.session, scheduler.last_step) == scheduler.last_result
        assert self.world.snapshot() == before

    @rule(
        data=st.data(),
        operations=st.lists(st.integers(0, 13), min_size=1, max_size=4),
        numbers=st.lists(st.integers(-1, 4), min_size=4, max_size=4),
        counts=st.lists(st.integers(-2, 50), min_size=4, max_size=4),
        garbage=st.sampled_from([b"", b"h", b"h" * 32]),
    )
    def send_garbage(
        self, data: st.DataObject, operations: list[int], numbers: list[int], counts: list[int], garbage: bytes
    ) -> None:
        """Refused with one of the documented errors; a step that names one thing too many always is."""
        scheduler = self.pick(data)
        n = len(operations)
        step = Step(
            scheduler.session.sequence + 1, operations=operations, request_numbers=numbers[:n],
            num_appended_tokens=counts[:n], num_new_tokens=counts[:n], block_hashes=garbage,
            request_ids=["unused"] * (operations.count(Operation.ADD) + 1),
        )  # fmt: skip
        before = self.world.snapshot()
        with pytest.raises(KvpoolError):
            apply_step(self.world.pool, scheduler.session, step)
        assert self.world.snapshot() == before

    def end(self, data: st.DataObject, *, expire: bool) -> None:
        scheduler = self.pick(data)
        if expire:
            for other in self.schedulers:
                other.session.heard_seconds = self.world.now_seconds + (0.0 if other is scheduler else 20.0)
            self.world.now_seconds += 15.0
            (ended,) = self.world.allocator.expire(self.world.now_seconds)
            assert ended[1] is scheduler.session
        else:
            self.world.allocator.close_session(scheduler.session.session_id, self.world.now_seconds)
        self.schedulers.remove(scheduler)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "world"):
            return
        sessions = [s.session for s in self.schedulers]
        check_integrity(self.world.pool, sessions)
        for scheduler in self.schedulers:
            for number, request in scheduler.requests.items():
                known = scheduler.session.by_number[number]  # type: ignore[index]
                assert known.tables[0].block_ids == request.blocks
                assert (known.num_tokens, known.num_computed_tokens) == (len(request.tokens), request.computed)

    def teardown(self) -> None:
        """When all sessions end, every block is free."""
        if not hasattr(self, "world"):
            return
        for scheduler in self.schedulers:
            end_session(self.world.pool, scheduler.session)
        check_integrity(self.world.pool, [])
        assert self.world.pool.blocks.num_free_blocks == self.world.pool.config.num_blocks - 1
        assert not self.world.pool.blocks.prefix_map.pending()


CoreMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCore = CoreMachine.TestCase
