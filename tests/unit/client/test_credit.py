"""Allocations on credit: they send no message, are counted, and are reverted with a refused step."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Final

import pytest

from kvpool.client import (
    AbortedError,
    Allocation,
    Answer,
    DeadlineError,
    FullAttentionSpec,
    InvalidArgumentError,
    KVCacheGroup,
    MambaSpec,
    NotFoundError,
    Outcome,
    PoolConfig,
    PoolInfo,
    Request,
    Session,
    SlidingWindowSpec,
    StepBuilder,
    WrongStateError,
)
from kvpool.client.blocking import run
from kvpool.client.lease import LeaseTimer
from kvpool.client.transports.embedded import EmbeddedTransport
from kvpool.client.transports.transport import SessionOptions
from kvpool.core.ids import PoolName
from kvpool.core.steps.columns import Operation, Step, StepResult
from support.server import pool_config

PROMPT: Final = list(range(5))  # a block of 4 tokens, and one in the next
ALLOCATE: Final = Operation.ALLOCATE
Ask = Callable[[StepBuilder, Request, int], object]


class CountingTransport(EmbeddedTransport):
    """Records every step that is sent. Loses the answer to the next one if `lose` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Step] = []
        self.lose = False

    async def apply(self, session_id: str, step: Step) -> StepResult:
        self.sent.append(step)
        result = await super().apply(session_id, step)
        if self.lose:
            self.lose = False
            raise DeadlineError("DEADLINE", "lost")
        return result

    def take_sent(self) -> list[Step]:
        """Returns the steps sent since the last call."""
        sent, self.sent = self.sent, []
        return sent

    def info(self) -> PoolInfo:
        return run(self.get_pool("m"))


def open_session(transport: CountingTransport, lease_timer: LeaseTimer | None = None) -> Session:
    opened = run(transport.open_session(SessionOptions("m")))
    return Session(replace(opened, lease_timer=lease_timer or opened.lease_timer))


def running(session: Session, request_id: str = "r", num_tokens: int = 5) -> Request:
    """Makes a request whose tokens all have slots."""
    request = session.request(request_id, range(num_tokens))
    assert session.admit(request)
    return request


@pytest.fixture
def transport() -> CountingTransport:
    transport = CountingTransport()
    run(transport.create_pool(pool_config()))
    return transport


@pytest.fixture
def session(transport: CountingTransport) -> Session:
    return open_session(transport)


@pytest.fixture
def request_(transport: CountingTransport, session: Session) -> Request:
    request = running(session)
    transport.take_sent()
    return request


def test_between_two_blocks_nothing_is_sent(transport: CountingTransport, session: Session, request_: Request) -> None:
    request_.append([5])
    assert session.allocate_slots(request_, 1) == Allocation([[]])
    with session.step() as step:
        answer = step.allocate_slots(request_, 1)
    assert (answer.outcome, answer.new_blocks) == (Outcome.OK, [[]])
    assert (transport.sent, session.sequence) == ([], 1)
    assert (request_.num_computed_tokens, request_.block_ids) == (7, [[1, 2]])


def test_a_batch_between_two_blocks_sends_nothing(transport: CountingTransport, session: Session) -> None:
    requests = [running(session, f"r{i}") for i in range(3)]
    transport.take_sent()
    for token_id in (5, 6):
        with session.step() as step:
            decodes = step.decode(requests, [token_id] * 3)
        assert (decodes.new_blocks, decodes.refused) == ([[[]]] * 3, {})
    assert transport.sent == []
    assert [(r.num_tokens, r.num_computed_tokens) for r in requests] == [(7, 7)] * 3


def test_a_decode_that_fills_a_block_is_sent_with_all_tokens_taken_on_credit(
    transport: CountingTransport, session: Session, request_: Request
) -> None:
    for token_id in (5, 6):
        request_.append([token_id])
        session.allocate_slots(request_, 1)
    request_.append([7])
    session.allocate_slots(request_, 1)
    (step,) = transport.take_sent()
    assert (step.operations, step.num_appended_tokens, step.num_taken_tokens) == ([ALLOCATE], [3], [2])
    assert step.block_hashes == request_.hashes[1]
    assert (step.num_credit_allocations, transport.info().cached_blocks) == (2, 2)


