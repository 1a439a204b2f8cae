"""Processes whose log, their stderr, is read as it comes."""

import contextlib
import re
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

from support import processes
from support.waiting import DEADLINE_SECONDS

started: Final[list["LoggingProcess"]] = []
"""The processes that were started, or still ran, during the current test; see `support.process_logs`."""


class LoggingProcess:
    """A process whose stderr is read as it comes. At the end of a context it is killed if it still runs.

    Args:
        command: The command.
        environment: Variables beside those of this process.
        stderr: Where its log goes; if that is no pipe, `lines` stays empty.
        pipes: `stdin` and `stdout`, as for `processes.start`.

    Attributes:
        command: The command.
        process: The process.
        lines: What it wrote to stderr so far.
        earlier_lines: What processes before a `restart` wrote.
    """

    def __init__(
        self,
        *command: str,
        environment: Mapping[str, str] = MappingProxyType({}),
        stderr: int = processes.PIPE,
        **pipes: int | None,
    ) -> None:
        self.command = command
        self.lines: list[str] = []
        self.earlier_lines: list[str] = []
        self._options: dict[str, Any] = {"stdout": processes.DEVNULL, "stderr": stderr, **pipes}
        self._options["env"] = {**processes.environment(), **environment}
        self._news = threading.Condition()
        self._start()
        started.append(self)

    def _start(self) -> None:
        self._ended = False
        self.process = processes.start(self.command, text=True, errors="replace", **self._options)
        threading.Thread(target=self._read, daemon=True).start()

    def restart(self) -> None:
        """Kills the process, if it still runs, and starts another one in its place."""
        self.kill()
        self.earlier_lines += self.lines
        self.lines = []
        self._start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs, paused or not."""
        return self.process.poll() is None

    @property
    def log(self) -> str:
        """What it wrote to stderr so far."""
        return "".join(self.lines)

    def wait_for(self, pattern: str, count: int = 1) -> str:
        """Waits until `count` lines matched, and returns the last one."""

        def found() -> list[str]:
            return [line for line in self.lines if re.search(pattern, line)]

        with self._news:
            met = self._news.wait_for(lambda: len(found()) >= count or self._ended, DEADLINE_SECONDS)
            assert met, f"no {pattern!r} in:\n{self.log}"
            assert len(found()) >= count, f"ended without {pattern!r}:\n{self.log}"
            return found()[count - 1]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def pause(self) -> None:
        """Pauses it, and waits until it stands still. Its connections stay open."""
        self.signal(signal.SIGSTOP)
        wait_stopped(self.pid)

    def resume(self) -> None:
        """Continues after `pause`."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills it, paused or not, and waits for its end."""
        self.signal(signal.SIGKILL)
        self.end()

    def stop(self) -> int:
        """Ends it by SIGTERM, even if it is paused; returns its exit status."""
        self.signal(signal.SIGTERM)
        self.resume()
        return self.end()

    def end(self) -> int:
        """Waits until the process has ended and all its lines are there; returns its exit status."""
        with self._news:
            assert self._news.wait_for(lambda: self._ended, DEADLINE_SECONDS), f"runs on:\n{self.log}"
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return self.process.wait(DEADLINE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def _read(self) -> None:
        with self.process.stderr or contextlib.nullcontext(()) as lines:
            for line in lines:
                with self._news:
                    self.lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


def wait_stopped(pid: int) -> None:
    """Waits until a process stands still after SIGSTOP, or has ended."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
        time.sleep(0.001)
