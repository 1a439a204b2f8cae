"""Rules 1 and 2 of check.py: a valid step can be applied, whatever the outcome of its earlier operations."""

import pytest

from kvpool.core.errors import InvalidArgumentError, NotFoundError
from kvpool.core.ids import BlockId, RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import MAX_OPERATIONS, Operation, Outcome, Step
from support.core import World, block_hashes
from support.integrity import check_integrity

ADD, ADMIT, ALLOCATE, CACHE = Operation.ADD, Operation.ADMIT, Operation.ALLOCATE, Operation.CACHE
FREE, PREEMPT, APPEND, EVICT = Operation.FREE, Operation.PREEMPT, Operation.APPEND, Operation.EVICT


def computed_tokens(session: Session, number: int) -> int:
    return session.by_number[RequestNumber(number)].num_computed_tokens


def test_a_step_may_be_as_long_as_documented() -> None:
    world = World()
    session = world.open()
    assert world.apply(session, Step(1, operations=[Operation.RESET] * MAX_OPERATIONS)).sequence == 1


def test_one_step_can_hold_the_whole_life_of_a_request() -> None:
    world = World()
    session = world.open()
    result = world.run(
        session, ADD, ADMIT, APPEND, CACHE, PREEMPT, FREE, request_numbers=[1] * 6,
        num_appended_tokens=[5, 0, 0, 0, 0, 0], num_new_tokens=[0, 0, 0, 5, 0, 0],
        block_hashes=block_hashes("a", 1), request_ids=["r"],
    )  # fmt: skip
    assert (result.num_new_blocks, result.free_blocks, session.requests) == ([0, 2, 0, 0, 0, 0], 19, {})
    check_integrity(world.pool, world.sessions())


@pytest.mark.parametrize("gone", [FREE, PREEMPT])
def test_rejecting_tokens_of_a_request_freed_or_preempted_in_the_step_is_refused(gone: Operation) -> None:
    world = World()
    session = world.open()
    world.admit(session, 1, "abc", 13)
    before = world.snapshot()
    with pytest.raises((InvalidArgumentError, NotFoundError)) as caught:
        world.run(session, gone, APPEND, request_numbers=[1, 1], num_rejected_tokens=[0, 1])
    assert caught.value.field in {"num_rejected_tokens[1]", "request_numbers[1]"}
    assert world.snapshot() == before


def test_rejected_and_appended_tokens_count_when_there_are_too_few_blocks() -> None:
    """Rule 3 of apply.py: the scheduler does not repeat them when it retries."""
    world = World(num_blocks=3)
    session = world.open()
    world.admit(session, 1, "a", 6)
    world.run(session, ALLOCATE, request_numbers=[1], num_new_tokens=[2])  # two drafts
    result = world.run(
        session, ALLOCATE, request_numbers=[1], num_appended_tokens=[3], num_new_tokens=[9], num_rejected_tokens=[1],
        block_hashes=block_hashes("ab", 2)[-32:],
    )  # fmt: skip
    assert result.outcomes == [Outcome.NO_BLOCKS]
    assert (session.by_number[RequestNumber(1)].num_tokens, computed_tokens(session, 1)) == (9, 7)


def test_caching_beyond_the_allocation_caches_only_allocated_tokens() -> None:
    world = World(num_blocks=3)
    session = world.open()
    world.run(
        session, ADD, ADMIT, CACHE, request_numbers=[1, 1, 1], num_appended_tokens=[13, 0, 0],
        num_new_tokens=[0, 6, 13], delay_cache_blocks=[False, True, False],
        block_hashes=block_hashes("abc", 3), request_ids=["r"],
    )  # fmt: skip
    assert computed_tokens(session, 1) == 6
    assert len(world.pool.blocks.prefix_map) == 1
    check_integrity(world.pool, world.sessions())


@pytest.mark.parametrize(("operation", "num_new_tokens"), [(ALLOCATE, 20), (ADMIT, 6)])
def test_rejections_never_exceed_the_allocated_tokens(operation: Operation, num_new_tokens: int) -> None:
    world = World(num_blocks=3)
    session = world.open()
    try:
        world.run(
            session, ADD, operation, APPEND, request_numbers=[1, 1, 1],
            num_appended_tokens=[20, 0, 0], num_new_tokens=[0, num_new_tokens, 0], num_rejected_tokens=[0, 0, 20],
            block_hashes=block_hashes("abcde", 5), request_ids=["r"],
        )  # fmt: skip
    except InvalidArgumentError:
        return
    assert computed_tokens(session, 1) >= 0


