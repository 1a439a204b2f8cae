"""The credit of requests in the results of steps."""

from typing import Any

import pytest

from kvpool.core.blocks.quota import Quota
from kvpool.core.ids import RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec
from kvpool.core.steps.columns import Operation, Outcome
from support.core import BLOCK_SIZE, World, block_hashes, opened

ADMIT, ALLOCATE, APPEND, CACHE = Operation.ADMIT, Operation.ALLOCATE, Operation.APPEND, Operation.CACHE
RESERVE = Operation.RESERVE
FREE, PREEMPT, EVICT = Operation.FREE, Operation.PREEMPT, Operation.EVICT
FOURTH = block_hashes("abcd", 4)[-32:]

# Request 1 holds four blocks for 13 tokens; its credit is 15, one slot less, since the sixteenth token fills a block.
# Each case: the operation on request 1, its columns, the credit afterwards.
CASES: dict[str, tuple[Operation, dict[str, Any], int]] = {
    "a decode": (ALLOCATE, {"num_new_tokens": [1], "num_appended_tokens": [1]}, 15),
    "a decode after taken tokens": (ALLOCATE, {"num_new_tokens": [1], "num_taken_tokens": [1]}, 15),
    "a decode that fills a block": (
        ALLOCATE, {"num_new_tokens": [3], "num_appended_tokens": [3], "block_hashes": FOURTH}, 16,
    ),
    "a decode that needs the next block": (
        ALLOCATE, {"num_new_tokens": [4], "num_appended_tokens": [4], "block_hashes": FOURTH}, 19,
    ),
    "an allocation for unknown tokens": (ALLOCATE, {"num_new_tokens": [4]}, 15),
    "an allocation of look-ahead": (ALLOCATE, {"num_new_tokens": [1], "num_lookahead_tokens": [8]}, 15),
    "an allocation that leaves a full block uncached": (
        ALLOCATE,
        {
            "num_new_tokens": [3], "num_appended_tokens": [3], "block_hashes": FOURTH, "delay_cache_blocks": [True],
        },
        15,
    ),
    "an append": (APPEND, {"num_appended_tokens": [1]}, 15),
    "an append after taken tokens": (APPEND, {"num_taken_tokens": [2]}, 15),
    "an append after a rejection": (APPEND, {"num_rejected_tokens": [2]}, 15),
    "caching": (CACHE, {"num_new_tokens": [13]}, 15),
    "a count of common blocks": (Operation.COMMON_PREFIX, {}, 15),
    "a preemption": (PREEMPT, {}, 0),
    "a free": (FREE, {}, 0),
}  # fmt: skip


@pytest.fixture
def session(world: World) -> Session:
    session = world.open()
    assert world.admit(session, 1, "abc", 13).credit_tokens == [15]
    return session


@pytest.mark.parametrize("case", CASES)
def test_the_result_holds_the_credit_after_the_operation(case: str, world: World, session: Session) -> None:
    operation, columns, expected = CASES[case]
    result = world.run(session, operation, request_numbers=[1], **columns)
    assert (result.credit_tokens, result.outcomes) == ([expected] if expected else [], [])


@pytest.mark.parametrize("case", [case for case in CASES if case != "a free"])
def test_as_many_tokens_as_the_credit_can_be_taken_and_no_more(case: str, world: World, session: Session) -> None:
    operation, columns, credit = CASES[case]
    world.run(session, operation, request_numbers=[1], **columns)
    left = max(credit - session.by_number[RequestNumber(1)].num_computed_tokens, 0)
    with world.refuses(match=rf"num_taken_tokens\[0\]: {left + 1} is not in \[0, {left}\]"):
        world.run(session, APPEND, request_numbers=[1], num_taken_tokens=[left + 1])
    world.run(session, APPEND, request_numbers=[1], num_taken_tokens=[left])


def test_caching_late_gives_credit(world: World, session: Session) -> None:
    result = world.allocate(session, 1, 5, num_appended_tokens=[5], block_hashes=FOURTH, delay_cache_blocks=[True])
    assert result.credit_tokens == [15]  # less than the 18 computed tokens: none
    assert world.run(session, CACHE, request_numbers=[1], num_new_tokens=[18]).credit_tokens == [19]


def test_without_caching_the_credit_ends_with_the_blocks() -> None:
    world, session = opened(enable_caching=False)
    assert world.admit(session, 1, "", 13).credit_tokens == [16]


