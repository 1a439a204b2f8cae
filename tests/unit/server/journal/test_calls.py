"""Rule 1 of journal/calls.py: every change of an allocator is recorded."""

import inspect

import pytest

from kvpool.core.allocator import Allocator
from kvpool.core.errors import KvpoolError
from kvpool.core.ids import SessionId
from kvpool.core.steps.columns import Operation, Step
from kvpool.server.journal.calls import NOT_RECORDED, RECORDED, JournaledAllocator, MismatchError
from kvpool.server.journal.frames import DamageError, FrameKind
from kvpool.server.journal.messages import WireMessages
from support.core import World, block_hashes, config
from support.journal import assert_alike


class Recorder:
    """A world whose changes are recorded."""

    def __init__(self) -> None:
        self.allocator = JournaledAllocator(WireMessages())
        self.records: list[tuple[FrameKind, bytes]] = []
        self.allocator.sink = lambda kind, payload: self.records.append((kind, payload))
        self.world = World(allocator=self.allocator)


def test_every_method_is_recorded_or_has_a_reason_not_to_be() -> None:
    methods = {name for name, _ in inspect.getmembers(Allocator, inspect.isfunction) if not name.startswith("_")}
    assert methods == {*RECORDED, *NOT_RECORDED}
    assert not set(RECORDED) & set(NOT_RECORDED)


def test_a_refusal_is_not_recorded() -> None:
    recorder = Recorder()
    session = recorder.world.open()
    before = len(recorder.records)
    with pytest.raises(KvpoolError):
        recorder.world.run(session, Operation.FREE, request_numbers=[7])
    with pytest.raises(KvpoolError):
        recorder.allocator.remove_pool("m")
    assert len(recorder.records) == before


def test_a_bug_within_a_change_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    session = recorder.world.open()
    bugs: list[str] = []
    recorder.allocator.on_bug = lambda: bugs.append("called")

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(recorder.world.pool), "admit", broken)
    with pytest.raises(ZeroDivisionError):
        recorder.world.admit(session, 1, "abc", 9)
    monkeypatch.setattr(type(recorder.world.pool), "reset_prefix_cache", broken)
    with pytest.raises(ZeroDivisionError):
        recorder.allocator.reset_prefix_cache(recorder.world.pool)
    assert bugs == ["called", "called"]


def test_a_change_that_cannot_be_encoded_is_reported_as_a_bug() -> None:
    recorder = Recorder()
    bugs: list[str] = []
    recorder.allocator.on_bug = lambda: bugs.append("called")
    with pytest.raises(UnicodeEncodeError):
        recorder.allocator.open_session("m", "\ud800", 10.0, session_id=SessionId("s1"), now_seconds=0.0)
    assert bugs == ["called"]


def test_a_different_result_at_replay_is_detected() -> None:
    recorder = Recorder()
    session = recorder.world.open()
    recorder.world.admit(session, 1, "abc", 9)
    again = JournaledAllocator(WireMessages())
    again.create_pool(config(num_blocks=21), b"n" * 32)  # one block more
    opened, stepped = recorder.records[1:]
    again.replay(*opened)
    with pytest.raises(MismatchError):
        again.replay(*stepped)


@pytest.mark.parametrize("kind", [FrameKind.STEP, FrameKind.CALL])
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
def test_a_malformed_record_is_damage(kind: FrameKind, payload: bytes) -> None:
    with pytest.raises(DamageError):
        JournaledAllocator(WireMessages()).replay(kind, payload)


def test_a_record_of_an_unknown_session_is_damage() -> None:
    recorder = Recorder()
    session = recorder.world.open()
    recorder.allocator.apply(recorder.world.pool, session, Step(1))
    again = JournaledAllocator(WireMessages())
    with pytest.raises(DamageError):
        again.replay(*recorder.records[-1])


def test_an_expired_lease_does_not_hinder_the_replay_of_a_close() -> None:
    """Lease renewals are not recorded; only their consequences are."""
    recorder = Recorder()
    session = recorder.world.open(lease_seconds=1.0)
    recorder.world.now_seconds = 5.0
    session.last_seen_seconds = 4.5
    recorder.allocator.close_session(SessionId("s1"), 5.0)
    again = JournaledAllocator(WireMessages())
    for record in recorder.records:
        again.replay(*record)
    assert list(again.sessions()) == []


def test_a_request_with_a_negative_number_is_recorded() -> None:
    """A request of a unary call without a number gets one below 0, which steps on the wire do not have."""
    recorder = Recorder()
    session = recorder.world.open()
    number = session.free_number()
    assert number < 0
    recorder.allocator.apply(recorder.world.pool, session, _added(session.sequence + 1, number), "the unary message")
    again = JournaledAllocator(WireMessages())
    for record in recorder.records:
        again.replay(*record)
    assert next(again.sessions())[1].by_number.keys() == {number}


def _added(sequence: int, number: int) -> Step:
    hashes = block_hashes("ab", 2)
    return Step(
        sequence,
        operations=[Operation.ADD, Operation.ADMIT],
        request_numbers=[number, number],
        num_appended_tokens=[9, 0],
        block_hashes=hashes,
        request_ids=["r"],
    )


def test_an_epoch_begun_in_another_memory_is_replayed() -> None:
    recorder = Recorder()
    for number, memory_id in enumerate(("", "a", "b"), start=1):
        session = recorder.world.open(memory_id=memory_id)
        recorder.world.admit(session, number, "abc", 9)
        recorder.allocator.mark_executed(recorder.world.pool, session, 1)
        recorder.allocator.close_session(session.session_id, 0.0)
    recorder.world.open(memory_id="b")
    before = len(recorder.records)
    with pytest.raises(KvpoolError):
        recorder.world.open(memory_id="c")
    assert len(recorder.records) == before
    again = JournaledAllocator(WireMessages())
    for record in recorder.records:
        again.replay(*record)
    assert (again.pool("m").epoch, again.pool("m").memory_id) == (3, "b")
    again.renew_leases(0.0)
    assert_alike(again, recorder.allocator)
