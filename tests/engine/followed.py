"""A vLLM engine in a process of its own whose steps are read as it makes them, so that something can die in between."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.results import NewTokens, Script, StepLine
from support import processes

_DEADLINE_SECONDS = 240


class FollowedEngine:
    """An engine on its way through a workload.

    Attributes:
        answers: What it answered so far, by request.
        num_steps: Steps that are read.
    """

    def __init__(self, script: Script, folder: Path, *, core_apart: bool) -> None:
        """Starts it.

        Args:
            script: What it does.
            folder: A folder to make, for its files.
            core_apart: Whether the engine's core is a process of its own, as `vllm serve` has it.
        """
        folder.mkdir()
        (folder / "script.json").write_text(json.dumps(script))
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.follow_engine", str(folder / "script.json")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=processes.environment(VLLM_ENABLE_V1_MULTIPROCESSING=str(int(core_apart))),
                start_new_session=True,
            )
        self.answers: dict[str, NewTokens] = {}
        self.num_steps = 0

    def read_steps(self, count: int) -> None:
        """Reads this number of further steps, while the engine continues."""
        for _ in range(count):
            assert self._read(), self.log

    def read_until_it_pauses(self) -> None:
        """Reads the steps before its next pause."""
        while line := self._line():
            if line == "paused":
                return
            self._take(line)
        raise AssertionError(self.log)

    def go_on(self) -> None:
        """Ends a pause."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Ends it as a kernel does that is out of memory."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(_DEADLINE_SECONDS)

    def end(self) -> int:
        """Reads all steps that are left; returns the process's exit status."""
        while self._read():
            pass
        return self._process.wait(_DEADLINE_SECONDS)

    @property
    def log(self) -> str:
        """What its process, and that of its core, wrote to stderr."""
        return self._log.read_text()

    def close(self) -> None:
        """Kills it and all that it started, if that is there."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _read(self) -> bool:
        line = self._line()
        if line is None:
            return False
        assert line != "paused", "no test waited for this pause"
        self._take(line)
        return True

    def _line(self) -> StepLine | str | None:
        assert self._process.stdout
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def _take(self, line: StepLine | str) -> None:
        assert isinstance(line, dict)
        self.num_steps += 1
        for request, new in line.items():
            answer = self.answers.setdefault(request, {**new, "tokens": []})
            answer["tokens"] += new["tokens"]
            assert answer["num_cached_tokens"] == new["num_cached_tokens"]


@contextmanager
def followed(script: Script, folder: Path, *, core_apart: bool = False) -> Iterator[FollowedEngine]:
    """Starts an engine, and leaves no process of it."""
    engine = FollowedEngine(script, folder, core_apart=core_apart)
    try:
        yield engine
    finally:
        engine.close()
