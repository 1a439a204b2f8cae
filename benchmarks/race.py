"""Does the same work on several targets in turn, so that what else the machine does hits all alike."""

import gc
import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

from benchmarks.workloads import Micros, Workload

_KeyT = TypeVar("_KeyT")
Figures = dict[str, float]
"""By figure: what it takes."""


def race(
    workloads: Mapping[_KeyT, Workload], num_rounds: int, count: int, advance: Callable[[int], object]
) -> dict[_KeyT, Figures]:
    """Lets each do its work so many times, then the next, round after round; closes them. The first round is not timed.

    Args:
        workloads: Who takes part, in the order of their turns.
        num_rounds: Rounds, beside the first.
        count: How many times each does its work in a round.
        advance: Called with 1 after each round.

    Returns:
        Of each the medians, in microseconds.
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
