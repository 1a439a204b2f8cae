"""Waits for signals, the keyboard and other threads.

A Python signal handler runs in the main thread, and only when that runs. A thread that waits for a lock is not always
woken by a signal, and a handler must not take a lock that its own thread may hold. A byte written to a pipe avoids both
problems.
"""

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from types import FrameType
from typing import Any, Final, Self

_END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END_KEYS: Final = frozenset(b"qQ")
_VSUSP_OFF: Final = b"\x00"


class Wakeup:
    """Handles signals while it is entered. For the main thread, one at a time.

    Args:
        also: Further signals that end a wait.

    Attributes:
        is_ending: Whether the process is to end: a signal requested it. Read it after a wait.
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
            self._handlers[number] = signal.signal(number, _ignore)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous)
        writer, self._writer = self._writer, -1
        os.close(writer)
        os.close(self._reader)

    def wake(self) -> None:
        """Ends the wait; may be called from any thread."""
        with contextlib.suppress(OSError):  # pipe full: the thread wakes anyway; pipe closed: no thread waits
            os.write(self._writer, b"\0")

    def wait(self, timeout_seconds: float | None = None, also: tuple[int, ...] = ()) -> list[int]:
        """Waits for a signal, for `wake`, or until a file of `also` is readable; returns the readable ones."""
        readable, _, _ = select.select([self._reader, *also], [], [], timeout_seconds)
        if self._reader in readable:
            os.read(self._reader, 4096)
        return [file for file in also if file in readable]

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self.is_ending = True


class Terminal(Wakeup):
    """Waits for a key, a signal, a change of size, or another thread. Restores the terminal at the end.

    If stdin is a terminal and `keys` is set, it reads single keys without echo. Ctrl-Z is disabled, since it would
    leave the shell on the alternate screen. For the main thread, once.
    """

    def __init__(self, *, keys: bool) -> None:
        super().__init__(signal.SIGWINCH)
        self._reads_keys = keys and sys.stdin is not None and sys.stdin.isatty()
        self._stdin = sys.stdin.fileno() if self._reads_keys else -1
        self._attributes: list[Any] | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        if self._reads_keys:
            self._attributes = termios.tcgetattr(self._stdin)
            tty.setcbreak(self._stdin, termios.TCSADRAIN)
            changed = termios.tcgetattr(self._stdin)
            changed[6][termios.VSUSP] = _VSUSP_OFF
            termios.tcsetattr(self._stdin, termios.TCSADRAIN, changed)
        return self

    def __exit__(self, *error: object) -> None:
        if self._attributes is not None:
            with contextlib.suppress(termios.error):  # the terminal was closed
                termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._attributes)
        super().__exit__(*error)

    def wait_for_end(self, timeout_seconds: float) -> bool:
        """Waits for an event or the timeout; returns whether to end: after q, Ctrl-C or SIGTERM."""
        if self.wait(timeout_seconds, (self._stdin,) if self._reads_keys else ()):
            typed = os.read(self._stdin, 4096)
            self._reads_keys = bool(typed)  # empty: stdin was closed
            self.is_ending |= not _END_KEYS.isdisjoint(typed)
        return self.is_ending


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Does nothing: a signal with a handler wakes the wait."""
