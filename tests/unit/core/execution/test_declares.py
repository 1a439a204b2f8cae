"""A step names a request at most once, and declares it in the operation that names it."""

from itertools import product
from typing import Any

import pytest

from kvpool.core.errors import KvpoolError
from kvpool.core.ids import RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Outcome
from support.core import BLOCK_SIZE, World, block_hashes, opened
from support.integrity import check_integrity

ADMIT, ALLOCATE, APPEND = Operation.ADMIT, Operation.ALLOCATE, Operation.APPEND
FREE, EVICT, RESET, RESERVE = Operation.FREE, Operation.EVICT, Operation.RESET, Operation.RESERVE
NAMING = [operation for operation in Operation if operation not in (EVICT, RESET)]
LOOKING_UP = [Operation.LOOKUP, Operation.LOOKUP_UNCOUNTED, Operation.LOOKUP_COUNTED_AT_ONCE]
DECLARING = [*LOOKING_UP, ADMIT, ALLOCATE, APPEND]


@pytest.fixture
def session(world: World) -> Session:
    """A session with a running request, number 1, and a waiting one, number 2."""
    session = world.open(reserve_tokens=8)
    world.admit(session, 1, "abc", 13)
    world.run(session, APPEND, request_numbers=[2], num_appended_tokens=[3], request_ids=["r2"])
    return session


def refusal(world: World, session: Session, *operations: Operation, **columns: Any) -> KvpoolError:
    """The error of a step, which leaves the state as it was."""
    with world.refuses() as caught:
        world.run(session, *operations, **columns)
    return caught.value


def named_twice(error: KvpoolError) -> str:
    """The field of an error of this reason."""
    assert error.reason == "REQUEST_NAMED_TWICE"
    return error.field


def allowing(operation: Operation) -> int:
    """The number of the request of `session` on which an operation is valid."""
    return 2 if operation in (*LOOKING_UP, ADMIT) else 1


@pytest.mark.parametrize(("first", "second"), list(product(NAMING, NAMING)))
def test_a_second_operation_on_a_request_is_refused(
    first: Operation, second: Operation, world: World, session: Session
) -> None:
    new = [int(first is not RESERVE), 1]
    error = refusal(world, session, first, second, request_numbers=[allowing(first)] * 2, num_new_tokens=new)
    assert named_twice(error) == "request_numbers[1]"


@pytest.mark.parametrize("operation", NAMING)
def test_a_second_operation_on_a_declared_request_is_refused(
    operation: Operation, world: World, session: Session
) -> None:
    error = refusal(
        world, session, APPEND, operation, request_numbers=[3, 3], declares=[True, False],
        num_appended_tokens=[3, 0], num_new_tokens=[0, 1], request_ids=["x"],
    )  # fmt: skip
    assert named_twice(error) == "request_numbers[1]"


@pytest.mark.parametrize("operation", NAMING)
def test_the_declaration_of_a_number_that_the_step_named_is_refused(
    operation: Operation, world: World, session: Session
) -> None:
    """Also after a free: its number can be used again from the next step on."""
    error = refusal(
        world, session, operation, APPEND, request_numbers=[allowing(operation)] * 2, declares=[False, True],
        num_appended_tokens=[0, 3], num_new_tokens=[int(operation is not RESERVE), 0], request_ids=["x"],
    )  # fmt: skip
    assert named_twice(error) == "request_numbers[1]"


def test_a_number_declared_twice_is_refused(world: World, session: Session) -> None:
    error = refusal(
        world, session, APPEND, APPEND, request_numbers=[3, 3], declares=[True, True], request_ids=["x", "y"]
    )
    assert named_twice(error) == "request_numbers[1]"


def test_the_error_names_the_first_operation_that_repeats_a_number(world: World, session: Session) -> None:
    error = refusal(
        world, session, EVICT, ALLOCATE, RESET, APPEND, FREE, FREE,
        request_numbers=[0, 1, 0, 2, 1, 2], num_new_tokens=[0, 1, 0, 0, 0, 0],
    )  # fmt: skip
    assert named_twice(error) == "request_numbers[4]"


def test_the_error_of_an_earlier_operation_comes_first(world: World, session: Session) -> None:
    error = refusal(world, session, APPEND, ALLOCATE, APPEND, request_numbers=[2, 1, 2])  # allocates nothing
    assert error.field == "num_new_tokens[1]"


