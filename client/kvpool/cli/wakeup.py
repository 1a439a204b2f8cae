"""Signals, and the word of another thread, as one file to wait for.

A handler of Python's runs in the main thread, when that is awake. A thread that waits for a lock is not always woken
by a signal, and a handler that sets what its own thread waits for may find it locked. A byte in a pipe has neither
trouble.
"""

import contextlib
import os
import select
import signal
from types import FrameType, TracebackType
from typing import Any, Final, Self

_END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Wakeup:
    """Takes signals from when it is entered until it is left. For the main thread, one at a time.

    Args:
        also: Signals that end a wait and mean nothing else.

    Attributes:
        is_ending: Whether a signal came that asks the process to end; read it after a wait.
    """

    def __init__(self, *also: signal.Signals) -> None:
        self.is_ending = False
        self._also = also
        self._handlers: dict[signal.Signals, Any] = {}
        self._previous = -1
        self._reader = self._writer = -1

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _END_SIGNALS:
            self._handlers[number] = signal.signal(number, self._end)
        for number in self._also:
            self._handlers[number] = signal.signal(number, _only_wake)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous)
        writer, self._writer = self._writer, -1
        os.close(writer)
        os.close(self._reader)

    def wake(self) -> None:
        """Ends the wait, from any thread."""
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nobody waits any more
            os.write(self._writer, b"\0")

    def wait(self, timeout_seconds: float | None = None, also: tuple[int, ...] = ()) -> list[int]:
        """Waits for a signal, for `wake`, or until a file can be read; returns which of `also` can be."""
        readable, _, _ = select.select([self._reader, *also], [], [], timeout_seconds)
        if self._reader in readable:
            os.read(self._reader, 4096)
        return [file for file in also if file in readable]

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self.is_ending = True


def _only_wake(_number: int, _frame: FrameType | None) -> None:
    """That there is a handler makes the signal wake a wait."""