def test_an_allocation_that_needs_a_new_block_is_sent(transport: CountingTransport, session: Session) -> None:
    request_ = running(session, num_tokens=4)
    transport.take_sent()
    with session.step() as step:
        decodes = step.decode([request_], [4])
    (sent,) = transport.take_sent()
    assert (sent.operations, sent.num_taken_tokens, sent.num_credit_allocations) == ([ALLOCATE], [], 0)
    assert (decodes.new_blocks, request_.block_ids) == ([[[2]]], [[1, 2]])


def test_look_ahead_that_needs_a_block_is_sent(
    transport: CountingTransport, session: Session, request_: Request
) -> None:
    session.allocate_slots(request_, 1, num_lookahead_tokens=1)
    assert transport.take_sent() == []
    assert session.allocate_slots(request_, 1, num_lookahead_tokens=2) == Allocation([[3]])
    with session.step() as step:
        decodes = step.decode([request_], num_lookahead_tokens=5)
    assert decodes.new_blocks == [[[4]]]
    assert len(transport.take_sent()) == 2
    assert request_.block_ids == [[1, 2, 3, 4]]


def test_without_caching_a_decode_that_fills_a_block_is_on_credit() -> None:
    transport = CountingTransport()
    run(transport.create_pool(pool_config(enable_caching=False)))
    session = open_session(transport)
    request_ = running(session)
    transport.take_sent()
    session.allocate_slots(request_, 3)
    assert transport.take_sent() == []
    session.allocate_slots(request_, 1)
    assert [step.num_taken_tokens for step in transport.take_sent()] == [[3]]


def test_an_allocation_that_moves_a_window_past_a_block_is_sent() -> None:
    transport = CountingTransport()
    groups = tuple(map(KVCacheGroup, (FullAttentionSpec(8), SlidingWindowSpec(8, sliding_window=5))))
    run(transport.create_pool(PoolConfig(PoolName("m"), 16, 64, groups, enable_caching=False)))
    session = open_session(transport)
    request_ = running(session, num_tokens=11)
    transport.take_sent()
    session.allocate_slots(request_, 1)  # 12 computed: the next token reads from token 8 on
    assert (transport.take_sent(), request_.block_ids) == ([], [[1, 2], [3, 4]])
    session.allocate_slots(request_, 1)
    assert (len(transport.take_sent()), request_.block_ids) == (1, [[1, 2], [0, 4]])


def test_rejected_drafts_are_sent_minus_the_tokens_taken_on_credit(
    transport: CountingTransport, session: Session, request_: Request
) -> None:
    session.allocate_slots(request_, 2)
    session.allocate_slots(request_, 1, num_computed_tokens=6)
    (step,) = transport.take_sent()
    assert (step.num_taken_tokens, step.num_rejected_tokens) == ([1], [])
    session.allocate_slots(request_, 1, num_computed_tokens=5)
    (step,) = transport.take_sent()
    assert (step.num_taken_tokens, step.num_rejected_tokens) == ([], [2])
    assert request_.num_computed_tokens == 6


def test_allocations_on_credit_are_counted_once(
    transport: CountingTransport, session: Session, request_: Request
) -> None:
    before = transport.info().activity.allocations
    with session.step() as step:
        step.decode([request_])
    with session.step() as step:
        step.allocate_slots(request_, 1)
    session.allocate_slots(request_, 1)
    session.free(request_)
    assert [step.num_credit_allocations for step in transport.take_sent()] == [2, 0]
    assert transport.info().activity.allocations == before + 3


def test_reports_of_execution_are_sent_at_once_if_other_sessions_may_wait(transport: CountingTransport) -> None:
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


