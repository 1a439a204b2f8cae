"""What an engine logs of kvpool, in the log of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.models import LLAMA, write_model
from engine.pairs import SCHEDULER, Engine
from support import processes

_WARNS = """
import logging
from kvpool.client.vllm.logs import log_with_vllm
for _ in range(2):
    log_with_vllm()
fields = {"seconds": 2.5, "reason": "SERVER_UNREACHABLE", "error": "no connection", "of_the_engine": 7}
logging.getLogger("kvpool.client").warning("no answer yet, trying again", extra=fields)
"""


def output_of(*arguments: object) -> str:
    """Runs Python at vLLM's usual level; returns all that it writes."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=processes.environment(VLLM_LOGGING_LEVEL="INFO"),
        check=False,
    ).stdout


@pytest.mark.slow
def test_an_engine_logs_where_it_is_attached_and_what_it_waited_for(address: str, tmp_path: Path) -> None:
    write_model(LLAMA, tmp_path / "model")
    specification = Engine(LLAMA, 64, ("salts",)).specification(tmp_path / "model")
    kvpool = {"address": address, "pool": "logged"}
    specification["llm"] |= {"scheduler_cls": SCHEDULER, "additional_config": {"kvpool": kvpool}}
    (tmp_path / "specification.json").write_text(json.dumps(specification))
    log = output_of("-m", "engine.run_engine", tmp_path / "specification.json", tmp_path / "results.json")
    fields = r"pool=logged session=\d+ epoch=\d+ memory=vllm-\S+ blocks=64 cached_blocks=0"
    fields += f" address={address} async_scheduling=False"
    assert re.search(rf"INFO .*\] engine attached {fields}$", log, re.MULTILINE), log
    waits = r"waits_admission=[1-9]\d* waits_decode=\d+ waits_background=\d+"
    assert re.search(
        rf"INFO .*\] engine detached pool=logged session=\d+ rounds=[1-9]\d* {waits}$", log, re.MULTILINE
    ), log
    assert "Using custom scheduler class" not in log


def test_a_warning_is_complete_in_a_program_that_does_not_configure_vllms_log() -> None:
    fields = 'reason=SERVER_UNREACHABLE error="no connection" seconds=2.5'
    assert output_of("-c", _WARNS).splitlines()[-1:] == [f"WARNING kvpool.client: no answer yet, trying again {fields}"]