@pytest.mark.parametrize("operation", [Operation.LOOKUP, Operation.LOOKUP_UNCOUNTED])
def test_a_request_without_tokens_finds_nothing(operation: Operation) -> None:
    world = World()
    session = world.open()
    result = world.run(session, ADD, operation, request_numbers=[1, 1], request_ids=["r"])
    assert (result.outcomes, result.num_hit_tokens, result.block_ids) == ([], [], [])


def test_without_caching_no_hit_can_be_named() -> None:
    world = World(enable_caching=False)
    one, other = world.open(), world.open()
    world.admit(one, 1, "", 13)
    try:
        result = world.run(
            other, ADD, ALLOCATE, request_numbers=[1, 1], num_appended_tokens=[9, 0], num_new_tokens=[0, 1],
            num_block_ids=[0, 2], block_ids=[1, 2], request_ids=["r"],
        )  # fmt: skip
    except InvalidArgumentError:
        return
    assert result.outcomes == [0, Outcome.HIT_CHANGED]
    assert [world.pool.blocks.ref_cnt(BlockId(b)) for b in (1, 2)] == [1, 1]


def test_a_hash_given_twice_in_one_request_keeps_the_pool_consistent() -> None:
    world = World()
    session = world.open()
    for number in (1, 2):
        try:
            world.run(
                session, ADD, ADMIT, request_numbers=[number] * 2, num_appended_tokens=[9, 0],
                block_hashes=block_hashes("a", 1) * 2, request_ids=[f"r{number}"],
            )  # fmt: skip
        except InvalidArgumentError:
            return
    check_integrity(world.pool, world.sessions())


def test_an_id_with_invalid_unicode_is_measured_in_bytes() -> None:
    """The wire cannot carry such an id, but a caller in the same process can pass it."""
    world = World()
    session = world.open()
    with pytest.raises(InvalidArgumentError) as caught:
        world.run(session, ADD, request_numbers=[1], request_ids=["\ud800" * 100])
    assert caught.value.field == "request_ids[0]"


def test_ids_are_measured_in_bytes() -> None:
    world = World()
    session = world.open()
    longest = "ü" * 128
    with pytest.raises(InvalidArgumentError) as caught:
        world.run(session, ADD, request_numbers=[1], request_ids=[longest + "x"])
    assert caught.value.field == "request_ids[0]"
    world.run(session, ADD, request_numbers=[1], request_ids=[longest])
    assert list(session.requests) == [longest]


def test_lora_names_come_with_added_requests_only() -> None:
    world = World()
    session = world.open()
    for names, ids, numbers, operations in (
        (["l"], [], [0], [EVICT]),
        (["l", "m"], ["r"], [1], [ADD]),
        (["l" * 257], ["r"], [1], [ADD]),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            world.run(session, *operations, request_numbers=numbers, request_ids=ids, lora_names=names)
        assert caught.value.field.startswith("lora_names")
    world.run(session, ADD, ADD, request_numbers=[1, 2], request_ids=["r", "s"], lora_names=["", "l"])
    assert [request.lora_name for request in session.requests.values()] == [None, "l"]


def test_a_pool_with_events_requires_every_token() -> None:
    world = World(enable_events=True)
    session = world.open()
    for token_ids in ([], [1, 2], [1, 2, 3, 4]):
        with pytest.raises(InvalidArgumentError) as caught:
            world.run(
                session, ADD, request_numbers=[1], request_ids=["r"], num_appended_tokens=[3], token_ids=token_ids
            )
        assert caught.value.field == "token_ids"
    world.run(session, ADD, request_numbers=[1], request_ids=["r"], num_appended_tokens=[3], token_ids=[1, 2, 3])
    assert session.by_number[RequestNumber(1)].token_ids == [1, 2, 3]


def test_a_refused_step_makes_no_events_and_publishes_nothing() -> None:
    world = World(enable_events=True)
    session = world.open()
    world.run(
        session, ADD, ADMIT, request_numbers=[1, 1], request_ids=["r"], num_appended_tokens=[4, 0],
        block_hashes=block_hashes("a", 1), token_ids=[1, 2, 3, 4],
    )  # fmt: skip
    world.pool.blocks.take_events()
    with pytest.raises(NotFoundError):
        world.run(session, EVICT, FREE, executed=1, request_numbers=[0, 9], num_block_ids=[1, 0], block_ids=[1])
    assert world.pool.blocks.take_events() == []
    assert (session.executed_sequence, list(world.pool.blocks.prefix_map.pending())) == (0, [1])


def test_without_caching_a_request_has_no_hashes() -> None:
    world = World(enable_caching=False)
    session = world.open()
    with pytest.raises(InvalidArgumentError) as caught:
        world.run(
            session, ADD, request_numbers=[1], request_ids=["r"], num_appended_tokens=[4],
            block_hashes=block_hashes("a", 1),
        )  # fmt: skip
    assert caught.value.field == "block_hashes"
