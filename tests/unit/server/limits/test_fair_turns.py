"""Fair turns: shares of time, order, rejection, and iterations of the event loop in between."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from kvpool.core.errors import ExhaustedError, NotPrimaryError
from kvpool.server.limits.fair_turns import MAX_KNOWN_SESSIONS, FairTurns
from kvpool.server.limits.messages import LARGE_MESSAGE_BYTES
from support.waiting import DEADLINE_SECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Values of `thread_time`; the last one is the current time."""
    now = [0.0]
    monkeypatch.setattr("kvpool.server.limits.fair_turns.time.thread_time", lambda: now[-1])
    return now


async def ends(waiting: Awaitable[object]) -> None:
    await asyncio.wait_for(waiting, DEADLINE_SECONDS)


Work = Callable[[str, str, float, int], Coroutine[Any, Any, None]]


@pytest.fixture
def served() -> list[str]:
    return []


@pytest.fixture
def turns() -> FairTurns:
    return FairTurns(max_waiting=100, max_waiting_bytes=1000)


@pytest.fixture
def work(turns: FairTurns, clock: list[float], served: list[str]) -> Work:
    """A session that takes turns of a fixed duration, back to back."""

    async def run(pool: str, session: str, seconds: float, count: int) -> None:
        for _ in range(count):
            await turns.take(pool, session)
            served.append(session)
            clock.append(clock[-1] + seconds)
            turns.end()

    return run


async def test_a_single_caller_does_not_wait(turns: FairTurns) -> None:
    taking = turns.take("m", 1)
    with pytest.raises(StopIteration):
        taking.send(None)
    turns.end()


async def test_ending_a_turn_that_was_not_taken_fails(turns: FairTurns) -> None:
    with pytest.raises(RuntimeError):
        turns.end()


async def test_time_is_shared_not_turns(work: Work, served: list[str]) -> None:
    await asyncio.gather(work("m", "greedy", 1.0, 4), work("m", "modest", 0.1, 20))
    assert served.index("modest") <= 1
    second = [i for i, who in enumerate(served) if who == "greedy"][2]
    assert served[:second].count("modest") >= 10, "as much time as two long turns"


async def test_pools_share_time_equally_regardless_of_their_sessions(work: Work, served: list[str]) -> None:
    many = [work("big", f"big{i}", 1.0, 10) for i in range(10)]
    await asyncio.gather(*many, work("small", "small", 1.0, 10))
    assert 9 <= served[:20].count("small") <= 10


async def test_a_pause_saves_up_no_time(work: Work, served: list[str]) -> None:
    await work("m", "idle", 0.1, 1)
    await work("m", "busy", 1.0, 10)
    served.clear()
    await asyncio.gather(work("m", "busy", 1.0, 5), work("m", "idle", 1.0, 5))
    assert 2 <= served[:5].count("idle") <= 3


async def test_waiters_of_one_session_are_served_in_order(turns: FairTurns) -> None:
    order: list[int] = []

    async def one(number: int) -> None:
        await turns.take("m", "s")
        order.append(number)
        turns.end()

    await asyncio.gather(*map(one, range(20)))
    assert order == list(range(20))
    assert turns.num_waiting == 0


async def test_the_event_loop_runs_between_turns(work: Work) -> None:
    rounds = 0
    done = asyncio.Event()

    async def count() -> None:
        nonlocal rounds
        while not done.is_set():
            rounds += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.gather(*(work("m", f"s{i}", 1.0, 5) for i in range(4)))
    done.set()
    await counting
    assert rounds >= 2 * 20


