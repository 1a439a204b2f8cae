"""Numbers in names of rules are those of gpu_worker/rank_protocol.py."""

from dataclasses import replace

import pytest

from kvpool.core.errors import (
    AbortedError,
    DeniedError,
    ExhaustedError,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    NotPrimaryError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import (
    MAX_NAMED_SESSIONS,
    FenceSet,
    HeldTensors,
    Planned,
    PoolState,
    PoolStatus,
    Ready,
    Registered,
    ServerMessage,
)
from kvpool.core.specs.kinds import SlidingWindowSpec
from kvpool.gpu_worker.rank_effects import (
    Allocate,
    Allocation,
    Effect,
    EpochBegan,
    EpochPassed,
    Failed,
    Fenced,
    Heartbeat,
    Initialized,
    JoinLater,
    Leave,
    OpenStream,
    Send,
    SessionsGone,
)
from kvpool.gpu_worker.rank_protocol import (
    REGISTER_TIMEOUT_SECONDS,
    Phase,
    RankProtocol,
)
from kvpool.lending.fence import Fence, StaleTablesError
from kvpool.wire.errors import DeadlineError, ServerError
from support.rank_server import plan_config
from support.ranks import registration

BROKEN = UnavailableError("UNAVAILABLE", "gone")
TIMING = Registered(1.0, 5.0, 30.0)
ONE, TWO = TableLease(1, SessionNumber(1)), TableLease(1, SessionNumber(2))


class Driver:
    """A protocol and its clock; what it allocates is there at once, unless a test holds it back."""

    def __init__(self, jitter: float = 0.0) -> None:
        self.fence = Fence()
        self.rank = RankProtocol(registration(), ("h:1",), self.fence, draw=lambda: jitter)
        self.now = 1000.0

    def join(self) -> OpenStream:
        """Waits until a stream is opened, and registers on it."""
        self.now = max(self.now, self.rank.next_due_seconds)
        (opened,) = self.rank.tick(self.now)
        assert isinstance(opened, OpenStream)
        assert self.hear(TIMING) == [Send(Heartbeat(1))]
        return opened

    def hear(self, message: ServerMessage) -> list[Effect]:
        return self.rank.received(message, self.now)

    def plan(self, epoch: int, num_blocks: int = 100, got: int = 0) -> list[Effect]:
        """Hears a plan and, if it must, allocates for it."""
        effects = self.hear(Planned(epoch, plan_config(num_blocks), 1024))
        if effects and isinstance(effects[-1], Allocate):
            planned = effects[-1].planned
            effects += self.rank.allocated(planned, Allocation(planned.config, got or num_blocks, 1))
        return effects

    def open(self, epoch: int, num_blocks: int = 100) -> None:
        self.plan(epoch, num_blocks)
        assert self.hear(Ready(epoch, num_blocks, 1024))[-1] == EpochBegan(Ready(epoch, num_blocks, 1024))
        self.fence.open(epoch)

    def is_in(self, phase: Phase) -> bool:
        return self.rank.phase is phase

    def epoch(self) -> int:
        """The epoch that goes on; 0 for none."""
        return self.rank.ready.epoch if self.rank.ready else 0

    def lose_stream(self, error: KvpoolError = BROKEN) -> list[Effect]:
        return self.rank.stream_ended(error, self.now)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_rule_5_the_search_chooses_the_server_and_the_pause_before_the_next_stream() -> None:
    rank = RankProtocol(registration(), ("g:1", "h:1"), Fence(), draw=lambda: 0.5)
    for error, target, pause_seconds in (
        (NotPrimaryError(("i:1",), 1), "i:1", 0.0),
        (BROKEN, "h:1", 0.0),
        (BROKEN, "g:1", 0.05 * 1.05),
        (AbortedError("RANK_GIVEN_UP", ""), "g:1", 0.1 * 1.5),
    ):
        (opened,) = rank.tick(rank.next_due_seconds)
        assert isinstance(opened, OpenStream)
        (later,) = rank.stream_ended(error, 1000.0)
        assert isinstance(later, JoinLater)
        assert rank.target == target
        assert later.pause_seconds == pytest.approx(pause_seconds)
        assert rank.next_due_seconds == pytest.approx(1000.0 + pause_seconds)


def test_an_answered_heartbeat_ends_the_search_for_the_server(driver: Driver) -> None:
    pauses = []
    for is_answered in (False, False, True):
        driver.join()
        if is_answered:
            driver.hear(PoolStatus(PoolState.FORMING, 1, (), 1))
        (later,) = driver.lose_stream(NotPrimaryError((), 0))
        assert isinstance(later, JoinLater)
        pauses.append(later.pause_seconds)
    assert pauses == [0.05, 0.1, 0.05]


def said(effects: list[Effect]) -> Initialized:
    (message,) = [
        effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Initialized)
    ]
    return message