def test_reports_of_execution_are_sent_with_the_next_step(
    transport: CountingTransport, session: Session, request_: Request
) -> None:
    session.allocate_slots(request_, 2)
    with session.step(executed_sequence=1) as step:
        step.decode([request_], [5])
    assert [(step.executed_sequence, step.operations) for step in transport.take_sent()] == [(1, [ALLOCATE])]


def test_a_report_of_execution_alone_is_sent(transport: CountingTransport, session: Session, request_: Request) -> None:
    assert request_.num_computed_tokens
    with session.step(executed_sequence=1):
        pass
    assert [step.executed_sequence for step in transport.take_sent()] == [1]


def test_a_session_whose_lease_may_have_expired_sends_its_decodes(transport: CountingTransport) -> None:
    over = LeaseTimer(0.0, 0.0)
    session = open_session(transport, over)
    request_ = running(session)
    transport.take_sent()
    session.allocate_slots(request_, 1)
    with session.step() as step:
        step.decode([request_])
    assert [(step.operations, step.num_credit_allocations) for step in transport.take_sent()] == [([], 1), ([], 1)]
    assert (request_.num_computed_tokens, session.sequence) == (7, 3)


def test_a_session_that_is_over_answers_no_decode(transport: CountingTransport) -> None:
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


def test_a_refused_step_reverts_allocations_on_credit(
    transport: CountingTransport, session: Session, request_: Request
) -> None:
    other = running(session, "other")
    session.allocate_slots(request_, 1)
    with pytest.raises(InvalidArgumentError, match="num_new_tokens"), session.step() as step:  # noqa: PT012 - the step is what raises
        answer = step.allocate_slots(request_, 1)
        step.cache_blocks(other, 99)
    assert (answer.outcome, request_.num_computed_tokens, other.num_computed_tokens) == (None, 6, 5)
    transport.take_sent()
    session.allocate_slots(request_, 3)
    (sent,) = transport.take_sent()
    assert (sent.num_taken_tokens, sent.num_credit_allocations) == ([1], 1)


def test_a_step_that_cannot_be_sent_reverts_allocations_on_credit(session: Session, request_: Request) -> None:
    with pytest.raises(NotFoundError), session.step() as step:  # noqa: PT012 - the step is what raises
        answer = step.allocate_slots(request_, 1)
        step.preempt(session.request("unknown", PROMPT))
    assert (answer.outcome, request_.num_computed_tokens) == (None, 5)


def test_an_exception_inside_a_step_reverts_allocations_on_credit(
    transport: CountingTransport, session: Session, request_: Request
) -> None:
    with pytest.raises(ZeroDivisionError), session.step() as step:  # noqa: PT012 - the step is what raises
        answer = step.allocate_slots(request_, 1)
        raise ZeroDivisionError
    assert (answer.outcome, request_.num_computed_tokens) == (None, 5)
    session.free(request_)
    assert [step.num_credit_allocations for step in transport.take_sent()] == [0]


def test_while_a_step_has_no_answer_no_decode_is_answered(
    transport: CountingTransport, session: Session, request_: Request
) -> None:
    other = session.request("other", PROMPT)
    transport.lose = True
    with pytest.raises(DeadlineError), session.step() as step:  # noqa: PT012 - the step is what raises
        answer = step.allocate_slots(request_, 1)
        step.admit(other)
    assert (answer.outcome, request_.num_computed_tokens) == (None, 5), "nothing is known of the step"
    with pytest.raises(Exception, match="settle"):
        session.allocate_slots(request_, 1)
    assert request_.num_computed_tokens == 5
    session.settle()
    assert (answer.outcome, request_.num_computed_tokens) == (Outcome.OK, 6)
    session.allocate_slots(request_, 1)
    session.free(request_)
    first, again, freed = transport.take_sent()
    assert first is again
    assert (first.num_credit_allocations, freed.num_credit_allocations, freed.num_taken_tokens) == (1, 1, [2])


