"""Signals of a worker's process."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_signals(numbers: tuple[signal.Signals, ...], call: Callable[[], None]) -> Iterator[None]:
    """Calls this when one of the signals comes. The call must be one that may interrupt itself, such as a queue's."""

    def handle(_: int, __: FrameType | None) -> None:
        call()

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
