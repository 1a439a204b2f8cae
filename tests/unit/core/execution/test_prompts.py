"""A step can say how long the prompt of a request is; which prefixes are kept depends on it (see `retention`)."""

from typing import Any

import pytest

from kvpool.core.ids import RequestId
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.steps.columns import Operation, Outcome, StepResult
from support.core import World, block_hashes, opened

ADMIT, ALLOCATE, APPEND = Operation.ADMIT, Operation.ALLOCATE, Operation.APPEND
CONTENT = "abcdefghij"


def sparse(num_blocks: int = 80) -> World:
    """A pool that keeps the blocks of windows at the ends of prompts only."""
    return World(num_blocks, specs=[FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=5)], retention_tokens=0)


def grow(world: World, session: Session, operation: Operation, **columns: Any) -> StepResult:
    """Appends 20 tokens to the 20 of request 1, in an operation with more columns."""
    hashes = block_hashes(CONTENT, 10)[-len(block_hashes(CONTENT, 5)) :]
    return world.run(session, operation, request_numbers=[1], num_appended_tokens=[20], block_hashes=hashes, **columns)


def hit(world: World, num_tokens: int) -> int:
    """Length of the hit of a new request with the first tokens of the content."""
    other = world.open()
    hits = world.admit(other, 1, CONTENT, num_tokens).num_hit_tokens
    world.free(other, 1)
    return hits[0] if hits else 0


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("before", [None, APPEND, ADMIT])
def test_a_prompt_that_grows_is_kept_at_its_new_end(before: Operation | None, *, says: bool) -> None:
    world = sparse()
    session = world.open()
    world.admit(session, 1, CONTENT, 20)
    prompt = {"num_prompt_tokens": [40]} if says else {}
    if before is ADMIT:
        world.executed(session)
        world.run(session, Operation.PREEMPT, request_numbers=[1])
        grow(world, session, ADMIT, **prompt)
    elif before is APPEND:
        grow(world, session, APPEND, **prompt)
        world.allocate(session, 1, 20)
    else:
        grow(world, session, ALLOCATE, num_new_tokens=[20], **prompt)
    assert session.requests[RequestId("r1")].num_prompt_tokens == (40 if says else 20)
    world.executed(session)
    assert (hit(world, 40) == 36) == says


def test_a_declared_request_can_have_put_out_some_of_its_tokens() -> None:
    world = sparse()
    session = world.open()
    world.admit(session, 1, CONTENT, 40, num_prompt_tokens=[20])
    world.executed(session)
    assert (hit(world, 40), hit(world, 20)) == (16, 16)


@pytest.mark.parametrize("end", [3, 4])
def test_a_state_at_which_a_step_ended_is_kept_for_the_new_prompt(end: int) -> None:
    """As in vLLM, which looks at the end of the prompt whenever it caches; but no state after fewer tokens."""
    world, session = opened(80, specs=[FullAttentionSpec(4), MambaSpec(4, only_step_ends=True)], retention_tokens=0)
    world.admit(session, 1, CONTENT, 3)
    hashes, num_left = block_hashes(CONTENT, 1), 6 - end
    if end == 4:
        world.allocate(session, 1, 1, num_appended_tokens=[1], block_hashes=hashes)
        hashes = b""
    world.allocate(session, 1, num_left, num_appended_tokens=[num_left], num_prompt_tokens=[6], block_hashes=hashes)
    world.executed(session)
    assert hit(world, 6) == end // 4 * 4


def test_a_refused_operation_still_says_it() -> None:
    world = sparse(num_blocks=14)
    session = world.open()
    world.admit(session, 1, CONTENT, 20)
    result = grow(world, session, ALLOCATE, num_prompt_tokens=[40], num_new_tokens=[20])
    assert result.outcomes == [Outcome.NEVER_FITS]
    assert session.requests[RequestId("r1")].num_prompt_tokens == 40


@pytest.mark.parametrize(
    ("operation", "columns", "field"),
    [
        (APPEND, {"num_prompt_tokens": [21]}, "num_prompt_tokens[0]"),
        (APPEND, {"num_prompt_tokens": [1, 1]}, "num_prompt_tokens"),
        (Operation.FREE, {"num_prompt_tokens": [20]}, "num_prompt_tokens[0]"),
        (Operation.PREEMPT, {"num_prompt_tokens": [1]}, "num_prompt_tokens[0]"),
        (Operation.RESET, {"num_prompt_tokens": [1], "request_numbers": [0]}, "num_prompt_tokens[0]"),
    ],
)
def test_an_impossible_prompt_is_refused(operation: Operation, columns: dict[str, Any], field: str) -> None:
    world = sparse()
    session = world.open()
    world.admit(session, 1, CONTENT, 20)
    with world.refuses(field=field):
        world.run(session, operation, **{"request_numbers": [1], **columns})
    assert session.requests[RequestId("r1")].num_prompt_tokens == 20