def test_tokens_appended_while_a_step_has_no_answer_are_sent_with_the_next(
    transport: CountingTransport, session: Session, request_: Request
) -> None:
    transport.lose = True
    with pytest.raises(DeadlineError):
        session.allocate_slots(request_, 3)
    request_.append([5, 6, 7, 8])
    session.settle()
    transport.take_sent()
    session.allocate_slots(request_, 1)
    (sent,) = transport.take_sent()
    assert (sent.num_appended_tokens, sent.block_hashes) == ([4], request_.hashes[1])


def test_batch_tokens_appended_while_a_step_has_no_answer_are_sent_with_the_next(
    transport: CountingTransport, session: Session, request_: Request
) -> None:
    session.allocate_slots(request_, 2)
    transport.lose = True
    with pytest.raises(DeadlineError), session.step() as step:
        step.decode([request_], [5])
    request_.append([6, 7])
    session.settle()
    transport.take_sent()
    with session.step() as step:
        step.decode([request_], [8])
    (sent,) = transport.take_sent()
    assert (sent.num_appended_tokens, sent.block_hashes) == ([3], request_.hashes[1])


@pytest.mark.parametrize("ask", [StepBuilder.allocate_slots, lambda step, request, _: step.decode([request])])
def test_credit_counts_only_tokens_that_the_service_knows(
    transport: CountingTransport, session: Session, request_: Request, ask: Ask
) -> None:
    """Tokens appended before the answer fill a block, which the service has not cached yet."""
    session.allocate_slots(request_, 2, num_lookahead_tokens=5)
    transport.lose = True
    with pytest.raises(DeadlineError), session.step() as step:
        ask(step, request_, 1)
    request_.append([5, 6, 7])
    session.settle()
    for token_id in range(8, 13):
        request_.append([token_id])
        session.allocate_slots(request_, 1)
    assert (request_.num_computed_tokens, transport.info().cached_blocks) == (13, 3)


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2, 3]])
def test_a_batch_needs_one_token_per_request(session: Session, token_ids: list[int]) -> None:
    requests = [running(session, "a"), running(session, "b", 8)]
    check_refused(session, requests, token_ids, "token_ids")


def test_a_batch_takes_only_running_requests(session: Session) -> None:
    preempted = running(session, "p")
    session.preempt(preempted)
    for idle in (preempted, session.request("new", PROMPT)):
        check_refused(session, [running(session, f"before {idle.request_id}"), idle], None, "requests")


def check_refused(session: Session, requests: list[Request], token_ids: list[int] | None, field: str) -> None:
    before = [(r.num_tokens, r.num_computed_tokens) for r in requests]
    with session.step() as step:
        with pytest.raises(InvalidArgumentError) as caught:
            step.decode(requests, token_ids)
        assert (step.rows, step.on_credit) == ([], {})
    assert caught.value.field == field
    assert [(r.num_tokens, r.num_computed_tokens) for r in requests] == before


@pytest.mark.parametrize("name", [StepBuilder.preempt, StepBuilder.free, StepBuilder.get_common_prefix_blocks])
def test_a_batch_names_no_request_that_the_step_named_before(
    session: Session, name: Callable[[StepBuilder, Request], Answer]
) -> None:
    request_, other = running(session), running(session, "other")
    with session.step() as step:
        name(step, request_)
        with pytest.raises(InvalidArgumentError, match="named twice"):
            step.decode([other, request_], [7, 7])
        assert (len(step.rows), step.on_credit) == (1, {})
    assert (other.num_tokens, request_.num_tokens, other.num_computed_tokens) == (5, 5, 5)


def test_a_batch_names_no_request_whose_decode_is_to_be_sent(session: Session) -> None:
    request_ = running(session, num_tokens=4)
    with session.step() as step:
        step.decode([request_])
        with pytest.raises(InvalidArgumentError, match="named twice"):
            step.decode([request_])
    assert request_.num_computed_tokens == 5


