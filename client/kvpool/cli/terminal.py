"""The keyboard and the signals of a command that owns the terminal, as one thing to wait for."""

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from types import FrameType, TracebackType
from typing import Any, Final, Self

_END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END_KEYS: Final = frozenset(b"qQ")
_VSUSP_OFF: Final = b"\x00"


class Terminal:
    """Waits for a key, a signal, a new size, or another thread's word. Puts the terminal back as it was at the end.

    A keyboard is read only if stdin is a terminal and `keys` says so: key by key, without echo, and without Ctrl-Z,
    which would leave the shell on a foreign screen. For the main thread, once.
    """

    def __init__(self, *, keys: bool) -> None:
        self._reads_keys = keys and sys.stdin is not None and sys.stdin.isatty()
        self._stdin = sys.stdin.fileno() if self._reads_keys else -1
        self._attributes: list[Any] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._previous_wakeup = -1
        self._wake_reader = self._wake_writer = -1
        self._is_ending = False

    def __enter__(self) -> Self:
        self._wake_reader, self._wake_writer = os.pipe()
        for end in (self._wake_reader, self._wake_writer):
            os.set_blocking(end, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        for number in _END_SIGNALS:
            self._handlers[number] = signal.signal(number, self._end)
        self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, _only_wake)
        if self._reads_keys:
            self._attributes = termios.tcgetattr(self._stdin)
            tty.setcbreak(self._stdin, termios.TCSADRAIN)
            changed = termios.tcgetattr(self._stdin)
            changed[6][termios.VSUSP] = _VSUSP_OFF
            termios.tcsetattr(self._stdin, termios.TCSADRAIN, changed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._attributes is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._attributes)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        writer, self._wake_writer = self._wake_writer, -1
        os.close(writer)
        os.close(self._wake_reader)

    def wake(self) -> None:
        """Ends the wait, from any thread."""
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nobody waits any more
            os.write(self._wake_writer, b"\0")

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until something happens or the time is up; returns whether it is time to end: q, Ctrl-C, SIGTERM."""
        watched = [self._wake_reader, *([self._stdin] if self._reads_keys else [])]
        readable, _, _ = select.select(watched, [], [], timeout_seconds)
        if self._wake_reader in readable:
            os.read(self._wake_reader, 4096)
        if self._stdin in readable:
            typed = os.read(self._stdin, 4096)
            self._reads_keys = bool(typed)  # nothing: the keyboard is gone
            self._is_ending |= not _END_KEYS.isdisjoint(typed)
        return self._is_ending

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self._is_ending = True


def _only_wake(_number: int, _frame: FrameType | None) -> None:
    """That there is a handler makes the signal wake a wait."""