def test_operations_without_a_request_can_be_repeated(world: World, session: Session) -> None:
    for numbers in ([], [0] * 4):
        result = world.run(session, EVICT, RESET, EVICT, RESET, request_numbers=numbers)
        assert result.outcomes == [Outcome.OK, Outcome.IN_USE] * 2


def test_the_id_of_a_freed_request_can_be_declared_in_the_same_step(world: World, session: Session) -> None:
    result = world.run(
        session, FREE, ADMIT, request_numbers=[1, 3], declares=[False, True], num_appended_tokens=[0, 13],
        block_hashes=block_hashes("abc", 3), request_ids=["r1"],
    )  # fmt: skip
    assert result.num_hit_tokens == [0, 3 * BLOCK_SIZE]
    assert {request.request_id: number for number, request in session.by_number.items()} == {"r1": 3, "r2": 2}
    assert session.requests.keys() == {"r1", "r2"}
    world.free(session, 3)
    assert session.requests.keys() == {"r2"}


@pytest.mark.parametrize("operation", DECLARING)
def test_an_operation_declares_its_request_and_is_applied_to_it(
    operation: Operation, world: World, session: Session
) -> None:
    declared_at_once = World()
    other = declared_at_once.open(reserve_tokens=8)
    declared_at_once.admit(other, 1, "abc", 13)
    columns: dict[str, Any] = {
        "num_appended_tokens": [13], "block_hashes": block_hashes("abc", 3), "request_ids": ["x"],
        "lora_names": ["l"],
    }  # fmt: skip
    new: dict[str, Any] = {"num_new_tokens": [13]} if operation is ALLOCATE else {}
    one_step = declared_at_once.run(other, operation, request_numbers=[3], **columns, **new)
    world.run(session, APPEND, request_numbers=[3], **columns)
    two_steps = world.run(session, operation, request_numbers=[3], **new)
    for name in ("outcomes", "num_hit_tokens", "num_new_tokens", "credit_tokens", "block_ids", "free_blocks"):
        assert getattr(one_step, name) == getattr(two_steps, name)
    request = other.by_number[RequestNumber(3)]
    assert (request.request_id, request.lora_name, request.num_tokens) == ("x", "l", 13)
    assert request.num_prompt_tokens == 13
    check_integrity(declared_at_once.pool, declared_at_once.sessions())


@pytest.mark.parametrize("operation", [operation for operation in Operation if operation not in DECLARING])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_other_operations_declare_no_request(operation: Operation, number: int, world: World, session: Session) -> None:
    error = refusal(world, session, operation, request_numbers=[number], declares=[True], request_ids=["x"])
    assert error.field == ("request_numbers[0]" if operation in (EVICT, RESET) else "declares[0]")


@pytest.mark.parametrize("operation", DECLARING)
def test_a_declaration_without_an_id_is_refused(operation: Operation, world: World, session: Session) -> None:
    error = refusal(
        world, session, operation, request_numbers=[3], declares=[True], num_appended_tokens=[1], num_new_tokens=[1]
    )
    assert error.field == "request_ids"


def test_a_number_in_use_is_not_declared_again(world: World, session: Session) -> None:
    error = refusal(world, session, APPEND, request_numbers=[2], declares=[True], request_ids=["x"])
    assert (error.field, error.reason) == ("request_numbers[0]", "REQUEST_NUMBER_IN_USE")


@pytest.mark.parametrize("request_id", ["r1", "r2"])
def test_an_id_in_use_is_not_declared_again(request_id: str, world: World, session: Session) -> None:
    error = refusal(world, session, APPEND, request_numbers=[3], declares=[True], request_ids=[request_id])
    assert (error.field, error.reason) == ("request_ids[0]", "REQUEST_ID_IN_USE")


def test_operations_that_find_too_few_blocks_or_are_skipped_declare_their_request() -> None:
    world, session = opened(num_blocks=3)
    result = world.run(
        session, ADMIT, ADMIT, ALLOCATE, request_numbers=[1, 2, 3], num_appended_tokens=[13, 3, 3],
        num_new_tokens=[0, 0, 3], block_hashes=block_hashes("abc", 3), request_ids=["r1", "r2", "r3"],
    )  # fmt: skip
    assert result.outcomes == [Outcome.NEVER_FITS, Outcome.SKIPPED, Outcome.SKIPPED]
    assert [request.num_prompt_tokens for request in session.requests.values()] == [13, 3, 3]
    result = world.run(session, ADMIT, ADMIT, request_numbers=[2, 3])
    assert result.num_new_tokens == [3, 3]
