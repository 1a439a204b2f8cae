"""Decodes that fill a block on credit: the next step reports them, and every answer stays the same."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvpool.client import (
    DeadlineError,
    FullAttentionSpec,
    KVCacheGroup,
    Outcome,
    PoolConfig,
    Request,
    Session,
    StepBuilder,
    WrongStateError,
)
from kvpool.client.blocking import run
from kvpool.core.ids import PoolName
from kvpool.core.steps.columns import Operation
from support.server import pool_config
from unit.client.test_credit import CountingTransport, open_session

ALLOCATE, APPEND, FREE, PREEMPT = Operation.ALLOCATE, Operation.APPEND, Operation.FREE, Operation.PREEMPT


@pytest.fixture
def transport() -> CountingTransport:
    transport = CountingTransport()
    run(transport.create_pool(pool_config(num_blocks=40)))
    return transport


@pytest.fixture
def session(transport: CountingTransport) -> Session:
    return open_session(transport)


def admitted(session: Session, *sizes: int) -> list[Request]:
    """Admits requests with different prompts of these sizes."""
    requests = [session.request(f"r{i}", [100 + i] * size) for i, size in enumerate(sizes)]
    for request in requests:
        assert session.admit(request)
    return requests


def decode(session: Session, requests: Sequence[Request], executed: int = 0) -> None:
    with session.step(executed_sequence=executed) as step:
        step.decode(requests, [7] * len(requests))


def sent_numbers(transport: CountingTransport) -> list[tuple[list[Operation], list[int]]]:
    return [([Operation(op) for op in sent.operations], sent.request_numbers) for sent in transport.take_sent()]


def hit_of_another(transport: CountingTransport, request: Request) -> int:
    """Counts the tokens of a request that another session hits."""
    other = open_session(transport)
    return other.get_computed_blocks(other.request("other", [*request.token_ids, 1])).num_tokens


@pytest.fixture
def filling(transport: CountingTransport, session: Session) -> list[Request]:
    """The next decode of request 1 needs a block, those of 2 and 3 fill one, that of 4 does neither."""
    requests = admitted(session, 8, 7, 11, 5)
    transport.take_sent()
    return requests


def test_decodes_that_need_a_block_are_sent_and_those_that_fill_one_are_reported_later(
    transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    cached = transport.info().cached_blocks
    decode(session, filling)
    assert sent_numbers(transport) == [([ALLOCATE], [1])]
    assert [r.num_computed_tokens for r in filling] == [9, 8, 12, 6]
    assert transport.info().cached_blocks == cached
    decode(session, filling)
    (sent,) = transport.take_sent()
    assert (sent.operations, sent.request_numbers, sent.num_taken_tokens) == ([ALLOCATE] * 2, [2, 3], [1, 1])
    assert sent.block_hashes == filling[1].hashes[1] + filling[2].hashes[2]
    assert transport.info().cached_blocks == cached + 2
    assert [len(r.block_ids[0]) for r in filling] == [3, 3, 4, 2]


def test_a_single_decode_that_fills_a_block_is_sent(transport: CountingTransport, session: Session) -> None:
    """Without another step, no step number states when the block is filled."""
    requests = admitted(session, 7, 5)
    transport.take_sent()
    decode(session, requests)
    assert sent_numbers(transport) == [([ALLOCATE], [1])]


@pytest.mark.parametrize(
    "ask",
    [
        lambda step, other: step.admit(other),
        lambda step, other: step.get_computed_blocks(other),
        lambda step, _: step.evict_blocks([1]),
        lambda step, _: step.reset_prefix_cache(),
    ],
)
@pytest.mark.parametrize("shared", [1, 2])
def test_before_an_operation_that_could_find_or_evict_the_block_the_decode_is_sent(
    transport: CountingTransport,
    session: Session,
    filling: list[Request],
    shared: int,
    ask: Callable[[StepBuilder, Request], object],
) -> None:
    other = session.request(
        "other", [*filling[shared].token_ids, 1, 2]
    )  # its prefix is that of a request that fills a block
    with session.step() as step:
        step.decode(filling, [7] * 4)
        ask(step, other)
    ((_, numbers),) = sent_numbers(transport)
    assert numbers[:3] == [1, 2, 3]


@pytest.mark.parametrize(
    ("token_ids", "is_asked_for"),
    [
        ([101] * 7, False),  # too short for the block that request 2 fills
        ([101] * 9, True),
        ([100] * 40, False),
        ([102] * 8 + [0] * 4, True),
        ([102] * 7 + [0] * 5, False),
    ],
)
def test_before_a_look_up_with_another_prefix_the_decode_is_deferred(
    transport: CountingTransport, session: Session, filling: list[Request], token_ids: list[int], *, is_asked_for: bool
) -> None:
    with session.step() as step:
        step.decode(filling, [7] * 4)
        step.admit(session.request("other", token_ids))
    ((_, numbers),) = sent_numbers(transport)
    assert numbers == ([1, 2, 3, 5, 5] if is_asked_for else [1, 5, 5])


def test_before_a_request_with_a_full_block_no_first_block_is_deferred(
    transport: CountingTransport, session: Session
) -> None:
    """No earlier hash distinguishes two first blocks."""
    requests = admitted(session, 8, 3)
    transport.take_sent()
    with session.step() as step:
        step.decode(requests, [7] * 2)
        step.admit(session.request("other", [1] * 5))
    ((_, numbers),) = sent_numbers(transport)
    assert numbers == [1, 2, 3, 3]


def test_after_an_admission_the_decode_is_deferred(
    transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    with session.step() as step:
        step.admit(session.request("other", [1, 2]))
        step.decode(filling, [7] * 4)
    assert sent_numbers(transport) == [([Operation.ADD, Operation.ADMIT, ALLOCATE], [5, 5, 1])]


@pytest.mark.parametrize("operation", [FREE, PREEMPT])
def test_a_request_freed_in_the_step_that_fills_its_block_is_sent(
    operation: Operation, transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    with session.step() as step:
        step.decode(filling, [7] * 4)
        (step.free if operation is FREE else step.preempt)(filling[1])
    assert sent_numbers(transport) == [([ALLOCATE] * 3 + [operation], [1, 2, 3, 2])]


def test_blocks_that_may_have_equal_hashes_are_cached_in_order(transport: CountingTransport, session: Session) -> None:
    requests = admitted(session, 8)
    for i in range(2):
        requests.append(session.request(f"twin{i}", range(7)))
        session.admit(requests[-1])
    transport.take_sent()
    decode(session, requests)
    assert sent_numbers(transport) == [([ALLOCATE] * 3, [1, 2, 3])]


def test_a_filled_block_without_an_operation_of_its_request_is_reported_by_one(
    transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    decode(session, filling)
    cached = transport.info().cached_blocks
    transport.take_sent()
    session.free(filling[0])
    assert sent_numbers(transport) == [([APPEND, APPEND, FREE], [2, 3, 1])]
    assert transport.info().cached_blocks == cached + 2
    third = session.request("third", [9] * 7)
    session.admit(third)
    transport.take_sent()
    decode(session, [*filling[1:], third])
    assert sent_numbers(transport) == [([ALLOCATE] * 2, [2, 3])]


@pytest.mark.parametrize("leave", [Session.free, Session.preempt])
def test_a_request_freed_on_a_full_block_leaves_it_cached(
    leave: Callable[[Session, Request], object], transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    decode(session, filling)
    with session.step(executed_sequence=session.sequence):
        pass
    leave(session, filling[1])
    assert hit_of_another(transport, filling[1]) == 8


def test_executed_steps_are_reported_with_the_blocks_that_they_filled(
    transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    decode(session, filling)
    transport.take_sent()
    session.mark_executed()
    (sent,) = transport.take_sent()
    assert (sent.operations, sent.executed_sequence) == ([APPEND, APPEND], sent.sequence - 1)
    assert hit_of_another(transport, filling[1]) == 8
    transport.take_sent()
    session.mark_executed()
    assert transport.take_sent() == []


def test_a_report_whose_answer_was_lost_can_be_repeated(
    transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    decode(session, filling)
    transport.lose = True
    with pytest.raises(DeadlineError):
        session.mark_executed()
    session.mark_executed()
    session.free(filling[3])
    assert hit_of_another(transport, filling[1]) == 8


def test_after_a_report_whose_answer_was_lost_the_session_continues(
    transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    decode(session, filling)
    transport.lose = True
    with pytest.raises(DeadlineError):
        session.mark_executed()
    transport.take_sent()
    decode(session, filling)
    assert sent_numbers(transport) == [([APPEND] * 2, [2, 3]), ([ALLOCATE] * 2, [2, 3])]


def test_a_step_is_reported_while_the_next_is_in_flight(
    transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    decode(session, filling)
    filled_by = session.sequence
    with session.begin_step() as step:
        step.free(filling[0])
    session.mark_executed(filled_by)
    session.settle()
    assert hit_of_another(transport, filling[1]) == 8


def test_a_step_is_reported_whose_successor_is_refused(
    transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    decode(session, filling)
    filled_by = session.sequence
    with session.begin_step() as step:
        step.admit(filling[3])
    session.mark_executed(filled_by)
    with pytest.raises(WrongStateError):
        session.settle()
    with session.step(executed_sequence=filled_by):
        pass
    assert hit_of_another(transport, filling[1]) == 8


def test_every_decode_is_counted(transport: CountingTransport, session: Session, filling: list[Request]) -> None:
    before = transport.info().activity.allocations
    for _ in range(3):
        decode(session, filling)
    session.free(filling[0])
    assert transport.info().activity.allocations == before + 12


def test_a_deferred_decode_succeeds_though_another_finds_no_block() -> None:
    transport = CountingTransport()
    run(transport.create_pool(pool_config(num_blocks=5)))
    session = open_session(transport)
    requests = admitted(session, 8, 7)
    with session.step() as step:
        decodes = step.decode(requests, [7, 7])
    assert decodes.refused == {0: Outcome.NO_BLOCKS}
    assert [r.num_computed_tokens for r in requests] == [8, 8]


def test_a_report_of_older_steps_needs_no_step(
    transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    decode(session, filling)
    transport.take_sent()
    session.mark_executed(session.sequence - 1)
    assert transport.take_sent() == []


def test_a_refused_step_fills_no_block(transport: CountingTransport, session: Session, filling: list[Request]) -> None:
    session.preempt(filling[3])
    with pytest.raises(WrongStateError), session.step() as step:  # noqa: PT012 - the step is what raises
        step.admit(filling[2])
        step.decode([filling[0], filling[1]], [7, 7])
    assert [r.num_computed_tokens for r in filling[:2]] == [8, 7]
    transport.take_sent()
    decode(session, filling[:1])
    assert sent_numbers(transport) == [([ALLOCATE], [1])]


def test_blocks_filled_by_a_lost_step_are_reported_after_it_is_settled(
    transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    transport.lose = True
    with pytest.raises(Exception, match="lost"):
        decode(session, filling)
    session.settle()
    transport.take_sent()
    decode(session, filling)
    assert sent_numbers(transport) == [([ALLOCATE] * 2, [2, 3])]


def test_rejected_drafts_do_not_change_filled_blocks(
    transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    decode(session, filling)
    cached = transport.info().cached_blocks
    transport.take_sent()
    session.allocate_slots(filling[1], 1, num_computed_tokens=6)
    (sent,) = transport.take_sent()
    assert (sent.num_taken_tokens, sent.num_rejected_tokens) == ([1, 1], [0, 2])
    assert transport.info().cached_blocks == cached + 2


@pytest.mark.parametrize(
    "options",
    [
        {"groups": (KVCacheGroup(FullAttentionSpec(4), ("a",)), KVCacheGroup(FullAttentionSpec(4), ("b",)))},
        {"enable_events": True},
        {"groups": (KVCacheGroup(FullAttentionSpec(1), ("a",)),)},
    ],
)
def test_pools_in_which_more_depends_on_a_full_block_defer_no_decode(options: dict[str, Any]) -> None:
    transport = CountingTransport()
    groups = (KVCacheGroup(FullAttentionSpec(4), ("a",)),)
    run(transport.create_pool(PoolConfig(PoolName("m"), 60, 100, **{"groups": groups, **options})))
    session = open_session(transport)
    requests = admitted(session, 8, 7)
    transport.take_sent()
    decode(session, requests)
    assert sent_numbers(transport) == [([ALLOCATE] * 2, [1, 2])]


def test_a_resumed_session_reports_filled_blocks(
    transport: CountingTransport, session: Session, filling: list[Request]
) -> None:
    decode(session, filling)
    cached = transport.info().cached_blocks
    opened = run(transport.resume_session(session.session_id, session.sequence))
    resumed = Session(transport, opened)
    held = next(each for each in opened.held if each.request_id == "r1")
    assert held.num_computed_tokens == 7
    request = resumed.adopt(held, filling[1].token_ids, num_computed_tokens=8)
    decode(resumed, [request], executed=opened.sequence)
    assert (request.num_computed_tokens, len(request.block_ids[0])) == (9, 3)
    assert transport.info().cached_blocks == cached + 1
    assert hit_of_another(transport, filling[1]) == 8
