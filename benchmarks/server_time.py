"""Processor time of a server per message: of an echo, which is the lower bound, and of steps.

Processor time is comparable where latency is not: it leaves out the client, and the waits for a free core.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.comparison import EmptySteps
from benchmarks.echo import Echo, serve_echo
from benchmarks.machine import processor_us
from benchmarks.report import Run
from benchmarks.session_target import SessionTarget
from benchmarks.workloads import Task, Workload, open_workload
from kvpool.client.connection import connect_as
from kvpool.replay.children import ServerChild, serve_pools, server_child
from kvpool.server.app import serve
from kvpool.server.config import ServerConfig
from kvpool.server.journal.config import JournalConfig
from kvpool.wire.channels import ClientCredentials

_NUM_REQUESTS: Final = 64
ECHO: Final = "echo"
_LONGER_ROUNDS: Final = 4


async def serve_with_journal(addresses: tuple[str, ...], ready: Callable[[list[str]], None]) -> None:
    """Serves pools with a journal, and otherwise with the default settings of `kvpool serve`."""
    with TemporaryDirectory(prefix="kvpool-journal-") as folder:
        await serve(ServerConfig(addresses=addresses, grace_seconds=1.0, journal=JournalConfig(folder)), ready)


def server_time(run: Run) -> None:
    """Measures the servers in turns, if the system tells their processor time."""
    if processor_us(os.getpid()) is None:
        run.advance(run.scale.num_rounds + 1)
        return
    with ExitStack() as stack:
        turns: dict[str, tuple[Workload, int]] = {}
        echo = stack.enter_context(server_child(serve_echo))
        turns[ECHO] = Echo(echo.addresses[0]), echo.pid
        for suffix, serve_them in (("", serve_pools), ("_journal", serve_with_journal)):
            turns |= _steps(stack, run, suffix, stack.enter_context(server_child(serve_them)))
        count = run.scale.steps_a_round * _LONGER_ROUNDS
        spent_us = dict.fromkeys(turns, 0.0)
        for i in range(run.scale.num_rounds + 1):
            for name, (workload, pid) in turns.items():
                before_us = processor_us(pid) or 0.0
                workload.round(count)
                if i:  # the first round warms up
                    spent_us[name] += (processor_us(pid) or 0.0) - before_us
            run.advance(1)
        for workload, _ in turns.values():
            workload.close()
    run.report.server_time = {name: spent / count / run.scale.num_rounds for name, spent in spent_us.items()}


def _steps(stack: ExitStack, run: Run, suffix: str, server: ServerChild) -> dict[str, tuple[Workload, int]]:
    client = stack.enter_context(connect_as(ClientCredentials(), server.addresses[0]))
    task = Task("decodes", run.scale.num_blocks, prompt_blocks=4, num_requests=_NUM_REQUESTS)
    empty = EmptySteps(SessionTarget(client, "empty", Task("empty", 1000)))
    decodes = open_workload(SessionTarget(client, "server_time", task), task)
    return {
        f"empty_step{suffix}": (empty, server.pid),
        f"decode_step_{_NUM_REQUESTS}_requests{suffix}": (decodes, server.pid),
    }
