"""Steps of plain allocations, done together, against the same steps done operation by operation."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.server.core.config import ReuseOrder
from kvpool.server.core.errors import KvpoolError
from kvpool.server.core.integrity import check_integrity
from kvpool.server.core.plain_step import PlainStep
from kvpool.server.core.session import Session
from kvpool.server.core.step import Operation, Step, StepResult
from support_core import BLOCK_SIZE, World, block_hashes

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
    {"num_quiet_allocations": -1},
    {"num_new_tokens": [1]},
    {"num_lookahead_tokens": [1]},
    {"launched_sequence": 10**6},
    {"launched_sequence": -1},
    {"num_external_tokens": [1]},
    {"num_reserved_blocks": [1]},
    {"full_sequence_must_fit": [True]},
]


class Pair:
    """The same sessions twice: in a pool that does such steps together, and in one that does none so."""

    def __init__(self, num_blocks: int, num_sessions: int, **options: Any) -> None:
        self.together, self.one_by_one = World(num_blocks, **options), World(num_blocks, **options)
        self.one_by_one.pool.plain_manager = None
        self.sessions = [(self.together.open(), self.one_by_one.open()) for _ in range(num_sessions)]
        self.num_together = 0
        self.contents: dict[tuple[int, int], str] = {}

    def run(self, at: int, **columns: Any) -> StepResult | None:
        """Applies a step to both, which must answer and be the same; None if they refuse it."""
        answers: list[object] = []
        for world, session in zip((self.together, self.one_by_one), self.sessions[at], strict=True):
            step = Step(session.sequence + 1, **columns)
            if world is self.together:
                self.num_together += PlainStep.of(world.pool, session, step) is not None
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


def admit(pair: Pair, at: int, number: int, rng: Random) -> None:
    pair.contents[at, number] = rng.choice(CONTENTS)
    num_tokens = rng.randint(1, 40)
    pair.run(
        at,
        operations=[Operation.ADD, Operation.ADMIT],
        request_numbers=[number, number],
        num_appended_tokens=[num_tokens, 0],
        num_new_tokens=[0, rng.choice([0, 0, 3])],
        delay_cache_blocks=[False, rng.random() < 0.1],
        block_hashes=pair.hashes(at, number, 0, num_tokens),
        request_ids=[f"r{number}"],
    )


def free(pair: Pair, at: int, session: Session, rng: Random) -> None:
    number = rng.choice(list(session.by_number))
    operation = rng.choice([Operation.FREE, Operation.PREEMPT])
    told = {name: rng.choice([0, 0, session.sequence]) for name in ("executed_sequence", "launched_sequence")}
    pair.run(at, operations=[operation], request_numbers=[number], **told)


def cache(pair: Pair, at: int, session: Session, rng: Random) -> None:
    """What was left uncached, as far as it may be."""
    number, request = rng.choice(list(session.by_number.items()))
    pair.run(
        at,
        operations=[Operation.CACHE],
        request_numbers=[number],
        num_new_tokens=[rng.randint(0, request.num_computed_tokens)],
    )


def decode(pair: Pair, at: int, session: Session, rng: Random) -> None:
    running = [number for number, request in session.by_number.items() if request.num_computed_tokens]
    numbers = rng.sample(running, rng.randint(0, len(running)))
    columns: dict[str, list[Any]] = {"num_appended_tokens": [], "num_new_tokens": [], "num_taken_tokens": []}
    hashes = []
    for number in numbers:
        request = session.by_number[number]
        most = rng.choice([request.quiet_tokens, pair.together.pool.most_taken_tokens(request)])
        room = max(most - request.num_computed_tokens, 0)
        grown = rng.choice([0, 1, 1, 1, rng.randint(0, 9)])
        columns["num_appended_tokens"].append(grown)
        columns["num_new_tokens"].append(rng.choice([1, 1, rng.randint(1, 6)]))
        columns["num_taken_tokens"].append(rng.randint(0, room))
        hashes.append(pair.hashes(at, number, request.num_tokens, grown))
    step: dict[str, Any] = {
        "operations": [Operation.ALLOCATE] * len(numbers),
        "request_numbers": list(numbers),
        "block_hashes": b"".join(hashes),
        "executed_sequence": rng.choice([0, session.sequence, session.sequence]),
        "launched_sequence": rng.choice([0, 0, session.sequence]),
        "num_quiet_allocations": rng.choice([0, 5]),
        **{name: column if any(column) else [] for name, column in columns.items()},
    }
    kind = rng.random()
    if rng.random() < 0.1 and numbers:  # drafts that were rejected
        step["num_rejected_tokens"] = [rng.randint(0, session.by_number[n].num_computed_tokens // 2) for n in numbers]
        step["delay_cache_blocks"] = [rng.random() < 0.3 for _ in numbers]
    if rng.random() < 0.1:
        step["num_in_flight_tokens"] = [rng.randint(0, 9) for _ in numbers]
        step["num_reserved_blocks"] = [rng.choice([0, 0, 3, 50]) for _ in numbers]
        step["full_sequence_must_fit"] = [rng.random() < 0.3 for _ in numbers]
    if kind < 0.1 and numbers:
        name, values = rng.choice(WRONG)
        if step[name]:
            step[name][rng.randrange(len(numbers))] = rng.choice(values)
    elif kind < 0.15:
        step |= rng.choice(ODD)
    elif kind < 0.2 and len(numbers) > 1:
        step["request_numbers"][1] = step["request_numbers"][0]
    pair.run(at, **step)


@pytest.mark.parametrize("order", ReuseOrder)
@pytest.mark.parametrize("caching", [True, False])
@settings(deadline=None)
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
        session = pair.sessions[at][0]
        kind = rng.random()
        if kind < 0.2 or not session.by_number:
            admit(pair, at, next_number, rng)
            next_number += 1
        elif kind < 0.25:
            cache(pair, at, session, rng)
        elif kind < 0.35:
            free(pair, at, session, rng)
        else:
            decode(pair, at, session, rng)


def test_steps_are_done_together() -> None:
    """What the test above compares is not one way with itself."""
    pair = Pair(50, 1)
    for number in (1, 2):
        admit(pair, 0, number, Random(number))  # noqa: S311 - a test
    assert pair.num_together == 0
    for _ in range(20):
        pair.run(0, operations=[Operation.ALLOCATE] * 2, request_numbers=[1, 2], num_new_tokens=[1, 1])
    assert pair.num_together == 20
