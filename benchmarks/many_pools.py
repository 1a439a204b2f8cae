"""Concurrent pools, one session each: in one server process, and in a process per pool."""

import statistics
from contextlib import ExitStack
from typing import Final

from benchmarks.core_target import pool_config
from benchmarks.many_sessions import Place, decode_at_once, processes
from benchmarks.race import Figures
from benchmarks.report import Run
from benchmarks.workloads import Task
from kvpool.client.connection import connect_as
from kvpool.replay.children import ServerChild, serve_pools, server_child
from kvpool.wire.channels import ClientCredentials

ONE_PROCESS: Final = "one_process"
A_PROCESS_EACH: Final = "a_process_each"


def many_pools(run: Run) -> None:
    """Measures each number of pools both ways, in turns, several times."""
    scale = run.scale
    max_pools = max(scale.pools)
    with ExitStack() as stack:
        servers = [stack.enter_context(server_child(serve_pools)) for _ in range(max_pools)]
        pipes = stack.enter_context(processes(min(scale.session_processes, max_pools)))
        names = [f"pools-{i}" for i in range(max_pools)]
        for i, server in enumerate(servers):
            with connect_as(ClientCredentials(), server.addresses[0]) as client:
                for name in names if not i else names[i : i + 1]:
                    client.create_pool(pool_config(name, Task("none", scale.num_blocks)))
        for count in scale.pools:
            measured: dict[str, list[Figures]] = {ONE_PROCESS: [], A_PROCESS_EACH: []}
            ways: dict[str, list[ServerChild]] = {ONE_PROCESS: servers[:1] * count, A_PROCESS_EACH: servers[:count]}
            for _ in range(scale.session_rounds):
                for way, used in ways.items():
                    places = [Place(server.addresses[0], name) for server, name in zip(used, names, strict=False)]
                    pids = {server.pid for server in used}
                    measured[way].append(decode_at_once(scale, pipes, places, pids))
                run.advance(1)
            run.report.pools[str(count)] = {
                f"{way}_{name}": statistics.median(f[name] for f in figures)
                for way, figures in measured.items()
                for name in figures[0]
            }
