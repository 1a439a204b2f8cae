"""A program on a real pseudo terminal, and the contents of its screen."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable
from typing import Any

import pyte

from support import processes
from support.waiting import DEADLINE_SECONDS

_OWN_THE_TERMINAL = """
import fcntl, os, sys, termios
from kvpool.cli import main
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if not sys.argv[1].endswith("/kvpool"):
    os.execv(sys.argv[1], sys.argv[1:])
main(sys.argv[2:], prog_name="kvpool")
"""


class Terminal:
    """A program on a pseudo terminal of its own, which sends it the signals of keys and of size changes.

    Attributes:
        process: The program.
        raw: The bytes that it wrote.
    """

    def __init__(self, *command: str, columns: int = 80, lines: int = 24, **environment: str) -> None:
        self._master, self._slave = pty.openpty()
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        self._set_size(columns, lines)
        self.before = termios.tcgetattr(self._slave)
        names = {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8", **environment}
        hidden = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
        self.process = processes.start(
            [processes.PYTHON, "-c", _OWN_THE_TERMINAL, *command],
            stdin=self._slave, stdout=self._slave, stderr=self._slave,
            env={**{name: value for name, value in os.environ.items() if name not in hidden}, **names},
        )  # fmt: skip

    @property
    def text(self) -> str:
        """The text of the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    @property
    def attributes(self) -> list[Any]:
        """The attributes of the terminal."""
        return termios.tcgetattr(self._slave)

    def wait_for(self, expected: str | Callable[[str], object]) -> str:
        """Waits until the screen contains a text or satisfies a condition; returns the text of the screen.

        Fails as soon as the program has ended without it.
        """
        holds = (lambda text: expected in text) if isinstance(expected, str) else expected
        due = time.monotonic() + DEADLINE_SECONDS
        while not holds(self.text):
            runs = time.monotonic() < due and self.process.poll() is None
            is_read = self._read(min(due, time.monotonic() + 0.1))
            assert runs or is_read, f"the screen does not show {expected}:\n{self.text.rstrip()}"
        return self.text

    def press(self, keys: str) -> None:
        """Types keys."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Changes the size of the terminal."""
        self._screen.resize(lines, columns)
        self._set_size(columns, lines)

    def wait_ended(self) -> int:
        """Waits until the program has ended and reads all its output; returns its exit status."""
        due = time.monotonic() + DEADLINE_SECONDS
        while self.process.poll() is None:
            self._read(min(due, time.monotonic() + 0.1))
            assert time.monotonic() < due, self.text
        while self._read(time.monotonic()):
            pass
        return self.process.wait()

    def close(self) -> None:
        """Kills the program and closes the terminal."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self, due: float) -> bool:
        """Reads the next output until a deadline; returns whether there was any."""
        readable, _, _ = select.select([self._master], [], [], max(due - time.monotonic(), 0.0))
        if not readable:
            return False
        written = os.read(self._master, 65536)
        self.raw += written
        self._stream.feed(written)
        return bool(written)
