"""A process of an engine that is stopped while its session ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support.fake_lender import FakeLender

_ENGINE = """
import sys
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.gpu_worker.fence import StaleTablesError
from kvpool.gpu_worker.lending.borrower import connect_lender
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
        command = [sys.executable, "-c", _ENGINE, fake.address]
        environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
        ) as engine:
            assert engine.stdin
            assert engine.stdout
            assert engine.stdout.readline() == "ready\n"
            engine.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, engine.pid, os.WSTOPPED)
            fake.fence(1, last=1)
            engine.stdin.write("step\n")
            assert fake.count("fenced") == 0
            engine.send_signal(signal.SIGCONT)
            assert engine.stdout.readline() == "SESSION_ENDED\n"
            fake.wait_for("fenced")
            engine.stdin.close()
        fake.stop()
