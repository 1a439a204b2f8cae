"""Steps that were launched on a device and may not have completed."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvpool.lending.fence import StepTicket


class DeviceEvent(Protocol):
    """An event of a device, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has completed what was launched before the event."""

    def synchronize(self) -> None:
        """Waits until it has."""


class StepsInFlight:
    """Finishes the tickets of steps when the device has completed them."""

    def __init__(self, record_event: Callable[[], DeviceEvent] | None) -> None:
        """Args: record_event: Records an event behind what was launched; None for a CPU, which launches nothing."""
        self._record_event = record_event
        self._steps: deque[tuple[DeviceEvent, StepTicket]] = deque()
        self._beside: deque[tuple[DeviceEvent, StepTicket]] = deque()

    def launched(self, ticket: StepTicket) -> DeviceEvent | None:
        """Takes the ticket of a step whose last kernel was launched; returns the event behind it, None on a CPU."""
        if self._record_event is None:
            ticket.done()
            return None
        event = self._record_event()
        self._steps.append((event, ticket))
        return event

    def launched_beside(self, ticket: StepTicket, event: DeviceEvent) -> None:
        """Takes the ticket of work that runs beside steps until an event."""
        self._beside.append((event, ticket))

    def finish_completed(self) -> None:
        """Finishes the tickets of completed steps, without waiting. Only the thread that launches steps calls it."""
        for launched in (self._steps, self._beside):
            while launched and launched[0][0].query():
                launched.popleft()[1].done()

    def finish_all(self) -> None:
        """Waits for the steps that were launched, and finishes their tickets. Any thread may call it."""
        for event, ticket in (*self._steps.copy(), *self._beside.copy()):
            event.synchronize()
            ticket.done()
