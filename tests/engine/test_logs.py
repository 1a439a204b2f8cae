"""What an engine logs of kvpool, in the log of its own."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from engine.test_sharing import Engine
from support import processes

_WARNS = """
import logging
from kvpool.client.vllm.logs import log_with_vllm
for _ in range(2):
    log_with_vllm()
fields = {"seconds": 2.5, "reason": "SERVER_UNREACHABLE", "error": "no connection", "of_the_engine": 7}
logging.getLogger("kvpool.client").warning("no answer yet, trying again", extra=fields)
"""


def test_a_scheduler_logs_what_it_waited_for(address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = Engine(address, "logged", tmp_path).driver
    driver.add("r", [1] * 40, 3)
    driver.finish()
    with caplog.at_level(logging.INFO, "kvpool"):
        driver.scheduler.shutdown()
    (detached,) = [vars(record) for record in caplog.records if record.msg == "engine detached"]
    assert (detached["pool"], detached["rounds"] > 0, detached["waits_admission"] > 0) == ("logged", True, True)


def test_a_warning_is_complete_in_a_program_that_does_not_configure_vllms_log() -> None:
    fields = 'reason=SERVER_UNREACHABLE error="no connection" seconds=2.5'
    done = subprocess.run(
        [sys.executable, "-c", _WARNS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=processes.environment(VLLM_LOGGING_LEVEL="INFO"),
        check=True,
    )
    assert done.stdout.splitlines()[-1:] == [f"WARNING kvpool.client: no answer yet, trying again {fields}"]
