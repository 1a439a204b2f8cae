"""Numbers in names of rules are those of lending/fence.py."""

import threading

import pytest

from kvpool.core.ids import SessionNumber, TableLease
from kvpool.lending.fence import Fence, StaleTablesError
from support.waiting import DEADLINE_SECONDS


def lease(number: int, epoch: int = 1) -> TableLease:
    return TableLease(epoch, SessionNumber(number))


class CallCounter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def opened(drained: CallCounter | None = None) -> Fence:
    fence = Fence(drained or CallCounter())
    fence.begin(1)
    fence.open(1)
    return fence


def refused(fence: Fence, stale: TableLease) -> str:
    """The reason why a step is not admitted; it is not counted."""
    before = fence.num_in_flight
    with pytest.raises(StaleTablesError) as caught:
        fence.step(stale)
    assert fence.num_in_flight == before
    return caught.value.reason


def test_rule_1_only_ended_sessions_are_excluded() -> None:
    fence = opened()
    fence.narrow(4, [2, 4])
    assert [refused(fence, lease(number)) for number in (0, 1, 3)] == ["SESSION_ENDED"] * 3
    for number in (2, 4, 5, 2**60):
        with fence.step(lease(number)):
            assert fence.num_in_flight == 1


def test_rule_1_only_steps_of_the_current_epoch_are_admitted() -> None:
    fence = Fence()
    assert refused(fence, lease(1)) == "NOT_READY"
    fence.begin(1)
    assert refused(fence, lease(1)) == "NOT_READY", "its views are being made"
    fence.open(1)
    assert [refused(fence, lease(1, epoch)) for epoch in (0, 2)] == ["EPOCH_PASSED"] * 2
    fence.end()
    assert refused(fence, lease(1)) == "NOT_READY"
    fence.open(1)
    assert refused(fence, lease(1)) == "NOT_READY", "it ended before its views were made"


def test_rule_2_no_later_fence_brings_a_session_back() -> None:
    fence = opened()
    fence.narrow(2, [1])
    fence.narrow(3, [1, 2, 3])
    assert refused(fence, lease(2)) == "SESSION_ENDED"
    fence.narrow(1, [1, 3])
    assert refused(fence, lease(2)) == "SESSION_ENDED"
    for number in (1, 3, 4):
        fence.step(lease(number))
    fence.begin(2)
    fence.open(2)
    fence.step(lease(2, epoch=2))


def test_rule_4_the_last_excluded_step_of_a_session_calls_back() -> None:
    drained = CallCounter()
    fence = opened(drained)
    first, second, other = fence.step(lease(1)), fence.step(lease(1)), fence.step(lease(2))
    assert fence.is_drained
    fence.narrow(2, [2])
    assert (fence.is_drained, fence.pending) == (False, (1,))
    first.done()
    first.done()
    assert (drained.count, fence.pending) == (0, (1,))
    second.done()
    assert (drained.count, fence.is_drained, fence.pending) == (1, True, ())
    other.done()
    assert (drained.count, fence.num_in_flight) == (1, 0), "open sessions are not waited for"


def test_rule_4_an_epoch_that_ends_waits_for_all_its_steps() -> None:
    drained = CallCounter()
    fence = opened(drained)
    steps = [fence.step(lease(number)) for number in (1, 2)]
    fence.end()
    steps[0].done()
    assert (drained.count, fence.pending) == (1, (2,))
    steps[1].done()
    assert (drained.count, fence.is_drained) == (2, True)


def test_a_step_that_fails_is_done() -> None:
    fence = opened()
    with pytest.raises(ZeroDivisionError), fence.step(lease(1)):
        raise ZeroDivisionError
    assert fence.num_in_flight == 0


def test_rule_3_threads_never_find_a_drained_fence_with_a_stale_step() -> None:
    """Threads run steps of each session until it is fenced. When the fence is drained, none of its steps is running."""
    running: set[tuple[int, int]] = set()
    quiet = threading.Event()
    fence = Fence(quiet.set)
    fence.begin(1)
    fence.open(1)

    def step(thread: int, number: int) -> None:
        while True:
            try:
                with fence.step(lease(number)):
                    running.add((thread, number))
                    running.discard((thread, number))
            except StaleTablesError:
                return

    for number in range(1, 60):
        quiet.clear()
        threads = [threading.Thread(target=step, args=(i, number)) for i in range(4)]
        for thread in threads:
            thread.start()
        fence.narrow(number, [])
        assert fence.is_drained or quiet.wait(DEADLINE_SECONDS)
        assert not running
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()
    assert fence.num_in_flight == 0
