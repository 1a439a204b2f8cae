"""Stream writers: a write that the client does not read ends the stream."""

import asyncio
import time

import pytest

from kvpool.core.errors import ExhaustedError
from kvpool.server.limits.streams import StreamWriter

STALL_SECONDS = 0.05


class Reader:
    """The context of a stream. Accepts a message at once, or when the test allows it."""

    def __init__(self) -> None:
        self.taken: list[object] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def write(self, message: object) -> None:
        await self.reads.wait()
        await asyncio.sleep(0)  # never synchronous, as in gRPC
        self.taken.append(message)


def writer_to(reader: Reader, stall_seconds: float = STALL_SECONDS) -> StreamWriter:
    return StreamWriter(reader, stall_seconds)  # type: ignore[arg-type]  # it only writes


async def test_messages_that_are_read_are_written() -> None:
    reader = Reader()
    with writer_to(reader, stall_seconds=60.0) as writer:
        for i in range(20):
            await writer.write(i)
    assert reader.taken == list(range(20))


async def test_an_unread_message_ends_the_stream() -> None:
    """Even if an earlier write set the timer. The writing task continues uncancelled."""
    reader = Reader()
    with writer_to(reader) as writer:
        await writer.write("first")
        await asyncio.sleep(STALL_SECONDS / 2)
        reader.reads.clear()
        began = asyncio.get_running_loop().time()
        with pytest.raises(ExhaustedError) as caught:
            await writer.write("second")
        assert asyncio.get_running_loop().time() - began >= STALL_SECONDS * 0.9
    assert (caught.value.reason, caught.value.retry_seconds) == ("NOT_READING", 0.1)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    assert reader.taken == ["first"]


async def test_time_between_messages_is_not_a_stall() -> None:
    reader = Reader()
    with writer_to(reader, stall_seconds=0.5) as writer:
        for i in range(3):
            await writer.write(i)
            await asyncio.sleep(0.75)
    assert reader.taken == [0, 1, 2]


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_cancelled_write_stays_cancelled(
    is_late: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Even in the event loop iteration in which the time is up."""
    reader = Reader()
    reader.reads.clear()

    async def write() -> None:
        with writer_to(reader) as writer:
            await writer.write("never")

    task = asyncio.create_task(write())
    await asyncio.sleep(0)  # until the task writes
    if is_late:
        loop = asyncio.get_running_loop()
        loop.call_later(STALL_SECONDS / 2, time.sleep, STALL_SECONDS)  # so that both are due in the next iteration
        loop.call_later(STALL_SECONDS, task.cancel)
    else:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_no_timer_is_left_behind() -> None:
    reader = Reader()
    with writer_to(reader) as writer:
        await writer.write(1)
        timer = writer._timer
        assert timer is not None
    assert timer.cancelled()