def test_a_batch_reports_new_blocks_and_refused_requests_by_place() -> None:
    transport = CountingTransport()
    run(transport.create_pool(pool_config(num_blocks=7, enable_caching=False)))
    session = open_session(transport)
    sizes = (5, 4, 3, 4, 4)  # 6 blocks
    requests = [running(session, f"r{i}", size) for i, size in enumerate(sizes)]
    session.free(requests[3])
    transport.take_sent()
    batch = [requests[i] for i in (0, 1, 2, 4)]
    with session.step() as step:
        decodes = step.decode(batch, [7] * 4)
    assert len(transport.take_sent()) == 1
    assert decodes.new_blocks == [[[]], [[5]], [[]], [[]]]
    assert decodes.refused == {3: Outcome.NO_BLOCKS}
    assert [r.num_computed_tokens for r in batch] == [6, 5, 4, 4]
    assert [len(r.block_ids[0]) for r in batch] == [2, 2, 1, 1]
    session.free(requests[1])
    with session.step() as step:
        again = step.decode([batch[3]])
    assert (again.refused, batch[3].num_computed_tokens, batch[3].num_tokens) == ({}, 5, 5)


def test_after_the_first_refusal_requests_that_need_no_block_still_continue() -> None:
    transport = CountingTransport()
    run(transport.create_pool(pool_config(num_blocks=5, enable_caching=False)))
    session = open_session(transport)
    requests = [running(session, f"r{i}", size) for i, size in enumerate((4, 4, 7))]
    with session.step() as step:
        decodes = step.decode(requests)
    assert decodes.refused == {0: Outcome.NO_BLOCKS, 1: Outcome.SKIPPED}
    assert [r.num_computed_tokens for r in requests] == [4, 4, 8]


def test_an_empty_batch_does_nothing(transport: CountingTransport, session: Session) -> None:
    with session.step() as step:
        decodes = step.decode([], [])
    assert (decodes.new_blocks, decodes.refused, transport.sent) == ([], {}, [])


@pytest.mark.parametrize(
    "first", [StepBuilder.preempt, StepBuilder.free, StepBuilder.get_common_prefix_blocks, StepBuilder.decode]
)
@pytest.mark.parametrize("second", [StepBuilder.preempt, StepBuilder.free, StepBuilder.allocate_slots])
def test_a_step_names_a_request_once(
    transport: CountingTransport,
    session: Session,
    request_: Request,
    first: Callable[..., object],
    second: Callable[..., object],
) -> None:
    before = transport.info()
    with pytest.raises(InvalidArgumentError, match="request: 'r' is named already") as caught, session.step() as step:  # noqa: PT012 - the step is what raises
        first(step, [request_] if first is StepBuilder.decode else request_)
        second(step, request_, *([1] if second is StepBuilder.allocate_slots else []))
    assert caught.value.reason == "REQUEST_NAMED_TWICE"
    assert (transport.take_sent(), transport.info(), request_.num_computed_tokens) == ([], before, 5)
    assert session.allocate_slots(request_, 1)


