"""A `kvpool serve` of its own process, to be killed and started again."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.bugs import bugs_in
from support.logging_process import LoggingProcess


class Service:
    """A service.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        """Starts it, with its socket in a folder."""
        self.address = f"unix:{folder / 's'}"
        self._options = options
        self._process = self._started()

    def kill(self) -> None:
        """Ends it as a kernel does that is out of memory."""
        self._process.signal(signal.SIGKILL)
        self._process.end()

    def start_again(self) -> None:
        """Starts it once more, after it was killed."""
        self._process = self._started()

    def stop(self) -> None:
        """Ends it as an operator does, unless it was killed; fails if it logged a bug or did not stop cleanly."""
        if self._process.process.returncode == -signal.SIGKILL:
            return
        self._process.signal(signal.SIGTERM)
        status = self._process.end()
        logged = "".join(self._process.lines)
        assert status == 0, logged
        assert not bugs_in(logged), logged

    def _started(self) -> LoggingProcess:
        kvpool = str(Path(sys.executable).parent / "kvpool")
        environment = {"KVPOOL_SERVE_NO_JOURNAL": "1"}  # without the option
        process = LoggingProcess(kvpool, "serve", "--listen", self.address, *self._options, environment=environment)
        process.wait_for("server listening")
        return process


@contextmanager
def service(folder: Path, *options: str) -> Iterator[Service]:
    """Starts a service, and stops it unless it was killed; fails if it logged a bug or did not stop cleanly."""
    started = Service(folder, *options)
    try:
        yield started
    finally:
        started.stop()
