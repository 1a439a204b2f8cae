"""Figures of vLLM alone and of vLLM on kvpool, beside each other."""

import gzip
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

Figures = dict[str, Any]
NO_DEVICE: Final = "no device"
_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")


def checked(figures: Figures) -> Figures:
    """The figures of a side.

    Raises:
        ValueError: One is no positive number.
    """
    for name, value in figures.items():
        if value != NO_DEVICE and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: {value} is no positive number")
    return figures


def compared(alone: Mapping[str, Any], kvpool: Mapping[str, Any]) -> dict[str, Figures]:
    """Both, and the ratio of each figure that both have: that of kvpool divided by that of vLLM alone."""
    ratio: Figures = {}
    for name, value in alone.items():
        if name in kvpool:
            pair = value, kvpool[name]
            ratio[name] = NO_DEVICE if NO_DEVICE in pair else round(kvpool[name] / value, 3)
    return {"alone": dict(alone), "kvpool": dict(kvpool), "ratio": ratio}


def idle(events: Iterable[Mapping[str, Any]], num_steps: int) -> Figures:
    """How long the device of a trace had nothing to do.

    Args:
        events: Events of torch's profiler, with times in microseconds.
        num_steps: Steps in the trace.
    """
    spans = sorted((each["ts"], each["ts"] + each["dur"]) for each in events if each.get("cat") in _ON_DEVICE)
    if not spans:
        return {"device_idle_us_per_step": NO_DEVICE, "device_idle_percent": NO_DEVICE}
    begin, end = spans[0]
    idle_us = 0.0
    for start, finish in spans:
        idle_us += max(start - end, 0.0)
        end = max(end, finish)
    return {
        "device_idle_us_per_step": round(idle_us / num_steps, 1),
        "device_idle_percent": round(100 * idle_us / (end - begin), 2),
    }


def trace_events(folder: Path) -> list[Any]:
    """The events of the only trace in a folder."""
    (path,) = folder.glob("*.json.gz")
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]  # type: ignore[no-any-return]
