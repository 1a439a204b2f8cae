"""Allocations on credit: they send no message, are counted, and are reverted with a refused step."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Final

import pytest

from kvpool.client import (
    AbortedError,
    InvalidArgumentError,
    Request,
    Session,
    StepBuilder,
    WrongStateError,
)
from kvpool.client.blocking import run
from kvpool.client.lease import LeaseTimer
from kvpool.client.transports.transport import SessionOptions
from kvpool.core.steps.columns import Operation
from support.server import pool_config
from support.session_transcript import RecordingTransport

PROMPT: Final = list(range(5))  # a block of 4 tokens, and one in the next
ALLOCATE: Final = Operation.ALLOCATE
Ask = Callable[[StepBuilder, Request, int], object]


def open_session(transport: RecordingTransport, lease_timer: LeaseTimer | None = None) -> Session:
    opened = run(transport.open_session(SessionOptions("m")))
    return Session(replace(opened, lease_timer=lease_timer or opened.lease_timer))


def running(session: Session, request_id: str = "r", num_tokens: int = 5) -> Request:
    """Makes a request whose tokens all have slots."""
    request = session.request(request_id, range(num_tokens))
    assert session.admit(request)
    return request


@pytest.fixture
def transport() -> RecordingTransport:
    transport = RecordingTransport()
    run(transport.create_pool(pool_config()))
    return transport


@pytest.fixture
def session(transport: RecordingTransport) -> Session:
    return open_session(transport)


@pytest.fixture
def request_(transport: RecordingTransport, session: Session) -> Request:
    request = running(session)
    transport.take_sent()
    return request


def test_reports_of_execution_are_sent_at_once_if_other_sessions_may_wait(transport: RecordingTransport) -> None:
    """The first step cached a block, so its execution is reported at once; that of later steps changes nothing."""
    session, other = open_session(transport), open_session(transport)
    request_ = running(session)
    transport.take_sent()
    with session.step() as step:
        step.decode([request_], [5])
    with session.step(executed_sequence=1) as step:
        step.decode([request_], [6])
    (report,) = transport.take_sent()
    assert (report.executed_sequence, report.operations, report.num_credit_allocations) == (1, [], 2)
    assert other.get_computed_blocks(other.request("o", range(5))).num_tokens == 4
    session.allocate_slots(request_, 1, num_computed_tokens=5)
    transport.take_sent()
    with session.step(executed_sequence=1) as step:
        step.decode([request_])
    assert transport.take_sent() == []


def test_a_session_whose_lease_may_have_expired_sends_its_decodes(transport: RecordingTransport) -> None:
    over = LeaseTimer(0.0, 0.0)
    session = open_session(transport, over)
    request_ = running(session)
    transport.take_sent()
    session.allocate_slots(request_, 1)
    with session.step() as step:
        step.decode([request_])
    assert [(step.operations, step.num_credit_allocations) for step in transport.take_sent()] == [([], 1), ([], 1)]
    assert (request_.num_computed_tokens, session.sequence) == (7, 3)


def test_a_session_that_is_over_answers_no_decode(transport: RecordingTransport) -> None:
    lease = LeaseTimer(inf, 0.0)
    session = open_session(transport, lease)
    request_ = running(session)
    transport.take_sent()
    with pytest.raises(AbortedError), session.step() as step:  # noqa: PT012 - the step is what raises
        answer = step.allocate_slots(request_, 1)
        session.close()
    with pytest.raises(AbortedError), session.step():
        pass
    with pytest.raises(AbortedError):
        session.allocate_slots(request_, 1)
    assert (answer.outcome, request_.num_computed_tokens, transport.take_sent()) == (None, 5, [])


@pytest.mark.parametrize(
    "first", [StepBuilder.preempt, StepBuilder.free, StepBuilder.get_common_prefix_blocks, StepBuilder.decode]
)
@pytest.mark.parametrize("second", [StepBuilder.preempt, StepBuilder.free, StepBuilder.allocate_slots])
def test_a_step_names_a_request_once(
    transport: RecordingTransport,
    session: Session,
    request_: Request,
    first: Callable[..., object],
    second: Callable[..., object],
) -> None:
    before = run(transport.get_pool("m"))
    with pytest.raises(InvalidArgumentError, match="request: 'r' is named already") as caught, session.step() as step:  # noqa: PT012 - the step is what raises
        first(step, [request_] if first is StepBuilder.decode else request_)
        second(step, request_, *([1] if second is StepBuilder.allocate_slots else []))
    assert caught.value.reason == "REQUEST_NAMED_TWICE"
    assert (transport.take_sent(), run(transport.get_pool("m")), request_.num_computed_tokens) == ([], before, 5)
    assert session.allocate_slots(request_, 1)


def test_a_step_that_was_sent_takes_no_more_operations(
    transport: RecordingTransport, session: Session, request_: Request
) -> None:
    other = session.request("other", PROMPT)
    with session.begin_step() as step:
        step.preempt(request_)
    attempts: list[Callable[[], object]] = [
        lambda: step.admit(other),
        lambda: step.decode([request_]),
        lambda: step.evict_blocks([1]),
        lambda: step.free(other),
    ]
    for attempt in attempts:
        with pytest.raises(WrongStateError, match="the step was sent"):
            attempt()
    session.settle()
    assert (other.declared, [sent.operations for sent in transport.take_sent()]) == (False, [[Operation.PREEMPT]])
    assert session.admit(other)


def test_an_operation_that_raises_leaves_the_step_as_it_was(session: Session, request_: Request) -> None:
    other = session.request("other", PROMPT)
    with session.step() as step:
        with pytest.raises(AttributeError):
            step.allocate_slots(other, 4, computed=3)  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            step.admit(other, options=None)  # type: ignore[arg-type]
        admitted = step.admit(other)
        step.preempt(request_)
    assert admitted.ok


def test_a_request_changed_by_another_call_during_a_step_is_refused(session: Session, request_: Request) -> None:
    with pytest.raises(WrongStateError, match="another step was made"), session.step() as step:  # noqa: PT012
        answer = step.allocate_slots(request_, 1)
        session.preempt(request_)
    assert (answer.outcome, request_.num_computed_tokens) == (None, 0)
    assert session.admit(request_)
    session.free(request_)


def test_steps_in_flight_when_blocks_are_freed_are_reported(transport: RecordingTransport, session: Session) -> None:
    first, second = running(session, "a"), running(session, "b")  # steps 1 and 2
    with session.step(executed_sequence=2):
        pass
    with session.step(executed_sequence=2, launched_sequence=session.sequence + 1) as step:
        step.free(first)
    freed = transport.take_sent()[-1].sequence
    for num_sent in (1, 0):  # until the report, every step is sent; then none that needs no answer
        second.append([7])
        with session.step(executed_sequence=freed) as step:
            step.allocate_slots(second, 1)
        assert len(transport.take_sent()) == num_sent