def test_a_rank_registers_allocates_and_is_ready(driver: Driver) -> None:
    assert driver.join().registration.held is None
    assert driver.is_in(Phase.REGISTERED)
    effects = driver.hear(Planned(1, plan_config(100), 1024))
    assert [type(effect) for effect in effects] == [Allocate]
    assert driver.is_in(Phase.ALLOCATING)
    planned = effects[0].planned if isinstance(effects[0], Allocate) else None
    assert planned
    got = Allocation(planned.config, 90, 7)
    assert driver.rank.allocated(planned, got) == [Send(Initialized(1, got))]
    assert driver.is_in(Phase.ALLOCATED)
    assert driver.epoch() == 0
    assert driver.hear(Ready(1, 80, 512)) == [EpochBegan(Ready(1, 80, 512))]
    assert driver.is_in(Phase.READY)
    assert driver.rank.status == PoolStatus(PoolState.READY, 1, ()), "that is what it says, before any status does"
    assert driver.hear(Ready(1, 80, 512)) == [], "said again, it changes nothing"


def test_heartbeats_begin_with_registered_and_go_on_while_allocating(driver: Driver) -> None:
    driver.join()
    driver.hear(Planned(1, plan_config(100), 1024))
    for sequence in range(2, 6):
        assert driver.rank.next_due_seconds == driver.now + 1.0
        driver.now += 1.0
        assert driver.rank.tick(driver.now) == [Send(Heartbeat(sequence))]
        assert driver.rank.tick(driver.now) == []
        driver.hear(PoolStatus(PoolState.FORMING, 1, (), sequence))


def test_a_silent_server_is_given_up_after_its_own_timeout(driver: Driver) -> None:
    driver.join()
    driver.now += 4.9
    assert driver.rank.tick(driver.now) == [Send(Heartbeat(2))]
    driver.now += 0.1
    (later,) = driver.rank.tick(driver.now)
    assert isinstance(later, JoinLater)
    assert isinstance(later.error, DeadlineError)
    assert driver.join().registration.boot_id == registration().boot_id


def test_a_server_that_never_answers_register_is_given_up(driver: Driver) -> None:
    driver.rank.tick(driver.now)
    assert driver.rank.next_due_seconds == driver.now + REGISTER_TIMEOUT_SECONDS
    driver.now += REGISTER_TIMEOUT_SECONDS
    assert [type(effect) for effect in driver.rank.tick(driver.now)] == [JoinLater]


def test_rule_2_and_3_a_broken_stream_costs_nothing(driver: Driver) -> None:
    driver.join()
    driver.open(3)
    assert [type(effect) for effect in driver.lose_stream()] == [JoinLater]
    assert (driver.rank.phase, driver.rank.ready) == (Phase.REJOINING, Ready(3, 100, 1024))
    assert driver.join().registration.held == HeldTensors(3, 100)
    assert driver.hear(Ready(3, 100, 1024)) == []
    assert driver.is_in(Phase.READY)


def test_the_newest_epoch_is_reported_without_held_tensors(driver: Driver) -> None:
    assert driver.join().registration.last_epoch == 0
    driver.hear(Planned(7, plan_config(100), 1024))
    driver.lose_stream()
    registration = driver.join().registration
    assert (registration.held, registration.last_epoch) == (None, 7)


def test_allocated_blocks_are_held_even_if_fewer_are_used(driver: Driver) -> None:
    driver.join()
    driver.plan(1, 100)
    driver.hear(Ready(1, 60, 1024))
    driver.lose_stream()
    assert driver.join().registration.held == HeldTensors(1, 100)


