"""The reference engine, the second and third part of `make demo`."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from examples.reference_engine import __main__ as example
from examples.reference_engine.generate import Generation
from examples.reference_engine.schedulers import SchedulerOptions, play_concurrently
from kvpool.client import connect
from kvpool.replay.result import Counts
from support import processes
from support.operator import pool_info
from support.paths import ROOT
from support.server import pool_config, running_server


@pytest.mark.slow
def test_two_ranks_generate_the_tokens_of_a_model_without_a_cache() -> None:
    with running_server() as address:
        done = processes.run(
            [sys.executable, "-m", "examples.reference_engine", "--server", address],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "32 of 32" in done.stdout


@pytest.mark.parametrize(("equal_requests", "status"), [(32, 0), (31, 1)])
def test_the_exit_status_is_1_if_tokens_differ(
    equal_requests: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Generation(Counts(requests=32), equal_requests, [], pool_info())

    def generate(*_: Any) -> Generation:
        return done

    monkeypatch.setattr(example, "generate", generate)
    result = CliRunner().invoke(example.main, ["--server", "unix:/unused"])
    assert (result.exit_code, f"{equal_requests} of 32" in result.output) == (status, True), result.output


@pytest.mark.complete  # test_lending.py has its rules
def test_engines_share_memory_and_kills_lose_no_cache() -> None:
    done = processes.run(
        [sys.executable, "-m", "examples.reference_engine.sharing"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "third engine, after both" in done.stdout


def test_lent_memory_needs_its_server() -> None:
    result = CliRunner().invoke(example.main, ["--memory", "unix:/unused"])
    assert (result.exit_code, "--memory needs --server" in result.output) == (2, True)


def test_a_pool_with_host_memory_is_refused() -> None:
    complaints: list[str] = []
    nothing: Any = None
    no_executor: Any = nullcontext
    with running_server() as address, connect(address) as client:
        client.create_pool(replace(pool_config("m", 20), num_host_blocks=4))
        options = SchedulerOptions(address, "m", 1, 1, no_executor, 1)
        assert play_concurrently([nothing], options, lambda _: None, complaints.append) == [None]
        assert client.get_pool("m").free_blocks == 19
    assert "this engine makes no copies" in complaints[0]
