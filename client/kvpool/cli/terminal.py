"""The keyboard and the signals of a command that owns the terminal, as one thing to wait for."""

import contextlib
import os
import signal
import sys
import termios
import tty
from types import TracebackType
from typing import Any, Final, Self

from kvpool.cli.wakeup import Wakeup

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
        self._wakeup = Wakeup(signal.SIGWINCH)
        self._is_ending = False

    def __enter__(self) -> Self:
        self._wakeup.__enter__()
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
        self._wakeup.__exit__(kind, error, trace)

    def wake(self) -> None:
        """Ends the wait, from any thread."""
        self._wakeup.wake()

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until something happens or the time is up; returns whether it is time to end: q, Ctrl-C, SIGTERM."""
        if self._wakeup.wait(timeout_seconds, (self._stdin,) if self._reads_keys else ()):
            typed = os.read(self._stdin, 4096)
            self._reads_keys = bool(typed)  # nothing: the keyboard is gone
            self._is_ending |= not _END_KEYS.isdisjoint(typed)
        return self._is_ending or self._wakeup.is_ending
