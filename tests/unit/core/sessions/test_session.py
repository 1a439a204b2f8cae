"""Rules 1 and 2 of session."""

import pytest

from kvpool.core.errors import InvalidArgumentError, WrongStateError
from kvpool.core.execution.apply import apply_step
from kvpool.core.ids import RequestId, RequestNumber
from kvpool.core.sessions.session import REMEMBERED_RESULTS, Session
from kvpool.core.steps.columns import Operation, Step
from support.core import World
from support.refusals import refused


def test_only_the_last_results_are_remembered(world: World, session: Session) -> None:
    steps = [Step(sequence, operations=[Operation.RESET]) for sequence in range(1, REMEMBERED_RESULTS + 2)]
    results = [world.apply(session, step) for step in steps]
    resets = world.pool.stats.resets
    assert [world.apply(session, step) for step in steps[1:]] == results[1:]
    assert world.pool.stats.resets == resets
    with refused(WrongStateError, reason="SEQUENCE_FORGOTTEN"):
        world.apply(session, steps[0])


def test_the_number_of_a_refused_step_can_be_used_again(world: World, session: Session) -> None:
    with pytest.raises(InvalidArgumentError):
        world.apply(session, Step(1, operations=[99]))
    assert world.apply(session, Step(1, operations=[Operation.RESET])).sequence == 1


def test_a_repeated_step_is_recognized_by_its_message(world: World, session: Session) -> None:
    first = apply_step(world.pool, session, Step(1), message=b"sent")
    assert apply_step(world.pool, session, Step(1, operations=[Operation.RESET]), message=b"sent") is first
    with refused(field="sequence", reason="SEQUENCE_REUSED"):
        apply_step(world.pool, session, Step(1), message=b"something else")


def test_an_older_executed_number_changes_nothing(world: World, session: Session) -> None:
    for executed in (0, 1, 2, 1, 0):
        world.run(session, executed=executed)
    assert session.executed_sequence == 2


def test_execution_of_the_last_step_can_be_reported_outside_a_step(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    world.executed(session, 1)
    assert (session.executed_sequence, dict(world.pool.blocks.prefix_map.pending.steps)) == (1, {})


@pytest.mark.parametrize("executed", [-1, 2])
def test_execution_of_steps_never_sent_is_refused(executed: int, world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    with world.refuses(field="executed_sequence"):
        world.executed(session, executed)


def test_generated_request_numbers_are_negative_and_unused(world: World, session: Session) -> None:
    world.admit(session, 7, "a", 5)
    for expected in (-2, -3):
        number = session.free_number()
        assert number == expected
        world.declare(session, Operation.APPEND, number, "", 1)
    assert session.request_number(RequestId("r-3")) == -3
    assert session.request_number(RequestId("r7")) == RequestNumber(7)
    assert session.request_number(RequestId("r8")) is None


def test_a_number_and_an_id_can_be_reused_after_a_free(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    world.free(session, 1)
    world.run(session, Operation.ADMIT, request_numbers=[1], num_appended_tokens=[3], request_ids=["r1"])
    (request,) = session.requests.values()
    assert (request.request_id, request.num_tokens, request.num_computed_tokens) == ("r1", 3, 3)
