"""Tests of cluster/gate.py; they cite its rules."""

import asyncio
import time

import pytest

from kvpool.core.errors import NotPrimaryError, UnavailableError
from kvpool.server.cluster.gate import RETRY_SECONDS, Gate
from kvpool.server.cluster.standbys import NOTHING
from support.replicas import until


class FakeReplica:
    """What the gate reads of a replica."""

    def __init__(self, last_position: int) -> None:
        self.last_position = last_position
        self.confirmed = 5


class GatedServer:
    """A gate, and the marks that it sends."""

    def __init__(self, last_position: int = 5, max_wait_seconds: float = 60.0) -> None:
        self.replica = FakeReplica(last_position)
        self.num_marks = 0
        self.gate = Gate(self.replica, self, max_wait_seconds)  # type: ignore[arg-type]

    def mark(self) -> None:
        self.num_marks += 1
        self.replica.last_position += 1

    def confirm(self, position: int) -> None:
        self.replica.confirmed = position
        self.gate.release(position)

    async def waiting(self, arrived: int | None) -> asyncio.Task[None]:
        """A call that has begun to wait."""
        task = asyncio.create_task(self.gate.wait(arrived))
        await asyncio.sleep(0)
        return task


async def test_what_is_confirmed_does_not_wait() -> None:
    server = GatedServer()
    with pytest.raises(StopIteration):
        server.gate.wait(None).send(None)
    assert not server.num_marks


async def test_an_answer_waits_until_every_record_so_far_is_confirmed() -> None:
    server = GatedServer(last_position=7)
    first = await server.waiting(5)
    server.replica.last_position = 9
    second = await server.waiting(5)
    server.confirm(6)
    await asyncio.sleep(0)
    assert not first.done()
    server.confirm(7)
    await first
    assert not second.done()
    server.confirm(9)
    await second
    assert not server.num_marks


async def test_an_answer_without_a_record_since_the_call_arrived_waits_for_a_mark() -> None:
    """Rule 2, although all records are confirmed."""
    server = GatedServer()
    read = await server.waiting(5)
    assert server.num_marks == 1
    assert not read.done()
    server.confirm(6)
    await read


async def test_a_record_of_another_call_is_as_good_as_a_mark() -> None:
    server = GatedServer(last_position=6)
    read = await server.waiting(5)
    assert not server.num_marks
    server.confirm(6)
    await read


async def test_a_wait_is_bounded() -> None:
    """Rule 4."""
    server = GatedServer(last_position=6, max_wait_seconds=0.01)
    with pytest.raises(UnavailableError, match=r"within 0\.01 s") as caught:
        await server.gate.wait(None)
    assert (caught.value.reason, caught.value.retry_seconds) == ("NOT_CONFIRMED", RETRY_SECONDS)
    server.confirm(6)


async def test_calls_that_gave_up_take_no_memory() -> None:
    server = GatedServer(last_position=6, max_wait_seconds=0.01)
    for _ in range(3):
        with pytest.raises(UnavailableError):
            await server.gate.wait(None)
        cancelled = await server.waiting(None)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
    assert not server.gate._waiting


async def test_a_cancelled_call_does_not_delay_others() -> None:
    server = GatedServer(last_position=6)
    cancelled, other = await server.waiting(None), await server.waiting(None)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    server.confirm(6)
    await other


async def test_a_closed_gate_lets_nothing_out() -> None:
    server = GatedServer(last_position=6)
    waiting = [await server.waiting(None) for _ in range(3)]
    error = NotPrimaryError(("other:1",), 4)
    server.gate.close(error)
    for task in waiting:
        with pytest.raises(NotPrimaryError):
            await task
    server.confirm(6)
    with pytest.raises(NotPrimaryError) as caught:
        await server.gate.wait(5)
    assert caught.value is error
    assert not server.num_marks


async def test_a_call_that_was_let_out_is_not_refused_by_a_later_close() -> None:
    server = GatedServer(last_position=6)
    waiting = await server.waiting(None)
    server.confirm(6)
    server.gate.close(NotPrimaryError((), 4))
    await until(waiting.done)
    assert waiting.exception() is None


async def test_it_is_confirming_for_a_short_time_after_each_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    now_seconds = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_seconds)
    server = GatedServer()
    assert not server.gate.is_confirming()
    server.mark()
    server.confirm(6)
    now_seconds += 0.4
    assert server.gate.is_confirming()
    server.confirm(6)
    now_seconds += 0.2
    assert not server.gate.is_confirming(), "nothing new was confirmed"
    server.confirm(NOTHING)
    assert not server.gate.is_confirming(), "a member is missing"
    server.confirm(6)
    assert server.gate.is_confirming()
