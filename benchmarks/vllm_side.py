"""The child process in which vLLM's manager does the same work."""

import contextlib
import json
import os
import select
import subprocess
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final

from benchmarks.workloads import Micros, Task
from kvpool.replay import ChildError

_SCRIPT: Final = Path(__file__).with_name("beside_vllm.py")
_QUIET: Final = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "PYTHONHASHSEED": "0"}
_ANSWER_SECONDS: Final = 300.0
_STOP_SECONDS: Final = 15.0


class VllmSide:
    """vLLM's manager in a process of its own.

    Attributes:
        python: Its interpreter.
        version: Version of vLLM.
    """

    def __init__(self, python: str) -> None:
        """Starts the process. Takes as long as the import of vLLM.

        Raises:
            ChildError: The interpreter cannot be run, or has no supported vLLM.
        """
        self.python = python
        self._errors = TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = _start(python, self._errors, [])
        self._count = 0
        try:
            self.version = str(self._read()["version"])
        except BaseException:
            self.close()
            raise

    def open(self, task: Task) -> "VllmWorkload":
        """Opens the workload of a task."""
        self._count += 1
        name = str(self._count)
        self.ask(open=name, task=asdict(task))
        return VllmWorkload(self, name)

    def ask(self, **request: object) -> dict[str, Any]:
        """Sends one line and waits for the answer.

        Raises:
            ChildError: The process could not do it, or has ended.
        """
        assert self._process.stdin  # noqa: S101 - started with pipes
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def construct(self, num_blocks: int) -> dict[str, float]:
        """Measures the construction of a manager in a fresh process: see `construction.construct`."""
        with TemporaryFile() as errors, _start(self.python, errors, [str(num_blocks)]) as process:
            figures = _answer(process, errors)
        return {name: float(value) for name, value in figures.items()}

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        return _answer(self._process, self._errors)


class VllmWorkload:
    """See `Workload`."""

    def __init__(self, side: VllmSide, name: str) -> None:
        self._side = side
        self._name = name

    def round(self, count: int) -> Micros:
        """See `Workload`."""
        micros: Micros = self._side.ask(round=self._name, count=count)["micros"]
        return micros

    def close(self) -> None:
        """See `Workload`."""
        self._side.ask(close=self._name)


def _start(python: str, errors: IO[bytes], arguments: list[str]) -> "subprocess.Popen[str]":
    try:
        return subprocess.Popen(  # noqa: S603 - the interpreter that the user chose
            [python, str(_SCRIPT), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **_QUIET},
        )
    except OSError as error:
        raise ChildError(f"cannot run {python}: {error.strerror}") from error


def _answer(process: "subprocess.Popen[str]", errors: IO[bytes]) -> dict[str, Any]:
    assert process.stdout  # noqa: S101 - started with pipes
    if not select.select([process.stdout], [], [], _ANSWER_SECONDS)[0]:
        raise ChildError(f"vLLM's process did not answer within {_ANSWER_SECONDS:g} s")
    line = process.stdout.readline()
    try:
        answer: dict[str, Any] = json.loads(line)
        error = answer.get("error")
    except (ValueError, AttributeError):
        raise ChildError(f"vLLM's process ended, or is not a Python with vLLM: {_last_line(errors)}") from None
    if error:
        raise ChildError(f"vLLM's process: {error}")
    return answer


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
