"""Cost of a decode step as pools, requests, prompts and groups grow."""

from collections.abc import Iterator

from benchmarks.core_target import CoreTarget
from benchmarks.race import race
from benchmarks.report import Run
from benchmarks.scale import Scale
from benchmarks.session_target import SessionTarget
from benchmarks.workloads import Task, Workload, open_workload
from kvpool.client import Client
from kvpool.client.connection import connect_as
from kvpool.wire.channels import ClientCredentials

_REQUESTS = 64
_SMALL_PROMPT_BLOCKS = 32
_STEPS_PER_ROUND = 4


def pool_sizes(run: Run) -> None:
    """Measures, per pool size, a decode step through a server, and prompts in process that evict cached blocks."""
    with connect_as(ClientCredentials(), run.server.addresses[0]) as client:
        turns: dict[tuple[int, str], Workload] = {}
        for num_blocks in run.scale.pool_sizes_blocks:
            decodes = Task("decodes", num_blocks, num_requests=_REQUESTS, prompt_blocks=1)
            turns[num_blocks, "grpc"] = _through(client, f"sizes-{num_blocks}", decodes)
            evictions = Task("evictions", num_blocks, prompt_blocks=_SMALL_PROMPT_BLOCKS)
            turns[num_blocks, "core"] = open_workload(CoreTarget(evictions), evictions)
        measured = race(turns, run.scale.growth_rounds, _STEPS_PER_ROUND, run.advance)
    for (num_blocks, side), figures in measured.items():
        by_name = run.report.pool_sizes.setdefault(str(num_blocks), {})
        by_name |= {f"{side}_{name}": figure for name, figure in figures.items()}


def growth(run: Run) -> None:
    """Measures a decode step through a server and in vLLM's manager while one parameter grows."""
    with connect_as(ClientCredentials(), run.server.addresses[0]) as client:
        turns: dict[tuple[str, int, str], Workload] = {}
        for axis, size, task in _tasks(run.scale):
            turns[axis, size, "grpc"] = _through(client, f"{axis}-{size}", task)
            if run.vllm:
                turns[axis, size, "vllm"] = run.vllm.open(task)
        measured = race(turns, run.scale.growth_rounds, _STEPS_PER_ROUND, run.advance)
    for (axis, size, side), figures in measured.items():
        (figure,) = figures.values()
        run.report.growth.setdefault(axis, {}).setdefault(str(size), {})[side] = figure


def _tasks(scale: Scale) -> Iterator[tuple[str, int, Task]]:
    num_blocks = scale.num_blocks
    for count in scale.growth_requests:
        yield "requests", count, Task("decodes", num_blocks, num_requests=count, prompt_blocks=4)
    for size in scale.growth_prompt_blocks:
        yield "prompt_blocks", size, Task("decodes", num_blocks, num_requests=_REQUESTS, prompt_blocks=size)
    for count in scale.growth_groups:
        task = Task("decodes", num_blocks, num_windowed_groups=count - 1, num_requests=_REQUESTS, prompt_blocks=16)
        yield "groups", count, task


def _through(client: Client, name: str, task: Task) -> Workload:
    return open_workload(SessionTarget(client, name, task), task)