@pytest.mark.parametrize("num_blocks", [100, 60])
def test_rule_2_a_plan_of_the_same_layout_keeps_the_tensors(driver: Driver, num_blocks: int) -> None:
    driver.join()
    driver.open(1)
    passed, *rest = driver.plan(2, num_blocks)
    assert passed == EpochPassed(1)
    assert said(rest).epoch == 2
    assert said(rest).allocation.num_blocks == 100, "what is held, not what is planned"
    driver.hear(Ready(2, num_blocks, 1024))
    driver.lose_stream()
    assert driver.join().registration.held == HeldTensors(2, 100)


def test_rule_2_another_plan_frees_them_first(driver: Driver) -> None:
    driver.join()
    driver.open(1)
    larger = driver.hear(Planned(2, plan_config(101), 1024))
    assert [type(effect) for effect in larger] == [EpochPassed, Allocate]
    assert driver.rank.held is None
    driver.lose_stream()
    assert driver.join().registration.held is None, "they are not there while others are being allocated"


@pytest.mark.parametrize("part", ["shared_by", "page", "groups"])
def test_rule_2_a_plan_of_another_layout_is_another_plan(driver: Driver, part: str) -> None:
    driver.join()
    driver.open(1)
    config = plan_config(100)
    first, *others = config.tensors
    match part:
        case "shared_by":
            config = replace(config, tensors=(replace(first, shared_by=first.shared_by[::-1]), *others))
        case "page":
            config = replace(config, tensors=(replace(first, size_bytes=first.size_bytes * 2), *others))
        case _:
            spec = SlidingWindowSpec(16, 2, 8, "float32", sliding_window=65)
            config = replace(config, groups=(config.groups[0], replace(config.groups[1], spec=spec)))
    assert [type(e) for e in driver.hear(Planned(2, config, 1024))] == [EpochPassed, Allocate]


def test_a_smaller_allocation_is_reported_and_not_retried(driver: Driver) -> None:
    driver.join()
    message = said(driver.plan(1, 100, got=40))
    assert message.allocation.num_blocks == 40
    assert driver.is_in(Phase.ALLOCATED)


def test_rule_4_of_two_plans_the_newer_is_answered(driver: Driver) -> None:
    driver.join()
    (first,) = driver.hear(Planned(1, plan_config(100), 1024))
    assert driver.hear(Planned(2, plan_config(90), 1024)) == [], "one allocation at a time"
    assert isinstance(first, Allocate)
    answer = driver.rank.allocated(first.planned, Allocation(first.planned.config, 100, 1))
    assert said(answer) == Initialized(2, Allocation(first.planned.config, 100, 1))


def test_rule_4_a_newer_plan_that_does_not_fit_is_allocated_next(driver: Driver) -> None:
    driver.join()
    (first,) = driver.hear(Planned(1, plan_config(100), 1024))
    driver.hear(Planned(2, plan_config(200), 1024))
    assert isinstance(first, Allocate)
    (second,) = driver.rank.allocated(first.planned, Allocation(first.planned.config, 100, 1))
    assert isinstance(second, Allocate)
    assert second.planned.epoch == 2


def test_rule_4_a_plan_of_a_stream_that_broke_is_not_answered(driver: Driver) -> None:
    driver.join()
    (effect,) = driver.hear(Planned(1, plan_config(100), 1024))
    driver.lose_stream()
    assert isinstance(effect, Allocate)
    assert driver.rank.allocated(effect.planned, Allocation(effect.planned.config, 100, 1)) == []
    assert driver.join().registration.held == HeldTensors(1, 100)


def test_a_status_of_a_higher_epoch_ends_the_current_epoch(driver: Driver) -> None:
    driver.join()
    driver.open(1)
    assert driver.hear(PoolStatus(PoolState.DEGRADED, 1, (1,))) == []
    assert driver.epoch() == 1
    assert driver.hear(PoolStatus(PoolState.DEGRADED, 2, (1,))) == [EpochPassed(1)]
    assert driver.is_in(Phase.REGISTERED)
    assert driver.epoch() == 0


@pytest.mark.parametrize("wrong", [Ready(2, 100, 1024), Ready(1, 101, 1024)])
def test_ready_for_more_blocks_than_held_is_refused(driver: Driver, wrong: Ready) -> None:
    driver.join()
    driver.plan(1)
    effects = driver.hear(wrong)
    assert [type(effect) for effect in effects] == [JoinLater]
    assert driver.rank.ready is None


