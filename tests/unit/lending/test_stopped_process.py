"""A process of an engine that is stopped while its session ends."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support import processes
from support.fake_lender import FakeLender
from support.logging_process import LoggingProcess

_ENGINE = """
import sys
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.lending.fence import StaleTablesError
from kvpool.lending.lender_client import connect_lender
from support.core import config

memory = connect_lender(sys.argv[1], "m").map(DeclaredMemory(config(num_blocks=16), 4096), 10.0)
lease = TableLease(7, SessionNumber(1))
memory.step(lease).done()
print("ready", flush=True)
for _ in sys.stdin:
    try:
        memory.step(lease).done()
        print("ran", flush=True)
    except StaleTablesError as error:
        print(error.reason, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_was_stopped_past_its_lease_runs_no_step() -> None:
    with TemporaryDirectory() as folder:
        fake = FakeLender(Path(folder))
        command = (processes.PYTHON, "-c", _ENGINE, fake.address)
        with LoggingProcess(*command, stdin=processes.PIPE, stdout=processes.PIPE) as engine:
            stdin, stdout = engine.process.stdin, engine.process.stdout
            assert stdin
            assert stdout
            assert stdout.readline() == "ready\n"
            engine.pause()
            fake.fence(1, last=1)
            stdin.write("step\n")
            assert fake.count("fenced") == 0
            engine.resume()
            assert stdout.readline() == "SESSION_ENDED\n"
            fake.wait_for("fenced")
        fake.stop()