@pytest.mark.parametrize(
    "operation", [operation for operation in Operation if operation not in (ADMIT, ALLOCATE, RESERVE)]
)
def test_requests_without_blocks_have_no_credit(operation: Operation, world: World, session: Session) -> None:
    without_request = operation in (EVICT, Operation.RESET)
    world.run(session, APPEND, request_numbers=[2], num_appended_tokens=[3], request_ids=["waiting"])
    result = world.run(session, operation, request_numbers=[0 if without_request else 2])
    assert result.credit_tokens == []


def test_each_operation_has_the_credit_of_its_request(world: World, session: Session) -> None:
    world.admit(session, 2, "xy", 8)
    world.admit(session, 3, "vw", 6)
    result = world.run(
        session, ALLOCATE, EVICT, ALLOCATE, APPEND, ADMIT, FREE, request_numbers=[1, 0, 2, 4, 5, 3],
        num_appended_tokens=[0, 0, 0, 2, 5, 0], num_new_tokens=[1, 0, 1, 0, 0, 0],
        block_hashes=block_hashes("z", 1), request_ids=["waiting", "admitted"],
    )  # fmt: skip
    assert result.credit_tokens == [15, 0, 11, 0, 7, 0]


@pytest.mark.parametrize("quota", [Quota(), Quota(max_blocks=19)])
def test_decodes_together_have_the_credit_of_each(world: World, quota: Quota) -> None:
    """In the fast loop, and one by one where a quota applies."""
    session = world.open(quota=quota)
    for number in (1, 2, 3):
        world.admit(session, number, "xyz"[number - 1], 5 + number)
    result = world.run(session, *[ALLOCATE] * 3, request_numbers=[1, 2, 3], num_new_tokens=[1, 1, 1])
    assert result.credit_tokens == [7, 7, 11]


def test_a_refused_operation_keeps_the_credit() -> None:
    world, session = opened(num_blocks=7)
    world.admit(session, 1, "abc", 13)
    world.admit(session, 2, "xy", 5)
    result = world.run(
        session, ALLOCATE, ALLOCATE, ADMIT, request_numbers=[1, 2, 3], num_appended_tokens=[0, 0, 2],
        num_taken_tokens=[1, 0, 0], num_new_tokens=[5, 1, 0], request_ids=["third"],
    )  # fmt: skip
    assert result.outcomes == [Outcome.NO_BLOCKS, Outcome.SKIPPED, Outcome.SKIPPED]
    assert result.credit_tokens == [15, 7, 0]
    world.run(session, APPEND, APPEND, request_numbers=[1, 2], num_taken_tokens=[1, 2])  # up to the credit


def test_an_operation_beyond_the_maximum_keeps_the_credit(world: World) -> None:
    session = world.open(quota=Quota(max_blocks=4))
    world.admit(session, 1, "abc", 13)
    result = world.allocate(session, 1, 5)
    assert (result.outcomes, result.credit_tokens) == ([Outcome.NEVER_FITS], [15])


def test_a_changed_hit_gives_no_credit(world: World, session: Session) -> None:
    world.declare(session, Operation.LOOKUP, 2, "abc", 13)
    world.run(session, EVICT, num_block_ids=[1], block_ids=[1])
    result = world.allocate(session, 2, 1, hit=[[1, 2, 3]])
    assert (result.outcomes, result.credit_tokens) == ([Outcome.HIT_CHANGED], [])


def test_a_request_without_blocks_has_no_credit() -> None:
    """Also if its tables begin with blocks for the states of drafts."""
    world, session = opened(num_blocks=40, specs=[MambaSpec(BLOCK_SIZE, num_speculative_blocks=2)])
    world.declare(session, APPEND, 1, "a", 4)
    assert world.run(session, CACHE, request_numbers=[1]).credit_tokens == []


def test_pools_with_states_at_the_ends_of_steps_give_no_credit() -> None:
    world, session = opened(
        num_blocks=40, specs=[FullAttentionSpec(BLOCK_SIZE), MambaSpec(BLOCK_SIZE, only_step_ends=True)]
    )
    assert not world.pool.gives_credit
    assert world.admit(session, 1, "abc", 13).credit_tokens == []
    for operation in (ALLOCATE, APPEND, CACHE, Operation.COMMON_PREFIX, PREEMPT, ADMIT, FREE):
        new = [1] if operation in (ALLOCATE, ADMIT) else [0]
        assert world.run(session, operation, request_numbers=[1], num_new_tokens=new).credit_tokens == []