def test_ready_before_any_plan_is_refused(driver: Driver) -> None:
    driver.join()
    assert [type(effect) for effect in driver.hear(Ready(1, 2, 1024))] == [JoinLater]


@pytest.mark.parametrize(
    "error",
    [
        BROKEN,
        AbortedError("RANK_GIVEN_UP", ""),
        DeadlineError("DEADLINE_EXCEEDED", ""),
        ServerError("INTERNAL", ""),
        UnavailableError("CANCELLED", ""),
        ServerError("UNKNOWN", ""),
        ExhaustedError("TOO_MANY", "", retry_seconds=1.0),
    ],
    ids=lambda error: error.reason,
)
def test_rule_5_these_errors_are_retried_indefinitely(driver: Driver, error: KvpoolError) -> None:
    pauses = []
    for _ in range(50):
        driver.now = driver.rank.next_due_seconds
        assert isinstance(driver.rank.tick(driver.now)[0], OpenStream)
        (later,) = driver.lose_stream(error)
        assert isinstance(later, JoinLater)
        pauses.append(later.pause_seconds)
    if error.retry_seconds is None:
        assert pauses[0] == 0.1
        assert pauses == sorted(pauses)
        assert pauses[-1] == 3.0
    else:
        assert set(pauses) == {error.retry_seconds}


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("register.rank", "5"),
        WrongStateError("RANK_TAKEN", ""),
        NotFoundError("NOT_FOUND", ""),
        ServerError("UNIMPLEMENTED", ""),
        DeniedError("POOL", ""),
        UnauthenticatedError("NO_TOKEN", ""),
        ExhaustedError("RESOURCE_EXHAUSTED", "the message is too large"),
    ],
    ids=lambda error: error.reason,
)
def test_rule_5_these_errors_end_the_rank(driver: Driver, error: KvpoolError) -> None:
    driver.rank.tick(driver.now)
    assert driver.lose_stream(error) == [Failed(error)]
    assert driver.rank.is_over
    assert driver.rank.tick(driver.now + 1e9) == []
    assert driver.rank.next_due_seconds == float("inf")


def test_a_slow_reader_joins_again(driver: Driver) -> None:
    driver.join()
    assert isinstance(driver.lose_stream(ExhaustedError("NOT_READING", ""))[0], JoinLater)


def test_a_registered_rank_waits_for_a_new_token(driver: Driver) -> None:
    driver.join()
    assert isinstance(driver.lose_stream(UnauthenticatedError("TOKEN_REVOKED", ""))[0], JoinLater)


def test_pauses_are_jittered_and_reset_after_an_answered_heartbeat() -> None:
    driver = Driver(jitter=0.5)
    for _ in range(5):
        driver.join()
        driver.lose_stream()
    assert driver.rank.next_due_seconds - driver.now == pytest.approx(1.5 * 0.1 * 2**4)
    driver.join()
    driver.hear(PoolStatus(PoolState.FORMING, 1, (), 1))
    driver.lose_stream()
    assert driver.rank.next_due_seconds - driver.now == pytest.approx(1.5 * 0.1)


def test_rule_6_a_fence_is_answered_at_once_if_no_excluded_step_is_in_flight(driver: Driver) -> None:
    driver.join()
    driver.open(1)
    with driver.fence.step(ONE), driver.fence.step(TWO):
        assert driver.hear(FenceSet(4, 1, 2, (1, 2))) == [Send(Fenced(4))]


def test_rule_6_a_fence_is_answered_again_when_the_last_excluded_step_of_a_session_is_done(driver: Driver) -> None:
    driver.join()
    driver.open(1)
    first, second, other = driver.fence.step(ONE), driver.fence.step(ONE), driver.fence.step(TWO)
    assert driver.hear(FenceSet(1, 1, 1, ())) == [Send(Fenced(1, (ONE.session_number,)))]
    both = (ONE.session_number, TWO.session_number)
    assert driver.hear(FenceSet(2, 1, 2, ())) == [Send(Fenced(2, both))]
    first.done()
    assert driver.rank.steps_ended() == []
    second.done()
    assert driver.rank.steps_ended() == [Send(Fenced(2, (TWO.session_number,)))]
    other.done()
    assert driver.rank.steps_ended() == [Send(Fenced(2))]
    assert driver.rank.steps_ended() == []


