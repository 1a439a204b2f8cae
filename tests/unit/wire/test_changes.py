"""Changes as bytes: retries are recognized by them, and records hold them."""

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import StepResult
from kvpool.v1 import allocator_pb2, step_pb2
from kvpool.wire import steps as wire_steps
from kvpool.wire.changes import change_bytes, change_from_bytes, step_from_change
from support.core import World
from support.journal import Recorder, replay
from support.state import DrivenState

LONG = 2**16
"""Number of block ids, of one byte each, that make a message long."""


def declaring(num_blocks: int, byte: bytes = b"h") -> step_pb2.Step:
    """A step that declares a request of `num_blocks` blocks of 4 tokens."""
    return step_pb2.Step(
        sequence=1,
        operations=[step_pb2.OPERATION_APPEND],
        request_numbers=[1],
        declares=[True],
        num_appended_tokens=[4 * num_blocks],
        block_hashes=byte * 32 * num_blocks,
        request_ids=["r"],
    )


def evicting(count: int) -> step_pb2.Step:
    evict = step_pb2.OPERATION_EVICT
    return step_pb2.Step(sequence=1, operations=[evict], num_block_ids=[count], block_ids=[1] * count)


def applied(world: World, session: Session, message: step_pb2.Step) -> StepResult:
    step = wire_steps.step_from_proto(message)
    return world.allocator.apply(world.pool, session, step, change_bytes(message))


def test_equal_messages_alone_have_the_same_bytes() -> None:
    assert change_bytes(evicting(3)) == change_bytes(evicting(3))
    assert change_bytes(evicting(3)) != change_bytes(evicting(4))


def test_messages_of_two_types_are_never_equal() -> None:
    free = allocator_pb2.FreeRequest(session_id="s")
    reset = allocator_pb2.ResetPrefixCacheRequest.FromString(free.SerializeToString())
    assert free.SerializeToString() == reset.SerializeToString()
    assert change_bytes(free) != change_bytes(reset)
    assert [change_from_bytes(change_bytes(each)) for each in (free, reset)] == [free, reset]


@pytest.mark.parametrize("count", [1, LONG])
def test_a_retried_step_is_answered_and_a_different_one_refused(count: int) -> None:
    world = World(num_blocks=LONG + 2)
    session = world.open()
    result = applied(world, session, evicting(count))
    before = world.snapshot(), session.sequence
    with pytest.raises(InvalidArgumentError) as caught:
        applied(world, session, evicting(count + 1))
    assert caught.value.reason == "SEQUENCE_REUSED"
    assert (world.snapshot(), session.sequence) == before
    assert applied(world, session, evicting(count)) is result


@pytest.mark.parametrize("count", [1, LONG])
def test_a_retried_unary_change_is_answered(count: int) -> None:
    world = World(num_blocks=LONG + 2)
    session = world.open()

    def run(block_ids: list[int]) -> StepResult:
        message = allocator_pb2.EvictBlocksRequest(session_id="s1", sequence=1, block_ids=block_ids)
        step = step_from_change(world.pool, session, message)
        return world.allocator.apply(world.pool, session, step, change_bytes(message))

    first = run([1] * count)
    assert run([1] * count) == first
    assert world.pool.activity.retries == 1
    with pytest.raises(InvalidArgumentError) as caught:
        run([2] * count)
    assert caught.value.reason == "SEQUENCE_REUSED"


@pytest.mark.parametrize("count", [1, LONG])
def test_a_recovered_server_recognizes_retries(count: int) -> None:
    allocator = DrivenState()
    recorder = Recorder(allocator)
    world = World(num_blocks=LONG + 2, allocator=allocator)
    result = applied(world, world.open(), evicting(count))

    again = DrivenState()
    replay(again, recorder.records)
    session = next(iter(again.sessions))[1]
    step = wire_steps.step_from_proto(evicting(count))
    assert again.apply(again.pools.get("m"), session, step, change_bytes(evicting(count))) == result
    with pytest.raises(InvalidArgumentError):
        again.apply(again.pools.get("m"), session, step, change_bytes(evicting(count + 1)))
