"""Tickets of steps that a device runs."""

from collections import deque

from kvpool.lending.fence import StepTicket
from kvpool.lending.steps_in_flight import StepsInFlight


class Event:
    """An event of a device."""

    def __init__(self) -> None:
        self.has_completed = False

    def query(self) -> bool:
        return self.has_completed

    def synchronize(self) -> None:
        self.has_completed = True


def test_a_step_on_a_cpu_is_done_when_its_call_has_returned() -> None:
    done: list[int] = []
    StepsInFlight(None).launched(StepTicket(lambda: done.append(1)))
    assert done == [1]


def test_a_step_on_a_device_is_done_when_its_event_has_completed() -> None:
    events = [Event(), Event(), Event()]
    recorded = deque(events)
    steps, done = StepsInFlight(recorded.popleft), list[int]()
    for i in range(3):
        steps.launched(StepTicket(lambda i=i: done.append(i)))  # type: ignore[misc]
    steps.finish_completed()
    assert done == []
    events[0].has_completed = True
    steps.finish_completed()
    assert done == [0]
    steps.finish_all()
    assert done == [0, 1, 2]
    steps.finish_completed()
    steps.finish_all()
    assert done == [0, 1, 2]


def test_work_beside_steps_does_not_keep_the_tickets_of_steps() -> None:
    step, work = Event(), Event()
    steps, done = StepsInFlight(lambda: step), list[str]()
    steps.launched_beside(StepTicket(lambda: done.append("work")), work)
    steps.launched(StepTicket(lambda: done.append("step")))
    step.has_completed = True
    steps.finish_completed()
    assert done == ["step"]
    steps.finish_all()
    assert done == ["step", "work"]