def test_rule_6_a_fence_of_a_broken_stream_is_not_answered_but_applies(driver: Driver) -> None:
    driver.join()
    driver.open(1)
    step = driver.fence.step(ONE)
    driver.hear(FenceSet(7, 1, 1, ()))
    driver.lose_stream()
    step.done()
    assert driver.rank.steps_ended() == []
    with pytest.raises(StaleTablesError):
        driver.fence.step(ONE)
    driver.join()
    driver.hear(Ready(1, 100, 1024))
    assert driver.hear(FenceSet(8, 1, 1, ())) == [Send(Fenced(8))]


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_fence_of_another_epoch_changes_nothing(driver: Driver, epoch: int) -> None:
    driver.join()
    driver.open(2)
    assert driver.hear(FenceSet(1, epoch, 9, ())) == []
    driver.fence.step(TableLease(2, SessionNumber(1)))


@pytest.mark.parametrize("num_blocks", [100, 200])
def test_rule_6_a_plan_waits_for_steps_of_the_previous_epoch(driver: Driver, num_blocks: int) -> None:
    """Whether the tensors fit the plan, and are given to others, or do not, and are freed."""
    driver.join()
    driver.open(1)
    step = driver.fence.step(ONE)
    assert driver.hear(Planned(2, plan_config(num_blocks), 1024)) == [EpochPassed(1)]
    assert driver.is_in(Phase.ALLOCATING)
    assert driver.rank.held, "its tensors are not freed under a step"
    assert driver.rank.steps_ended() == [], "not yet"
    step.done()
    (effect,) = driver.rank.steps_ended()
    if num_blocks == 100:
        assert said([effect]).epoch == 2
    else:
        assert isinstance(effect, Allocate)
    assert driver.rank.steps_ended() == [], "once is enough"


def test_rule_6_of_two_waiting_plans_the_newer_is_answered_once(driver: Driver) -> None:
    driver.join()
    driver.open(1)
    step = driver.fence.step(ONE)
    driver.plan(2)
    driver.plan(3)
    step.done()
    assert said(driver.rank.steps_ended()).epoch == 3
    assert driver.rank.steps_ended() == []


def test_leaving_is_reported_on_an_open_stream(driver: Driver) -> None:
    driver.join()
    driver.open(1)
    assert driver.rank.leave() == [EpochPassed(1), Send(Leave())]
    assert driver.rank.leave() == []
    assert driver.is_in(Phase.LEFT)


def test_leaving_without_a_stream_sends_nothing(driver: Driver) -> None:
    driver.join()
    driver.lose_stream()
    assert driver.rank.leave() == []
    assert driver.rank.is_over


def test_a_local_failure_is_reported_as_leaving(driver: Driver) -> None:
    driver.join()
    error = ExhaustedError("OUT_OF_MEMORY", "")
    assert driver.rank.fail(error) == [Send(Leave()), Failed(error)]
    assert driver.rank.fail(error) == []


def test_sessions_of_exited_processes_are_reported_until_a_fence_shows_their_end(driver: Driver) -> None:
    driver.rank.sessions_gone([ONE])
    driver.join()
    driver.open(1)
    assert driver.hear(FenceSet(1, 1, 2, (1, 2)))[0] == Send(SessionsGone((ONE.session_number,)))
    assert driver.rank.sessions_gone([TWO]) == [Send(SessionsGone((TWO.session_number,)))]
    assert driver.hear(FenceSet(2, 1, 2, (2,)))[0] == Send(SessionsGone((TWO.session_number,)))
    assert driver.hear(FenceSet(3, 1, 2, ())) == [Send(Fenced(3))]


def test_a_session_that_did_not_exist_when_it_was_reported_is_not_reported_when_another_process_opens_it(
    driver: Driver,
) -> None:
    driver.join()
    driver.open(1)
    driver.hear(FenceSet(1, 1, 1, (1,)))
    driver.rank.sessions_gone([ONE, TWO])
    driver.hear(PoolStatus(PoolState.READY, 1, (), 1))
    both = (ONE.session_number, TWO.session_number)
    assert driver.hear(FenceSet(2, 1, 1, (1,)))[0] == Send(SessionsGone(both)), "the server may not have read it yet"
    driver.now += 1.0
    assert driver.rank.tick(driver.now) == [Send(Heartbeat(2))]
    driver.hear(PoolStatus(PoolState.READY, 1, (), 2))
    assert driver.hear(FenceSet(3, 1, 2, (1, 2)))[0] == Send(SessionsGone((ONE.session_number,)))


