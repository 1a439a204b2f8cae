"""The service that engines are attached to."""

import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support_workers import LoggingProcess

with warnings.catch_warnings(), suppress(ImportError):
    warnings.simplefilter("ignore")  # what vLLM and torch say of themselves as they are imported
    import vllm.v1.core.sched.async_scheduler  # noqa: F401


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where `kvpool serve` listens; fails if it logged a bug or did not stop cleanly."""
    with TemporaryDirectory() as folder:
        address = f"unix:{Path(folder) / 's'}"
        server = LoggingProcess(str(Path(sys.executable).parent / "kvpool"), "serve", "--listen", address)
        try:
            server.wait_for("server listening")
            yield address
        finally:
            server.signal(signal.SIGTERM)
            status = server.end()
        logged = "".join(server.lines)
        assert status == 0, logged
        assert "Traceback" not in logged, logged
