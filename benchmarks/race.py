"""Runs the same work on several targets in turns, so that other load on the machine affects all of them."""

import gc
import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

from benchmarks.workloads import Micros, Workload

_KeyT = TypeVar("_KeyT")
Figures = dict[str, float]
"""Values by name of the figure."""


def race(
    workloads: Mapping[_KeyT, Workload], num_rounds: int, count: int, advance: Callable[[int], object]
) -> dict[_KeyT, Figures]:
    """Runs workloads in turns, round by round, then closes them. The first round is not timed.

    Args:
        workloads: The workloads in the order of their turns.
        num_rounds: Number of timed rounds.
        count: Repetitions of each workload per round.
        advance: Called with 1 after each round.

    Returns:
        The medians of each workload in microseconds.
    """
    micros: dict[_KeyT, Micros] = {key: {} for key in workloads}
    gc.collect()
    gc.freeze()
    for workload in workloads.values():
        workload.round(count)
    for _ in range(num_rounds):
        for key, workload in workloads.items():
            for name, taken in workload.round(count).items():
                micros[key].setdefault(name, []).extend(taken)
        advance(1)
    gc.unfreeze()
    for workload in workloads.values():
        workload.close()
    return {key: {name: statistics.median(taken) for name, taken in by.items()} for key, by in micros.items()}