def test_a_step_that_was_sent_takes_no_more_operations(
    transport: CountingTransport, session: Session, request_: Request
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


@pytest.mark.parametrize("leave", [Session.free, Session.preempt])
def test_a_request_with_too_many_tokens_can_leave(leave: Callable[[Session, Request], None]) -> None:
    transport = CountingTransport()
    run(transport.create_pool(replace(pool_config(), max_model_len=16)))
    session = open_session(transport)
    request = running(session, "long", 15)
    request.append([1, 2, 3])
    leave(session, request)
    assert (transport.info().free_blocks, request.block_ids) == (session.config.num_blocks - 1, [[]])


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


def test_a_new_request_is_named_once(transport: CountingTransport, session: Session) -> None:
    before, request = transport.info(), session.request("new", PROMPT)
    with pytest.raises(InvalidArgumentError, match="named already"), session.step() as step:  # noqa: PT012 - the step is what raises
        step.get_computed_blocks(request)
        step.admit(request)
    assert (transport.take_sent(), transport.info(), request.declared) == ([], before, False)
    assert session.admit(request)


def test_delayed_caching_leaves_no_credit(transport: CountingTransport, session: Session) -> None:
    request_ = session.request("r", PROMPT)
    session.allocate_slots(request_, 5, delay_cache_blocks=True)
    transport.take_sent()
    assert session.allocate_slots(request_, 1) == Allocation([[]])
    assert (len(transport.take_sent()), transport.info().cached_blocks) == (1, 1)


def test_a_request_allocates_once_in_a_step(session: Session, request_: Request) -> None:
    with session.step() as step:
        step.decode([request_])
        with pytest.raises(InvalidArgumentError, match="already in this step"):
            step.allocate_slots(request_, 1)
        with pytest.raises(InvalidArgumentError, match="named twice"):
            step.decode([request_])
    assert request_.num_computed_tokens == 6


def test_computed_tokens_without_slots_are_refused(session: Session, request_: Request) -> None:
    with session.step() as step, pytest.raises(InvalidArgumentError, match="num_computed_tokens: 6"):
        step.allocate_slots(request_, 1, num_computed_tokens=6)
    assert request_.num_computed_tokens == 5


def test_in_a_pool_with_mamba_state_every_decode_is_sent() -> None:
    """Otherwise the service would not know which step reads the state."""
    transport = CountingTransport()
    groups = (KVCacheGroup(FullAttentionSpec(4), ("a",)), KVCacheGroup(MambaSpec(4), ("b",)))
    run(transport.create_pool(PoolConfig(PoolName("m"), 20, 64, groups, enable_caching=False)))
    session = open_session(transport)
    request = running(session)
    transport.take_sent()
    session.allocate_slots(request, 1)
    with session.step() as step:
        step.decode([request])
    assert [list(sent.operations) for sent in transport.take_sent()] == [[ALLOCATE], [ALLOCATE]]


def test_a_request_changed_by_another_call_during_a_step_is_refused(session: Session, request_: Request) -> None:
    with pytest.raises(WrongStateError, match="another step was made"), session.step() as step:  # noqa: PT012
        answer = step.allocate_slots(request_, 1)
        session.preempt(request_)
    assert (answer.outcome, request_.num_computed_tokens) == (None, 0)
    assert session.admit(request_)
    session.free(request_)


def test_a_negative_look_ahead_is_refused(session: Session, request_: Request) -> None:
    with session.step() as step:
        with pytest.raises(InvalidArgumentError, match="num_lookahead_tokens"):
            step.decode([request_], [5], num_lookahead_tokens=-1)
        with pytest.raises(InvalidArgumentError, match="num_lookahead_tokens"):
            step.allocate_slots(request_, 1, num_lookahead_tokens=-1)
    assert (request_.num_tokens, request_.num_computed_tokens) == (5, 5)


def test_steps_in_flight_when_blocks_are_freed_are_reported(transport: CountingTransport, session: Session) -> None:
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


def test_a_new_length_of_the_prompt_is_sent_although_the_credit_suffices(
    transport: CountingTransport, session: Session, request_: Request
) -> None:
    request_.append([5])
    request_.num_prompt_tokens = 6
    session.preempt(request_)
    assert transport.take_sent()[0].num_prompt_tokens == []
    session.admit(request_)
    assert (transport.take_sent()[0].num_prompt_tokens, request_.num_prompt_tokens) == ([6], 0)
    request_.append([6])
    request_.num_prompt_tokens = 7
    with session.begin_step() as step:
        step.allocate_slots(request_, 1)
    request_.append([7])
    request_.num_prompt_tokens = 8  # while the step is under way
    session.settle()
    assert (transport.take_sent()[0].num_prompt_tokens, request_.num_prompt_tokens) == ([7], 8)
    session.allocate_slots(request_, 1)
    assert (transport.take_sent()[0].num_prompt_tokens, request_.num_prompt_tokens) == ([8], 0)
