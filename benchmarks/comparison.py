"""The same work in process, through a server, and in vLLM's manager, in turns."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from benchmarks.core_target import CoreTarget
from benchmarks.echo import Echo, serve_echo
from benchmarks.race import Figures, race
from benchmarks.report import DEFAULT_HASH_SUFFIX, SIDES, Run
from benchmarks.scale import Scale
from benchmarks.session_target import AheadTarget, SessionTarget
from benchmarks.workloads import PROMPT_BLOCKS, Micros, Stopwatch, Task, Workload, open_workload
from kvpool.client.connection import connect_as
from kvpool.replay.children import LOOPBACK, server_child
from kvpool.wire.channels import ClientCredentials

GEMMA3_WINDOWED_GROUPS: Final = 5
_GEMMA3_MAX_ROUNDS: Final = 20
_DECODE_PROMPT_BLOCKS: Final = 4
_AHEAD: Final = "decode_step_ahead_256_requests"
_VLLM_DEFAULT_HASH: Final = "sha256"
_HASHED: Final = {
    "prompts": ("hash_us_per_block", f"prompt_{PROMPT_BLOCKS}_end_to_end"),
    "decodes": ("decode_step_256_requests",),
}
"""For each kind of work, the figures that depend on the hash function."""


def prompts(run: Run) -> None:
    """Measures look-ups, allocations and frees of prompts, and hashing."""
    scale = run.scale
    task = Task("prompts", scale.num_blocks)
    measured = _race(run, task, scale.num_rounds, scale.prompts_a_round)
    for figures in measured.values():
        figures["hash_us_per_block"] = figures.pop("hash") / PROMPT_BLOCKS
    _put(run, measured, _HASHED[task.kind])


def evictions(run: Run) -> None:
    """Measures allocations that evict cached blocks."""
    scale = run.scale
    measured = _race(run, Task("evictions", scale.evicting_blocks), scale.num_rounds, scale.prompts_a_round)
    _put(run, measured)


def windows(run: Run) -> None:
    """Measures prompts of a model with mostly sliding-window layers. Few enough rounds that no block is evicted."""
    task = Task("windows", run.scale.num_blocks, num_windowed_groups=GEMMA3_WINDOWED_GROUPS)
    _put(run, _race(run, task, windows_rounds(run.scale), run.scale.prompts_a_round))


def windows_rounds(scale: Scale) -> int:
    """Returns the number of rounds of `windows`."""
    return min(scale.num_rounds, _GEMMA3_MAX_ROUNDS)


def decodes(run: Run) -> None:
    """Measures decode steps of 256 requests."""
    task = Task("decodes", run.scale.num_blocks, prompt_blocks=_DECODE_PROMPT_BLOCKS)
    measured = _race(run, task, run.scale.num_rounds, run.scale.steps_a_round)
    _put(run, measured, _HASHED[task.kind])


def decodes_ahead(run: Run) -> None:
    """Measures the scheduler's own time of the same steps when they are sent ahead of their answers.

    A section of its own, since its sleeps let caches go cold for targets in the same rounds. In vLLM the whole step is
    the scheduler's own time.
    """
    task = Task("decodes", run.scale.num_blocks, prompt_blocks=_DECODE_PROMPT_BLOCKS)
    with ExitStack() as stack:
        turns: dict[str, Workload] = {"vllm": run.vllm.open(task)} if run.vllm else {}
        for name, address in zip(("grpc", "tcp"), run.server.addresses, strict=True):
            client = stack.enter_context(connect_as(ClientCredentials(), address))
            turns[name] = _DecodesAhead(AheadTarget(client, f"ahead-{name}", task), task)
        measured = race(turns, run.scale.num_rounds, run.scale.steps_a_round, run.advance)
    for name in ("grpc", "tcp"):
        run.report.side(name)[_AHEAD] = measured[name][_AHEAD]
    if run.report.vllm is not None:
        run.report.vllm[_AHEAD] = measured["vllm"]["decode_step_256_requests"]


def streams(run: Run) -> None:
    """Measures empty steps, and an echo of an empty frame as the lower bound."""
    with ExitStack() as stack:
        echo = stack.enter_context(server_child(serve_echo, LOOPBACK))
        turns: dict[tuple[str, str], Workload] = {}
        for name, address, echo_address in zip(("grpc", "tcp"), run.server.addresses, echo.addresses, strict=True):
            client = stack.enter_context(connect_as(ClientCredentials(), address))
            turns[name, "empty_step"] = EmptySteps(SessionTarget(client, f"streams-{name}", Task("empty", 1000)))
            turns[name, "echo_stream"] = Echo(echo_address)
        measured = race(turns, run.scale.num_rounds, run.scale.steps_a_round, run.advance)
    for (name, figure), figures in measured.items():
        run.report.side(name)[figure] = figures[figure]


class _DecodesAhead:
    """Decode steps that are sent ahead of their answers. See `Workload`."""

    def __init__(self, target: AheadTarget, task: Task) -> None:
        self._target = target
        self._decodes = open_workload(target, task)

    def round(self, count: int) -> Micros:
        """See `Workload`."""
        self._target.micros = []
        self._decodes.round(count)
        return {_AHEAD: self._target.micros}

    def close(self) -> None:
        """See `Workload`."""
        self._decodes.close()


class EmptySteps:
    """Steps that only report execution. See `Workload`."""

    def __init__(self, target: SessionTarget) -> None:
        self._target = target
        target.lookup(target.make([0]))
        target.settle()

    def round(self, count: int) -> Micros:
        """See `Workload`."""
        watch = Stopwatch()
        for _ in range(count):
            watch.time("empty_step", self._target.settle)
        return watch.micros

    def close(self) -> None:
        """See `Workload`."""
        self._target.close()


def _race(run: Run, task: Task, num_rounds: int, count: int) -> dict[str, Figures]:
    with ExitStack() as stack:
        turns: dict[str, Workload] = {"core": open_workload(CoreTarget(task), task)}
        if run.vllm:
            turns["vllm"] = run.vllm.open(task)
        for name, address in zip(("grpc", "tcp"), run.server.addresses, strict=True):
            client = stack.enter_context(connect_as(ClientCredentials(), address))
            turns[name] = open_workload(SessionTarget(client, f"{task.kind}-{name}", task), task)
        if run.vllm and task.kind in _HASHED:
            turns[_VLLM_DEFAULT_HASH] = run.vllm.open(replace(task, hash_name=_VLLM_DEFAULT_HASH))
        return race(turns, num_rounds, count, run.advance)


def _put(run: Run, measured: dict[str, Figures], hashed: tuple[str, ...] = ()) -> None:
    for name in SIDES:
        run.report.side(name).update(measured[name])
    if run.report.vllm is not None:
        run.report.vllm.update(measured["vllm"])
        for figure in hashed:
            run.report.vllm[figure + DEFAULT_HASH_SUFFIX] = measured[_VLLM_DEFAULT_HASH][figure]
