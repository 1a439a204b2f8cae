"""Starts processes as `subprocess` does; Python programs are forks of a zygote, see `support.zygote`."""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self, TypeAlias

from support.paths import TESTS

PYTHON: Final = sys.executable
KVPOOL: Final = str(Path(sys.executable).parent / "kvpool")
PIPE: Final = subprocess.PIPE
DEVNULL: Final = subprocess.DEVNULL
STDOUT: Final = subprocess.STDOUT
_IMPORTS: Final = (
    "torch",
    "kvpool.cli.health",
    "kvpool.cli.replay",
    "kvpool.cli.serve",
    "kvpool.cli.worker",
    "kvpool.gpu_worker.lent_rank",
    "kvpool.gpu_worker.rank_runner",
    "kvpool.gpu_worker.worker",
)


def environment(**more: str) -> dict[str, str]:
    """The environment of this process, in which programs also find the modules of the tests; and more variables."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


@cache
def _zygote(imports: tuple[str, ...]) -> socket.socket:
    """The zygote of this process that imports some modules, started with the first program that needs it."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [PYTHON, "-P", "-m", "support.zygote", str(its.fileno()), *imports],
        pass_fds=[its.fileno()],
        stdin=DEVNULL,
        env=environment(GRPC_VERBOSITY="NONE"),  # as `kvpool` sets it before it imports gRPC
    )
    its.close()

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


def is_python(command: Sequence[str], env: Mapping[str, str] | None = None) -> bool:
    """Whether a zygote can run a command: this Python with a program, a module or code; or `kvpool`.

    A program with folders of its own on its path needs an interpreter that has imported nothing yet, and so does one
    that is measured: benchmarks set `KVPOOL_FRESH_PROCESSES`.
    """
    if "KVPOOL_FRESH_PROCESSES" in os.environ:
        return False
    program, *arguments = command
    path = (os.environ if env is None else env).get("PYTHONPATH", "").split(os.pathsep)
    if not {str(Path(each).absolute()) for each in path if each} <= {str(TESTS), *sys.path}:
        return False
    if Path(program).name.startswith("python"):
        return program == PYTHON and (arguments[0] in {"-c", "-m"} or arguments[0].endswith(".py"))
    return program == KVPOOL


class Process:
    """A program that runs as a fork of the zygote. It has what tests use of `subprocess.Popen`.

    Args:
        command: A command for which `is_python` holds.
        imports: Modules that the zygote has imported.
        stdin: As for `Popen`, as are the others.
    """

    def __init__(  # noqa: PLR0913 - as Popen
        self,
        command: Sequence[str],
        *,
        imports: tuple[str, ...] = _IMPORTS,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool = False,
        errors: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.args = command
        self.returncode: int | None = None
        self.stdin: Any = None
        self.stdout: Any = None
        self.stderr: Any = None
        request = {
            "command": [*command],
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
            "has_session": start_new_session,
        }
        with contextlib.ExitStack() as closing:

            def end_of(name: str, stream: Any, number: int) -> int:
                if stream == PIPE:
                    reading, writing = os.pipe()
                    its, mine, mode = (reading, writing, "w") if number == 0 else (writing, reading, "r")
                    setattr(self, name, os.fdopen(mine, mode + "b" * (not text), 1 if text else -1, errors=errors))
                elif stream == DEVNULL:
                    its = os.open(os.devnull, os.O_RDWR)
                else:
                    return number if stream is None else stream if isinstance(stream, int) else stream.fileno()
                closing.callback(os.close, its)
                return its

            fds = [end_of("stdin", stdin, 0), end_of("stdout", stdout, 1)]
            fds.append(fds[1] if stderr == STDOUT else end_of("stderr", stderr, 2))
            self._status, status_fd = os.pipe()
            closing.callback(os.close, status_fd)
            socket.send_fds(_zygote(imports), [json.dumps(request).encode()], [*fds, status_fd])
        self._waiting = threading.Lock()
        self._said = b""
        self._read_until(1, None)
        self.pid = int(self._said.split(b"\n")[0])

    def poll(self) -> int | None:
        """See `Popen`."""
        return self.returncode if self.returncode is not None else self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """See `Popen`."""
        if self.returncode is None and self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """See `Popen`."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """See `Popen`."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See `Popen`."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002 - as Popen
        """See `Popen`."""
        due_seconds = None if timeout is None else time.monotonic() + timeout
        read: dict[IO[Any], Any] = {}
        readers = [
            threading.Thread(target=lambda stream=stream: read.update({stream: stream.read()}), daemon=True)
            for stream in (self.stdout, self.stderr)
            if stream and not stream.closed
        ]
        for reader in readers:
            reader.start()
        if self.stdin and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                if input:
                    self.stdin.write(input)
        for reader in readers:
            reader.join(None if due_seconds is None else max(0.0, due_seconds - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if due_seconds is None else max(0.0, due_seconds - time.monotonic()))
        self._close()
        return read.get(self.stdout), read.get(self.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()
        self.wait()

    def _close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _ended(self, timeout: float | None) -> int | None:
        """Waits for the exit status, and returns it; None also while another thread waits for it."""
        if not self._waiting.acquire(blocking=timeout != 0.0):
            return None
        try:
            if self.returncode is None and self._read_until(2, timeout):
                os.close(self._status)
                self.returncode = int(self._said.split(b"\n")[1])
            return self.returncode
        finally:
            self._waiting.release()

    def _read_until(self, num_lines: int, timeout: float | None) -> bool:
        while self._said.count(b"\n") < num_lines:
            if not select.select([self._status], [], [], timeout)[0]:
                return False
            # The zygote ends before its children only if all are killed together.
            self._said += os.read(self._status, 100) or f"{-signal.SIGKILL}\n".encode()
        return True


Running: TypeAlias = "Process | subprocess.Popen[Any]"


def start(command: Sequence[str], *, imports: tuple[str, ...] = _IMPORTS, **options: Any) -> Running:
    """Starts a program, by a zygote that has imported some modules if it can."""
    if is_python(command, options.get("env")):
        return Process(command, imports=imports, **options)
    return subprocess.Popen(command, **options)


def run(
    command: Sequence[str],
    *,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> "subprocess.CompletedProcess[Any]":
    """Runs a program as `subprocess.run` does."""
    if capture_output:
        options.update(stdout=PIPE, stderr=PIPE)
    process = start(command, **options)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.wait()
        raise
    assert process.returncode is not None
    done = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done
