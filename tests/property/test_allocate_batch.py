"""The fast loop for plain allocations, compared with the same steps applied one row at a time."""

from functools import reduce
from operator import add
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.errors import KvpoolError
from kvpool.core.execution.allocate_batch import allocate_plain_rows
from kvpool.core.ids import BlockId, RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.core.steps.columns import Operation, Outcome, Step, StepResult
from support.core import BLOCK_SIZE, World, block_hashes
from support.integrity import check_integrity

MAX_TOKENS = 256
CONTENTS = ["a" * 64, "a" * 5 + "b" * 59, "c" * 64, "a" * 9 + "d" * 55]
WRONG: list[tuple[str, list[Any]]] = [
    ("request_numbers", [0, 99, -1]),
    ("declares", [False, True]),
    ("num_appended_tokens", [-1, MAX_TOKENS, 2**40]),
    ("num_new_tokens", [0, -1, MAX_TOKENS, 2**40]),
    ("num_taken_tokens", [-1, BLOCK_SIZE, 2**40]),
    ("operations", [Operation.FREE, Operation.CACHE, Operation.APPEND, 77]),
]
ODD: list[dict[str, Any]] = [
    {"block_hashes": b"more"},
    {"token_ids": [1]},
    {"request_ids": ["more"]},
    {"declares": [True]},
    {"executed_sequence": 10**6},
    {"executed_sequence": -1},
    {"admission_budget_tokens": -1},
    {"num_credit_allocations": -1},
    {"num_new_tokens": [1]},
    {"num_lookahead_tokens": [1]},
    {"launched_sequence": 10**6},
    {"launched_sequence": -1},
    {"num_external_tokens": [1]},
    {"num_reserved_blocks": [1]},
    {"full_sequence_must_fit": [True]},
]


