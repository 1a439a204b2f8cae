"""The rules of rows.py: a step is validated as a whole, and what passes can be applied."""

import pytest

from kvpool.core.errors import InvalidArgumentError, NotFoundError
from kvpool.core.ids import BlockId, RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import MAX_OPERATIONS, Operation, Outcome, Step
from support.core import World, block_hashes, opened
from support.refusals import refused

ADMIT, ALLOCATE, CACHE, FREE = Operation.ADMIT, Operation.ALLOCATE, Operation.CACHE, Operation.FREE
PREEMPT, APPEND, EVICT = Operation.PREEMPT, Operation.APPEND, Operation.EVICT


def computed_tokens(session: Session, number: int) -> int:
    return session.by_number[RequestNumber(number)].num_computed_tokens


def test_a_step_may_be_as_long_as_documented(world: World, session: Session) -> None:
    assert world.apply(session, Step(1, operations=[Operation.RESET] * MAX_OPERATIONS)).sequence == 1


@pytest.mark.parametrize("gone", [FREE, PREEMPT])
def test_rejecting_tokens_of_a_freed_or_preempted_request_is_refused(gone: Operation) -> None:
    world, session = opened()
    world.admit(session, 1, "abc", 13)
    world.run(session, gone, request_numbers=[1])
    field = "num_rejected_tokens[0]" if gone is PREEMPT else "request_numbers[0]"
    with world.refuses((InvalidArgumentError, NotFoundError), field=field):
        world.run(session, APPEND, request_numbers=[1], num_rejected_tokens=[1])


def test_rejected_and_appended_tokens_count_when_there_are_too_few_blocks() -> None:
    """Rule 3 of apply.py: the scheduler does not repeat them when it retries."""
    world, session = opened(num_blocks=3)
    world.admit(session, 1, "a", 6)
    world.allocate(session, 1, 2)  # two drafts
    result = world.allocate(
        session, 1, 9, num_appended_tokens=[3], num_rejected_tokens=[1], block_hashes=block_hashes("ab", 2)[-32:]
    )
    assert result.outcomes == [Outcome.NEVER_FITS]
    assert (session.by_number[RequestNumber(1)].num_tokens, computed_tokens(session, 1)) == (9, 7)


def test_only_allocated_tokens_are_cached() -> None:
    world, session = opened(num_blocks=3)
    world.admit(session, 1, "abc", 13, num_new_tokens=[6], delay_cache_blocks=[True])
    with world.refuses(field="num_new_tokens[0]"):
        world.run(session, CACHE, request_numbers=[1], num_new_tokens=[13])
    world.run(session, CACHE, request_numbers=[1], num_new_tokens=[6])
    assert len(world.pool.blocks.prefix_map) == 1


@pytest.mark.parametrize(("operation", "num_new_tokens"), [(ALLOCATE, 20), (ADMIT, 6)])
def test_more_rejections_than_allocated_tokens_are_refused(operation: Operation, num_new_tokens: int) -> None:
    world, session = opened(num_blocks=3)
    world.declare(session, operation, 1, "abcde", 20, num_new_tokens=[num_new_tokens])
    computed = computed_tokens(session, 1)
    assert computed == (0 if operation is ALLOCATE else 6)
    with world.refuses(field="num_rejected_tokens[0]"):
        world.run(session, APPEND, request_numbers=[1], num_rejected_tokens=[computed + 1])


@pytest.mark.parametrize("operation", [Operation.LOOKUP, Operation.LOOKUP_UNCOUNTED])
def test_a_request_without_tokens_finds_nothing(operation: Operation, world: World, session: Session) -> None:
    result = world.run(session, operation, request_numbers=[1], request_ids=["r"])
    assert (result.outcomes, result.num_hit_tokens, result.block_ids) == ([], [], [])


def test_without_caching_no_hit_can_be_named() -> None:
    world = World(enable_caching=False)
    one, other = world.open(), world.open()
    world.admit(one, 1, "", 13)
    try:
        result = world.declare(other, ALLOCATE, 1, "", 9, num_new_tokens=[1], num_block_ids=[2], block_ids=[1, 2])
    except InvalidArgumentError:
        return
    assert result.outcomes == [Outcome.HIT_CHANGED]
    assert [world.pool.blocks.ref_cnt(BlockId(b)) for b in (1, 2)] == [1, 1]


def test_ids_are_measured_in_bytes(world: World, session: Session) -> None:
    """The wire cannot carry invalid Unicode, but a caller in the same process can pass it."""
    longest = "ü" * 128
    for too_long in (longest + "x", "\ud800" * 100):
        with refused(field="request_ids[0]"):
            world.run(session, APPEND, request_numbers=[1], request_ids=[too_long])
    world.run(session, APPEND, request_numbers=[1], request_ids=[longest])
    assert list(session.requests) == [longest]


def test_lora_names_come_with_declared_requests_only(world: World, session: Session) -> None:
    for names, ids, numbers, operations in (
        (["l"], [], [0], [EVICT]),
        (["l", "m"], ["r"], [1], [APPEND]),
        (["l" * 257], ["r"], [1], [APPEND]),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            world.run(session, *operations, request_numbers=numbers, request_ids=ids, lora_names=names)
        assert caught.value.field.startswith("lora_names")
    world.run(session, APPEND, APPEND, request_numbers=[1, 2], request_ids=["r", "s"], lora_names=["", "l"])
    assert [request.lora_name for request in session.requests.values()] == [None, "l"]


def test_trace_contexts_come_with_declared_requests_only(world: World, session: Session) -> None:
    for size, ids, numbers, operations in (
        (25, [], [0], [EVICT]),
        (24, ["r"], [1], [APPEND]),
        (50, ["r"], [1], [APPEND]),
    ):
        with refused(field="trace_contexts"):
            world.run(session, *operations, request_numbers=numbers, request_ids=ids, trace_contexts=b"c" * size)
        assert not session.requests
    joined = bytes(25) + b"c" * 25
    world.run(session, APPEND, APPEND, request_numbers=[1, 2], request_ids=["r", "s"], trace_contexts=joined)
    assert b"".join(request.trace_context for request in session.requests.values()) == joined


def test_a_pool_with_events_requires_every_token() -> None:
    world, session = opened(enable_events=True)
    for token_ids in ([], [1, 2], [1, 2, 3, 4]):
        with refused(field="token_ids"):
            world.declare(session, APPEND, 1, "", 3, token_ids=token_ids)
    world.declare(session, APPEND, 1, "", 3, token_ids=[1, 2, 3])
    assert session.by_number[RequestNumber(1)].token_ids == [1, 2, 3]


def test_a_refused_step_makes_no_events_and_publishes_nothing() -> None:
    world, session = opened(enable_events=True)
    world.admit(session, 1, "a", 4, token_ids=[1, 2, 3, 4])
    world.pool.blocks.take_events()
    with pytest.raises(NotFoundError):
        world.run(session, EVICT, FREE, executed=1, request_numbers=[0, 9], num_block_ids=[1, 0], block_ids=[1])
    assert world.pool.blocks.take_events() == []
    assert (session.executed_sequence, list(world.pool.blocks.prefix_map.pending.steps)) == (0, [1])


def test_without_caching_a_request_has_no_hashes() -> None:
    world, session = opened(enable_caching=False)
    with refused(field="block_hashes"):
        world.declare(session, APPEND, 1, "a", 4, block_hashes=block_hashes("a", 1))