def test_more_sessions_than_a_message_may_name_are_reported_in_parts(driver: Driver) -> None:
    driver.join()
    driver.open(1)
    numbers = tuple(map(SessionNumber, range(1, 2 * MAX_NAMED_SESSIONS + 2)))
    size = MAX_NAMED_SESSIONS
    parts = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
    reported = driver.rank.sessions_gone([TableLease(1, number) for number in numbers])
    assert reported == [Send(SessionsGone(part)) for part in parts]


def test_rule_6_a_fence_is_not_answered_while_more_sessions_are_pending_than_a_message_may_name(driver: Driver) -> None:
    driver.join()
    driver.open(1)
    numbers = tuple(map(SessionNumber, range(1, MAX_NAMED_SESSIONS + 2)))
    steps = [driver.fence.step(TableLease(1, number)) for number in numbers]
    assert driver.hear(FenceSet(1, 1, numbers[-1], ())) == []
    steps[0].done()
    assert driver.rank.steps_ended() == [Send(Fenced(1, numbers[1:]))]


def test_sessions_of_another_epoch_are_not_reported(driver: Driver) -> None:
    driver.join()
    driver.open(2)
    assert driver.rank.sessions_gone([ONE]) == []
    assert driver.hear(FenceSet(1, 2, 2, (1, 2))) == [Send(Fenced(1))]


def test_an_abandoned_rank_sends_nothing(driver: Driver) -> None:
    driver.join()
    driver.open(1)
    assert [effect for effect in driver.rank.abandon() if isinstance(effect, Send)] == []
    assert driver.rank.is_over
    assert driver.rank.abandon() == []


def test_processes_of_sessions_are_killed_before_they_can_answer_a_fence(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.join()
    driver.open(1)
    calls: list[object] = []
    monkeypatch.setattr(driver.fence, "kill", calls.append)
    monkeypatch.setattr(driver.fence, "narrow", lambda *args: calls.append(args))
    assert driver.hear(FenceSet(1, 1, 2, (2,), (1,))) == [Send(Fenced(1))]
    assert calls == [[ONE], (2, (2,))]
    assert driver.hear(FenceSet(2, 9, 2, (2,), (1,))) == [], "of another epoch, in which numbers repeat"
    assert len(calls) == 2


def test_a_session_that_was_opened_after_a_fence_is_reported_again_after_it(driver: Driver) -> None:
    driver.join()
    driver.open(1)
    assert driver.rank.sessions_gone([ONE, TWO]) == [Send(SessionsGone((ONE.session_number, TWO.session_number)))]
    assert driver.hear(FenceSet(1, 1, 1, (), ())) == [Send(SessionsGone((TWO.session_number,))), Send(Fenced(1))]
    assert driver.hear(FenceSet(2, 1, 2, (), ())) == [Send(Fenced(2))]


def test_a_rank_that_continues_an_epoch_of_an_earlier_process_admits_steps_after_the_first_fence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    held = Allocation(plan_config(100), 100, 1)
    past = replace(registration(), held=HeldTensors(1, 100), last_epoch=1)
    driver.rank = RankProtocol(past, ("h:1",), driver.fence, held, draw=lambda: 0.0)
    assert driver.join().registration.held == HeldTensors(1, 100)
    ready = Ready(1, 100, 1024)
    driver.fence.begin(1)  # as of the memory that was found
    with monkeypatch.context() as never:
        never.setattr(driver.fence, "end", lambda: pytest.fail("processes that map the memory would be fenced"))
        assert driver.hear(ready) == [], "sessions may have ended while no process of the rank was there"
    driver.lose_stream()
    driver.join()
    assert driver.hear(ready) == []
    assert driver.hear(FenceSet(1, 1, SessionNumber(2), (SessionNumber(2),), ()))[0] == EpochBegan(ready)
    driver.fence.open(1)
    with pytest.raises(StaleTablesError):
        driver.fence.step(ONE)
    driver.fence.step(TWO)
    assert EpochBegan(ready) not in driver.hear(FenceSet(2, 1, SessionNumber(2), (SessionNumber(2),), ()))