class Pair:
    """The same sessions twice: in a pool with the fast loop, and in a pool without."""

    def __init__(self, num_blocks: int, num_sessions: int, reserve_tokens: int = 0, **options: Any) -> None:
        self.batched, self.one_by_one = World(num_blocks, **options), World(num_blocks, **options)
        self.one_by_one.pool.plain_manager = None
        reserves = [reserve_tokens * (i % 2) for i in range(1, num_sessions + 1)]  # of every other session
        worlds = (self.batched, self.one_by_one)
        self.sessions = [tuple(world.open(reserve_tokens=each) for world in worlds) for each in reserves]
        self.contents: dict[tuple[int, int], str] = {}

    def run(self, at: int, **columns: Any) -> StepResult | None:
        """Applies a step to both pools; results and states must be equal. Returns None if they refuse it."""
        answers: list[object] = []
        for world, session in zip((self.batched, self.one_by_one), self.sessions[at], strict=True):
            step = Step(session.sequence + 1, **columns)
            try:
                answers.append(world.apply(session, step))
            except KvpoolError as error:
                answers.append((type(error), str(error)))
            check_integrity(world.pool, world.sessions())
        assert answers[0] == answers[1]
        assert self.batched.snapshot() == self.one_by_one.snapshot()
        return answers[0] if isinstance(answers[0], StepResult) else None

    def hashes(self, at: int, number: int, before: int, appended: int) -> bytes:
        if not self.batched.pool.config.enable_caching:
            return b""
        content = self.contents.get((at, number), CONTENTS[0])  # a spoiled number can declare a request
        joined = block_hashes(content, (before + appended) // BLOCK_SIZE)
        return joined[before // BLOCK_SIZE * 32 :]


Row = dict[str, Any]
"""An operation: its entries in columns, and its entries in queues."""
QUEUES: Row = {"block_hashes": b"", "block_ids": [], "request_ids": []}


def columns(rows: list[Row]) -> dict[str, Any]:
    """The columns of a step with these operations."""
    step: dict[str, Any] = {}
    for name in sorted({name for row in rows for name in row}):
        if name in QUEUES:
            step[name] = reduce(add, [row.get(name, QUEUES[name]) for row in rows])
        else:
            step[name] = [row.get(name, 0) for row in rows]
    return {name: column for name, column in step.items() if any(column)}


def admission(pair: Pair, at: int, number: int, rng: Random) -> Row:
    pair.contents[at, number] = rng.choice(CONTENTS)
    num_tokens = rng.randint(1, 40)
    return {
        "operations": Operation.ADMIT,
        "request_numbers": number,
        "declares": True,
        "num_appended_tokens": num_tokens,
        "block_hashes": pair.hashes(at, number, 0, num_tokens),
        "request_ids": [f"r{number}"],
        "num_new_tokens": rng.choice([0, 0, 3]),
        "delay_cache_blocks": rng.random() < 0.1 and not pair.sessions[at][0].reserve_tokens,
        "full_sequence_must_fit": rng.random() < 0.3,
        "num_watermark_blocks": rng.choice([0, 0, 2]),
    }


def other(pair: Pair, at: int, session: Session, number: int, rng: Random) -> Row:
    """Another operation, of a request of the session, running or not, or of no request."""
    operation = rng.choice([
        Operation.FREE, Operation.FREE, Operation.PREEMPT, Operation.CACHE, Operation.LOOKUP_UNCOUNTED, Operation.ADMIT,
        Operation.COMMON_PREFIX, Operation.APPEND, Operation.EVICT, Operation.RESET,
        *[Operation.RESERVE] * (session.reserve_tokens and 4),
    ])  # fmt: skip
    if operation is Operation.RESET:
        return {"operations": operation}
    if operation is Operation.EVICT:
        block_ids = rng.sample(range(1, pair.batched.pool.blocks.num_blocks), 3)
        return {"operations": operation, "num_block_ids": 3, "block_ids": block_ids}
    row: Row = {"operations": operation, "request_numbers": number}
    if operation is Operation.RESERVE and is_running(session, number):
        taking = decode(pair, at, session, number, rng)
        return {**taking, **row, "num_new_tokens": 0, "num_lookahead_tokens": rng.choice([0, 3, 12, 40])}
    if operation is Operation.CACHE:
        row["num_new_tokens"] = rng.randint(0, session.by_number[RequestNumber(number)].num_computed_tokens)
    return row


def decode(pair: Pair, at: int, session: Session, number: int, rng: Random) -> Row:
    request = session.by_number[RequestNumber(number)]
    appended = rng.choice([0, 1, 1, 1, rng.randint(0, 9)])
    return {
        "operations": Operation.ALLOCATE,
        "request_numbers": number,
        "num_appended_tokens": appended,
        "num_new_tokens": rng.choice([1, 1, rng.randint(1, 6)]),
        "num_taken_tokens": rng.randint(0, max(request.credit_tokens - request.num_computed_tokens, 0)),
        "block_hashes": pair.hashes(at, number, request.num_tokens, appended),
    }


def is_running(session: Session, number: int) -> bool:
    return session.by_number[RequestNumber(number)].num_computed_tokens > 0


def round_of(pair: Pair, at: int, next_number: int, rng: Random) -> tuple[dict[str, Any], int]:
    """Returns decodes, often with other operations before and after, and the number of added requests."""
    session = pair.sessions[at][0]
    numbers = rng.sample(list(session.by_number), rng.randint(0, len(session.by_number)))
    decoding = [number for number in numbers if is_running(session, number) and rng.random() < 0.8]
    left = [number for number in numbers if number not in decoding]
    around = [other(pair, at, session, number, rng) for number in left if rng.random() < 0.5]
    added = range(next_number, next_number + rng.choice([0, 0, 0, 1, 2]))
    around += [admission(pair, at, number, rng) for number in added]
    rng.shuffle(around)
    num_before = rng.randint(0, len(around))
    decodes = [decode(pair, at, session, number, rng) for number in decoding]
    if rng.random() < 0.1:  # drafts that were rejected
        for row, number in zip(decodes, decoding, strict=True):
            row["num_rejected_tokens"] = rng.randint(0, session.by_number[number].num_computed_tokens // 2)
            row["delay_cache_blocks"] = rng.random() < 0.3 and not session.reserve_tokens
    if rng.random() < 0.1:
        for row in decodes:
            row["num_in_flight_tokens"] = rng.randint(0, 9)
            row["num_reserved_blocks"] = rng.choice([0, 0, 3, 50])
            row["full_sequence_must_fit"] = rng.random() < 0.3
    step = columns(around[:num_before] + decodes + around[num_before:])
    step["executed_sequence"] = rng.choice([0, session.sequence, session.sequence])
    step["launched_sequence"] = rng.choice([0, 0, session.sequence])
    step["num_credit_allocations"] = rng.choice([0, 5])
    return step, len(added)


def spoil(step: dict[str, Any], rng: Random) -> None:
    """Makes a step invalid."""
    kind = rng.random()
    if kind < 0.5:
        name, values = rng.choice(WRONG)
        if step.get(name):
            step[name][rng.randrange(len(step[name]))] = rng.choice(values)
    elif kind < 0.75:
        step |= rng.choice(ODD)
    elif len(step.get("request_numbers", ())) > 1:
        step["request_numbers"][1] = step["request_numbers"][0]


@pytest.mark.parametrize("order", ReuseOrder)
@pytest.mark.parametrize("caching", [True, False])
@given(rng=st.randoms(use_true_random=False), num_blocks=st.integers(8, 60), num_sessions=st.integers(1, 3))
def test_the_fast_loop_equals_one_row_at_a_time(
    order: ReuseOrder,
    caching: bool,  # noqa: FBT001 - a parameter of the test
    rng: Random,
    num_blocks: int,
    num_sessions: int,
) -> None:
    pair = Pair(num_blocks, num_sessions, rng.choice([0, 1, 4, 16]), reuse_order=order, enable_caching=caching)
    next_number = 1
    for _ in range(25):
        at = rng.randrange(num_sessions)
        step, num_added = round_of(pair, at, next_number, rng)
        next_number += num_added
        if rng.random() < 0.1:
            spoil(step, rng)
        pair.run(at, **step)


@pytest.fixture
def batch_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call of the fast loop that allocated them."""
    lengths: list[int] = []

    def counted(*args: Any) -> tuple[list[int], list[BlockId]] | None:
        allocated = allocate_plain_rows(*args)
        if allocated:
            lengths.append(len(allocated[0]))
        return allocated

    monkeypatch.setattr("kvpool.core.execution.apply.allocate_plain_rows", counted)
    return lengths


def decodes(*numbers: int) -> list[Row]:
    return [{"operations": Operation.ALLOCATE, "request_numbers": number, "num_new_tokens": 1} for number in numbers]


def full(pair: Pair, number: int) -> Row:
    """Declares and admits a request that fills a block, so that its decode needs a new block."""
    row = admission(pair, 0, number, Random(number))  # noqa: S311 - a test
    hashes = pair.hashes(0, number, 0, BLOCK_SIZE)
    taken = ("operations", "request_numbers", "declares", "request_ids")
    return {name: row[name] for name in taken} | {"num_appended_tokens": BLOCK_SIZE, "block_hashes": hashes}


def outcomes(pair: Pair, *rows: Row) -> list[int]:
    result = pair.run(0, **columns(list(rows)))
    assert result
    return result.outcomes or [Outcome.OK] * len(rows)


def test_decodes_are_batched(batch_lengths: list[int]) -> None:
    """Shows that the test above really compares two paths."""
    pair = Pair(50, 1)
    outcomes(pair, full(pair, 1), full(pair, 2))
    assert batch_lengths == []
    for _ in range(20):
        outcomes(pair, *decodes(1, 2))
    assert batch_lengths == [2] * 20


def test_decodes_between_other_operations_are_batched(batch_lengths: list[int]) -> None:
    pair = Pair(50, 1)
    outcomes(pair, full(pair, 1), full(pair, 2), full(pair, 3))
    freed = {"operations": Operation.FREE, "request_numbers": 3}
    assert outcomes(pair, freed, *decodes(1, 2), full(pair, 4)) == [Outcome.OK] * 4
    assert batch_lengths == [2]
    cached = {"operations": Operation.CACHE, "request_numbers": 4}
    assert outcomes(pair, *decodes(1), cached, *decodes(2)) == [Outcome.OK] * 3
    assert batch_lengths == [2, 1, 1]


def test_decodes_with_too_few_blocks_are_applied_one_by_one(batch_lengths: list[int]) -> None:
    pair = Pair(4, 1)
    outcomes(pair, full(pair, 1), full(pair, 2))
    assert outcomes(pair, *decodes(1, 2)) == [Outcome.OK, Outcome.NO_BLOCKS]
    assert batch_lengths == []


def test_decodes_beyond_the_work_limit_are_applied_one_by_one(
    batch_lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(50, 1)
    outcomes(pair, *[full(pair, number) for number in range(1, 8)])
    monkeypatch.setattr("kvpool.core.execution.apply.MAX_STEP_WORK", 2)
    assert outcomes(pair, *decodes(1, 2, 3)) == [Outcome.OK, Outcome.OK, Outcome.SKIPPED]
    assert batch_lengths == []
    monkeypatch.setattr("kvpool.core.execution.apply.MAX_STEP_WORK", 3)
    freed = {"operations": Operation.FREE, "request_numbers": 7}
    found = outcomes(pair, *decodes(3, 4), freed, *decodes(5, 6))
    assert found == [Outcome.OK] * 4 + [Outcome.SKIPPED]
    assert batch_lengths == [2]
