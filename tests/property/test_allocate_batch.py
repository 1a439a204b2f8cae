"""Plain allocations of a step, done together, against the same steps done operation by operation."""

from functools import reduce
from operator import add
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core import ids
from kvpool.core.errors import KvpoolError
from kvpool.core.execution.allocate_batch import AllocationBatch
from kvpool.core.ids import RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.core.steps.columns import Operation, Outcome, Step, StepResult
from support.core import BLOCK_SIZE, World, block_hashes
from support.integrity import check_integrity

MAX_TOKENS = 256
CONTENTS = ["a" * 64, "a" * 5 + "b" * 59, "c" * 64, "a" * 9 + "d" * 55]
WRONG: list[tuple[str, list[Any]]] = [
    ("request_numbers", [0, 99, -1]),
    ("num_appended_tokens", [-1, MAX_TOKENS, 2**40]),
    ("num_new_tokens", [0, -1, MAX_TOKENS, 2**40]),
    ("num_taken_tokens", [-1, BLOCK_SIZE, 2**40]),
    ("operations", [Operation.FREE, Operation.CACHE, Operation.APPEND, 77]),
]
ODD: list[dict[str, Any]] = [
    {"block_hashes": b"more"},
    {"token_ids": [1]},
    {"request_ids": ["more"]},
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
    """The same sessions twice: in a pool that does such allocations together, and in one that does none so."""

    def __init__(self, num_blocks: int, num_sessions: int, **options: Any) -> None:
        self.together, self.one_by_one = World(num_blocks, **options), World(num_blocks, **options)
        self.one_by_one.pool.plain_manager = None
        self.sessions = [(self.together.open(), self.one_by_one.open()) for _ in range(num_sessions)]
        self.contents: dict[tuple[int, int], str] = {}

    def run(self, at: int, **columns: Any) -> StepResult | None:
        """Applies a step to both, which must answer and be the same; None if they refuse it."""
        answers: list[object] = []
        for world, session in zip((self.together, self.one_by_one), self.sessions[at], strict=True):
            step = Step(session.sequence + 1, **columns)
            try:
                answers.append(world.apply(session, step))
            except KvpoolError as error:
                answers.append((type(error), str(error)))
            check_integrity(world.pool, world.sessions())
        assert answers[0] == answers[1]
        assert self.together.snapshot() == self.one_by_one.snapshot()
        return answers[0] if isinstance(answers[0], StepResult) else None

    def hashes(self, at: int, number: int, before: int, grown: int) -> bytes:
        if not self.together.pool.config.enable_caching:
            return b""
        joined = block_hashes(self.contents[at, number], (before + grown) // BLOCK_SIZE)
        return joined[before // BLOCK_SIZE * 32 :]


Row = dict[str, Any]
"""An operation: its entry of each column that has one, and what it has in queues."""
QUEUES: Row = {"block_hashes": b"", "block_ids": [], "request_ids": []}


def columns(rows: list[Row]) -> dict[str, Any]:
    """A step of these operations."""
    step: dict[str, Any] = {}
    for name in sorted({name for row in rows for name in row}):
        if name in QUEUES:
            step[name] = reduce(add, [row.get(name, QUEUES[name]) for row in rows])
        else:
            step[name] = [row.get(name, 0) for row in rows]
    return {name: column for name, column in step.items() if any(column)}


def admission(pair: Pair, at: int, number: int, rng: Random) -> list[Row]:
    pair.contents[at, number] = rng.choice(CONTENTS)
    num_tokens = rng.randint(1, 40)
    added = {
        "operations": Operation.ADD,
        "request_numbers": number,
        "num_appended_tokens": num_tokens,
        "block_hashes": pair.hashes(at, number, 0, num_tokens),
        "request_ids": [f"r{number}"],
    }
    admitted = {
        "operations": Operation.ADMIT,
        "request_numbers": number,
        "num_new_tokens": rng.choice([0, 0, 3]),
        "delay_cache_blocks": rng.random() < 0.1,
        "full_sequence_must_fit": rng.random() < 0.3,
        "num_watermark_blocks": rng.choice([0, 0, 2]),
    }
    return [added, admitted]


def other(pair: Pair, session: Session, number: int, rng: Random) -> Row:
    """Of a request that the session has, and may run, or of none."""
    operation = rng.choice([
        Operation.FREE, Operation.FREE, Operation.PREEMPT, Operation.CACHE, Operation.LOOKUP_UNCOUNTED, Operation.ADMIT,
        Operation.COMMON_PREFIX, Operation.APPEND, Operation.EVICT, Operation.RESET,
    ])  # fmt: skip
    if operation is Operation.RESET:
        return {"operations": operation}
    if operation is Operation.EVICT:
        block_ids = rng.sample(range(1, pair.together.pool.blocks.num_blocks), 3)
        return {"operations": operation, "num_block_ids": 3, "block_ids": block_ids}
    row: Row = {"operations": operation, "request_numbers": number}
    if operation is Operation.CACHE:
        row["num_new_tokens"] = rng.randint(0, session.by_number[RequestNumber(number)].num_computed_tokens)
    return row


def decode(pair: Pair, at: int, session: Session, number: int, rng: Random) -> Row:
    request = session.by_number[RequestNumber(number)]
    most = rng.choice([request.credit_tokens, pair.together.pool.max_tokens_on_credit(request)])
    grown = rng.choice([0, 1, 1, 1, rng.randint(0, 9)])
    return {
        "operations": Operation.ALLOCATE,
        "request_numbers": number,
        "num_appended_tokens": grown,
        "num_new_tokens": rng.choice([1, 1, rng.randint(1, 6)]),
        "num_taken_tokens": rng.randint(0, max(most - request.num_computed_tokens, 0)),
        "block_hashes": pair.hashes(at, number, request.num_tokens, grown),
    }


def is_running(session: Session, number: int) -> bool:
    return session.by_number[RequestNumber(number)].num_computed_tokens > 0


def round_of(pair: Pair, at: int, next_number: int, rng: Random) -> tuple[dict[str, Any], int]:
    """Decodes, and often other operations before and after them; and how many requests are added."""
    session = pair.sessions[at][0]
    numbers = rng.sample(list(session.by_number), rng.randint(0, len(session.by_number)))
    decoding = [number for number in numbers if is_running(session, number) and rng.random() < 0.8]
    left = [number for number in numbers if number not in decoding or rng.random() < 0.1]
    around = [[other(pair, session, number, rng)] for number in left if rng.random() < 0.5]
    added = range(next_number, next_number + rng.choice([0, 0, 0, 1, 2]))
    around += [admission(pair, at, number, rng) for number in added]
    rng.shuffle(around)
    num_before = rng.randint(0, len(around))
    decodes = [decode(pair, at, session, number, rng) for number in decoding]
    if rng.random() < 0.1:  # drafts that were rejected
        for row, number in zip(decodes, decoding, strict=True):
            row["num_rejected_tokens"] = rng.randint(0, session.by_number[number].num_computed_tokens // 2)
            row["delay_cache_blocks"] = rng.random() < 0.3
    if rng.random() < 0.1:
        for row in decodes:
            row["num_in_flight_tokens"] = rng.randint(0, 9)
            row["num_reserved_blocks"] = rng.choice([0, 0, 3, 50])
            row["full_sequence_must_fit"] = rng.random() < 0.3
    rows = [row for rows in around[:num_before] for row in rows] + decodes
    step = columns(rows + [row for rows in around[num_before:] for row in rows])
    step["executed_sequence"] = rng.choice([0, session.sequence, session.sequence])
    step["launched_sequence"] = rng.choice([0, 0, session.sequence])
    step["num_credit_allocations"] = rng.choice([0, 5])
    return step, len(added)


def spoil(step: dict[str, Any], rng: Random) -> None:
    """Does something wrong to a step."""
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
def test_done_together_is_as_done_one_by_one(
    order: ReuseOrder,
    caching: bool,  # noqa: FBT001 - a parameter of the test
    rng: Random,
    num_blocks: int,
    num_sessions: int,
) -> None:
    pair = Pair(num_blocks, num_sessions, reuse_order=order, enable_caching=caching)
    next_number = 1
    for _ in range(25):
        at = rng.randrange(num_sessions)
        step, num_added = round_of(pair, at, next_number, rng)
        next_number += num_added
        if rng.random() < 0.1:
            spoil(step, rng)
        pair.run(at, **step)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations were done together, each time that some were."""
    lengths: list[int] = []
    apply = AllocationBatch.apply

    def counted(run: AllocationBatch, sequence: ids.StepNumber) -> tuple[list[int], list[ids.BlockId]]:
        lengths.append(len(run))
        return apply(run, sequence)

    monkeypatch.setattr(AllocationBatch, "apply", counted)
    return lengths


def decodes(*numbers: int) -> list[Row]:
    return [{"operations": Operation.ALLOCATE, "request_numbers": number, "num_new_tokens": 1} for number in numbers]


def full(pair: Pair, number: int) -> list[Row]:
    """A request comes that fills a block, so that its decode needs one."""
    added, admitted = admission(pair, 0, number, Random(number))  # noqa: S311 - a test
    added |= {"num_appended_tokens": BLOCK_SIZE, "block_hashes": pair.hashes(0, number, 0, BLOCK_SIZE)}
    return [added, {"operations": admitted["operations"], "request_numbers": number}]


def outcomes(pair: Pair, *rows: Row) -> list[int]:
    result = pair.run(0, **columns(list(rows)))
    assert result
    return result.outcomes or [Outcome.OK] * len(rows)


def test_decodes_are_done_together(together: list[int]) -> None:
    """What the test above compares is not one way with itself."""
    pair = Pair(50, 1)
    outcomes(pair, *full(pair, 1), *full(pair, 2))
    assert together == []
    for _ in range(20):
        outcomes(pair, *decodes(1, 2))
    assert together == [2] * 20


def test_decodes_between_other_operations_are_done_together(together: list[int]) -> None:
    pair = Pair(50, 1)
    outcomes(pair, *full(pair, 1), *full(pair, 2), *full(pair, 3))
    freed = {"operations": Operation.FREE, "request_numbers": 3}
    assert outcomes(pair, freed, *decodes(1, 2), *full(pair, 4)) == [Outcome.OK] * 5
    assert together == [2]
    cached = {"operations": Operation.CACHE, "request_numbers": 1}
    assert outcomes(pair, *decodes(1, 2), cached) == [Outcome.OK] * 3
    assert together == [2]


def test_decodes_that_find_too_few_blocks_are_done_one_by_one(together: list[int]) -> None:
    pair = Pair(4, 1)
    outcomes(pair, *full(pair, 1), *full(pair, 2))
    assert outcomes(pair, *decodes(1, 2)) == [Outcome.OK, Outcome.NO_BLOCKS]
    assert together == []


def test_decodes_that_make_too_much_work_are_done_one_by_one(
    together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(50, 1)
    outcomes(pair, *[row for number in range(1, 8) for row in full(pair, number)])
    monkeypatch.setattr("kvpool.core.execution.apply.MAX_STEP_WORK", 2)
    assert outcomes(pair, *decodes(1, 2, 3)) == [Outcome.OK, Outcome.OK, Outcome.SKIPPED]
    assert together == []
    monkeypatch.setattr("kvpool.core.execution.apply.MAX_STEP_WORK", 3)
    freed = {"operations": Operation.FREE, "request_numbers": 7}
    found = outcomes(pair, *decodes(3, 4), freed, *decodes(5, 6))
    assert found == [Outcome.OK] * 4 + [Outcome.SKIPPED]
    assert together == [2]
