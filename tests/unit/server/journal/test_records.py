"""Records of commands: what is executed again gives the same state."""

from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.commands import ApplyStep, CloseSession, CreatePool, OpenSession, ResetPrefixCache
from kvpool.core.errors import KvpoolError
from kvpool.core.events import AllBlocksCleared
from kvpool.core.ids import PoolName, RequestId, SessionId
from kvpool.core.steps.columns import Operation, Step
from kvpool.server.codec import DamageError, dumps
from kvpool.server.journal.records import MismatchError, execute_record
from kvpool.v1 import allocator_pb2
from kvpool.wire.changes import change_bytes, step_from_change
from support.core import World, block_hashes, config
from support.journal import Recorder, assert_alike, replay
from support.state import DrivenState


class RecordedWorld:
    """A world whose changes are recorded."""

    def __init__(self, **options: Any) -> None:
        self.state = DrivenState()
        self.recorder = Recorder(self.state)
        self.world = World(allocator=self.state, **options)

    @property
    def records(self) -> list[bytes]:
        return self.recorder.records

    def replayed(self) -> DrivenState:
        """A state that has executed the records."""
        again = DrivenState()
        replay(again, self.records)
        return again


def test_a_refusal_is_not_recorded() -> None:
    recorder = RecordedWorld()
    session = recorder.world.open()
    before = len(recorder.records)
    with pytest.raises(KvpoolError):
        recorder.world.run(session, Operation.FREE, request_numbers=[7])
    with pytest.raises(KvpoolError):
        recorder.state.remove_pool("m")
    assert len(recorder.records) == before


def test_a_different_result_at_replay_is_detected() -> None:
    recorder = RecordedWorld()
    session = recorder.world.open()
    recorder.world.admit(session, 1, "abc", 9)
    again = DrivenState()
    again.create_pool(config(num_blocks=21), b"n" * 32)  # one block more
    opened, stepped = recorder.records[1:]
    replay(again, [opened])
    with pytest.raises(MismatchError):
        replay(again, [stepped])


def test_a_record_drops_the_events_of_its_pool_alone() -> None:
    """A standby may have thousands of pools."""
    again = DrivenState()
    pool, other = (
        again.create_pool(replace(config(enable_events=True), name=PoolName(name)), b"n" * 32)[0]
        for name in ("m", "other")
    )
    again.execute(ResetPrefixCache("other"), 0.0)
    recorder = RecordedWorld(enable_events=True)
    session = recorder.world.open()
    recorder.world.run(
        session, Operation.ADMIT, request_numbers=[1], num_appended_tokens=[8],
        block_hashes=block_hashes("ab", 2), token_ids=list(range(8)), request_ids=["r"],
    )  # fmt: skip
    recorder.world.free(session, 1)
    recorder.state.execute(CloseSession(session.session_id), 0.0)
    recorder.state.execute(ResetPrefixCache("m"), 0.0)
    assert len(recorder.world.pool.blocks.take_events()) > 1
    for record in recorder.records[1:]:
        execute_record(again, record)
        assert pool.blocks.take_events() == []
    assert other.blocks.take_events() == [AllBlocksCleared()]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00" * 40,
        b"\x80",
        b"\x84\x64pool\x80\x80\x00",
        b"\x84\x66resume\x00\x80\x00",
        b"\x84\x66resume\x80\x01\x00",
    ],
)
def test_a_malformed_record_is_damage(payload: bytes) -> None:
    with pytest.raises(DamageError):
        replay(DrivenState(), [payload])


@pytest.mark.parametrize(
    "command",
    [
        None,
        ["KeepAlive", {"session_id": "s1"}],  # is never recorded
        ["PathCommand", {}],
        ["Command", {}],
        ["SuspendPool", {}],
        ["SuspendPool", {"pool_name": 1}],
        ["SuspendPool", {"pool_name": "m", "more": 1}],
        ["EndQuarantine", {"pool_name": "m", "session_numbers": [1, "2"]}],
        ["RecordedChange", {"session_id": "s1", "message": None}],
    ],
)
def test_a_record_of_another_command_is_damage(command: object) -> None:
    with pytest.raises(DamageError):
        replay(DrivenState(), [dumps({"command": command, "now_seconds": 0.0, "checksum": 0})])


def test_a_record_of_an_unknown_session_is_refused() -> None:
    recorder = RecordedWorld()
    session = recorder.world.open()
    recorder.state.apply(recorder.world.pool, session, Step(1))
    with pytest.raises(KvpoolError):
        replay(DrivenState(), recorder.records[-1:])


def test_an_expired_lease_does_not_hinder_the_replay_of_a_close() -> None:
    """Lease renewals are not recorded; only their consequences are."""
    recorder = RecordedWorld()
    session = recorder.world.open(lease_seconds=1.0)
    recorder.world.now_seconds = 5.0
    session.last_seen_seconds = 4.5
    recorder.state.close_session(SessionId("s1"), 5.0)
    assert list(recorder.replayed().sessions) == []


@pytest.mark.parametrize("message", [b"Step:not a step", b"Pool:", b""])
def test_a_record_of_an_impossible_change_is_damage(message: bytes) -> None:
    recorder = RecordedWorld()
    recorder.world.open()
    change = ["RecordedChange", {"session_id": "s1", "message": message}]
    with pytest.raises(DamageError):
        replay(recorder.replayed(), [dumps({"command": change, "now_seconds": 0.0, "checksum": 0})])


def test_a_unary_change_is_recorded_as_it_was_sent() -> None:
    """A request of a unary call without a number gets one below 0, which steps on the wire do not have."""
    recorder = RecordedWorld()
    session = recorder.world.open()
    request = allocator_pb2.RequestUpdate(request_id="r", num_appended_tokens=9, block_hashes=block_hashes("ab", 2))
    message = allocator_pb2.AllocateSlotsRequest(sequence=1, request=request, num_new_tokens=9)
    step = step_from_change(recorder.world.pool, session, message)
    recorder.state.apply(recorder.world.pool, session, step, change_bytes(message))
    again = recorder.replayed()
    (number,) = next(iter(again.sessions))[1].by_number
    assert number == session.requests[RequestId("r")].number < 0
    assert_alike(again, recorder.state)


def test_an_epoch_begun_in_another_memory_is_replayed() -> None:
    recorder = RecordedWorld()
    for number, memory_id in enumerate(("", "a", "b"), start=1):
        session = recorder.world.open(memory_id=memory_id)
        recorder.world.admit(session, number, "abc", 9)
        recorder.state.mark_executed(recorder.world.pool, session, 1)
        recorder.state.close_session(session.session_id, 0.0)
    recorder.world.open(memory_id="b")
    before = len(recorder.records)
    with pytest.raises(KvpoolError):
        recorder.world.open(memory_id="c")
    assert len(recorder.records) == before
    again = recorder.replayed()
    assert (again.pools.get("m").epoch, again.pools.get("m").memory_id) == (3, "b")
    again.renew_leases(0.0)
    assert_alike(again, recorder.state)


def test_the_step_of_a_record_is_returned_as_a_step() -> None:
    """A journal lists its pools after every other command."""
    recorder = RecordedWorld()
    session = recorder.world.open()
    recorder.world.admit(session, 1, "abc", 9)
    again = DrivenState()
    commands = [type(execute_record(again, record).command) for record in recorder.records]
    assert commands == [CreatePool, OpenSession, ApplyStep]