async def test_a_cancelled_waiter_does_not_delay_others(turns: FairTurns) -> None:
    await turns.take("m", 0)
    waiting = [asyncio.create_task(turns.take("m", number)) for number in range(1, 5)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    turns.end()
    for granted in waiting[1:3]:
        await granted
        turns.end()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await waiting[3]
    turns.end()
    assert turns.num_waiting == 0


async def test_a_turn_given_to_a_cancelled_waiter_passes_on(turns: FairTurns) -> None:
    await turns.take("m", 0)
    unwilling, willing = (asyncio.create_task(turns.take("m", number)) for number in (1, 2))
    await asyncio.sleep(0)
    granted = False

    def cancel_when_granted() -> None:
        nonlocal granted
        granted = turns._current is not None
        if granted:
            unwilling.cancel()
        else:
            asyncio.get_running_loop().call_soon(cancel_when_granted)

    turns.end()
    cancel_when_granted()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await willing
    turns.end()
    with contextlib.suppress(asyncio.CancelledError):
        await unwilling
    assert unwilling.cancelled()


async def test_beyond_the_limit_the_flow_with_most_waiters_is_rejected() -> None:
    turns = FairTurns(max_waiting=5, max_waiting_bytes=1000)
    await turns.take("m", "running")
    greedy = [asyncio.create_task(turns.take("m", "greedy")) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(ExhaustedError, match="5 calls and steps wait") as caught:
        await turns.take("m", "greedy")
    assert (caught.value.reason, caught.value.retry_seconds) == ("TOO_MANY_WAITING", 0.1)
    modest = asyncio.create_task(turns.take("m", "modest"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert isinstance(greedy[-1].exception(), ExhaustedError)
    assert not any(task.done() for task in (*greedy[:-1], modest))
    for task in (*greedy, modest):
        task.cancel()
    await asyncio.gather(*greedy, modest, return_exceptions=True)
    assert turns.num_waiting == 0
    turns.end()


async def _wait_with(turns: FairTurns, session: object, num_bytes: int) -> None:
    LARGE_MESSAGE_BYTES.set(num_bytes)
    await turns.take("m", session)
    turns.end()


async def test_beyond_the_limit_the_flow_with_most_bytes_is_rejected() -> None:
    turns = FairTurns(max_waiting=100, max_waiting_bytes=1000)
    await turns.take("m", "running")
    wait = [asyncio.create_task(_wait_with(turns, "many", 0)) for _ in range(9)]
    greedy = [asyncio.create_task(_wait_with(turns, "greedy", 400)) for _ in range(2)]
    await asyncio.sleep(0)  # the tasks begin to wait; so below
    with pytest.raises(ExhaustedError, match="800 bytes wait, the maximum is 1000") as caught:
        await asyncio.create_task(_wait_with(turns, "greedy", 201))
    assert (caught.value.reason, caught.value.retry_seconds) == ("TOO_MANY_WAITING", 0.1)
    wait.append(asyncio.create_task(_wait_with(turns, "modest", 300)))
    for _ in range(3):
        await asyncio.sleep(0)  # it waits, the rejected one gets the error, and ends
    assert isinstance(greedy[1].exception(), ExhaustedError)
    wait += [asyncio.create_task(_wait_with(turns, "modest", 300)), greedy[0]]
    await asyncio.sleep(0)
    assert not any(task.done() for task in wait)
    turns.end()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await asyncio.gather(*wait)
    await turns.take("m", "running")
    fits = asyncio.create_task(_wait_with(turns, "greedy", 1000))
    await asyncio.sleep(0)
    assert not fits.done(), "the bytes of those that waited are free again"
    turns.end()
    await fits


async def test_old_sessions_and_their_pools_are_forgotten(work: Work, turns: FairTurns) -> None:
    for i in range(MAX_KNOWN_SESSIONS):
        await work("m", f"s{i}", 0.1, 1)
        await work(f"p{i}", "s", 0.1, 1)
    assert len(turns._known_sessions) == MAX_KNOWN_SESSIONS
    assert len(turns._known_pools) == MAX_KNOWN_SESSIONS // 2 + 1


async def test_a_hold_gives_no_turn_until_it_is_resumed(turns: FairTurns, work: Work, served: list[str]) -> None:
    turns.hold()
    waiting = [asyncio.create_task(work(f"p{i % 2}", f"{i}", 0.1, 1)) for i in range(6)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert (served, turns.num_waiting) == ([], 6)
    turns.resume()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await asyncio.gather(*waiting)
    assert sorted(served) == [str(i) for i in range(6)]
    assert turns.num_waiting == 0
    await work("p0", "later", 0.1, 1)


async def test_a_turn_that_has_begun_ends_during_a_hold(turns: FairTurns, work: Work, served: list[str]) -> None:
    await turns.take("m", "running")
    waiting = asyncio.create_task(work("m", "waiting", 0.1, 1))
    await asyncio.sleep(0)
    turns.hold()
    turns.end()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not served
    turns.resume()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await waiting
    assert served == ["waiting"]


async def test_resuming_without_a_hold_changes_nothing(turns: FairTurns) -> None:
    turns.resume()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await turns.take("m", 1)
    turns.resume()
    turns.end()


async def test_a_caller_that_is_cancelled_during_a_hold_gets_no_turn(
    turns: FairTurns, work: Work, served: list[str]
) -> None:
    turns.hold()
    cancelled, other = (asyncio.create_task(work("m", f"{i}", 0.1, 1)) for i in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    turns.resume()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await asyncio.gather(cancelled, other, return_exceptions=True)
    assert served == ["1"]


@pytest.mark.parametrize("when", ["held", "running", "granted"])
async def test_all_callers_are_rejected(turns: FairTurns, when: str) -> None:
    """Also those of the pool and of the session whose turn it is, which are in no queue."""
    error = NotPrimaryError(("other:1",), 7)
    if when == "held":
        turns.hold()
    else:
        await turns.take("m", 1)
    keys = [("m", 1), ("m", 1), ("m", 2), ("n", 1)]
    waiting = [asyncio.create_task(turns.take(*key)) for key in keys]
    await asyncio.sleep(0)
    if when == "granted":
        turns.end()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while turns._current is None:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0)
    turns.reject_all(error)
    async with asyncio.timeout(DEADLINE_SECONDS):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    if when != "held":
        turns.end()
    assert outcomes.count(error) == (3 if when == "granted" else 4)
    assert turns.num_waiting == 0
    turns.resume()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await turns.take("m", 2)
    turns.end()
