"""A whole run, section by section."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks import comparison, growing, many_pools, many_sessions, memory, server_time, stages
from benchmarks.machine import machine
from benchmarks.report import Report, Run
from benchmarks.scale import Scale
from benchmarks.vllm_side import VllmSide
from kvpool.client import __version__
from kvpool.replay.children import LOOPBACK, serve_pools, server_child


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a run.

    Attributes:
        measure: Runs the section.
        num_rounds: Returns how often the section calls `advance`.
    """

    measure: Callable[[Run], None]
    num_rounds: Callable[[Scale], int]


SECTIONS: Final = {
    "prompts": Section(comparison.prompts, lambda scale: scale.num_rounds),
    "evictions": Section(comparison.evictions, lambda scale: scale.num_rounds),
    "windows": Section(comparison.windows, comparison.windows_rounds),
    "decodes": Section(comparison.decodes, lambda scale: scale.num_rounds),
    "ahead": Section(comparison.decodes_ahead, lambda scale: scale.num_rounds),
    "streams": Section(comparison.streams, lambda scale: scale.num_rounds),
    "stages": Section(stages.stages, lambda scale: scale.num_rounds),
    "server-time": Section(server_time.server_time, lambda scale: scale.num_rounds + 1),
    "memory": Section(memory.memory, lambda scale: scale.num_constructions),
    "sessions": Section(many_sessions.many_sessions, lambda scale: scale.session_rounds * len(scale.sessions)),
    "pools": Section(many_pools.many_pools, lambda scale: scale.session_rounds * len(scale.pools)),
    "pool-sizes": Section(growing.pool_sizes, lambda scale: scale.growth_rounds),
    "growth": Section(growing.growth, lambda scale: scale.growth_rounds),
}
"""The sections by name, in the order in which they run."""


def num_rounds(scale: Scale, names: Sequence[str]) -> int:
    """Returns how often a run of these sections calls `advance`."""
    return sum(SECTIONS[name].num_rounds(scale) for name in names)


def measure(scale: Scale, names: Sequence[str], vllm: VllmSide | None, advance: Callable[[int], object]) -> Report:
    """Measures sections.

    Args:
        scale: Amount of work.
        names: Names of sections, keys of `SECTIONS`.
        vllm: vLLM's manager to measure in turns with kvpool; None for kvpool alone.
        advance: Called with 1 after each round.

    Raises:
        ChildError: A child process failed.
        WorkloadError: A workload did not do the intended work.
    """
    report = Report(__version__, machine(), scale)
    if vllm:
        report.vllm, report.vllm_version = {}, vllm.version
    with server_child(serve_pools, LOOPBACK) as server:
        run = Run(report, server, vllm, advance)
        for name in names:
            SECTIONS[name].measure(run)
    report.work_out_ratios()
    return report
