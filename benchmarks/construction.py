"""Time and memory to make a large pool. Imports the standard library only, since vLLM's interpreter runs it too."""

import gc
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")


def construct(make: Callable[[], object], num_blocks: int) -> dict[str, float]:
    """Makes a pool twice, to measure time and memory. Call it in a fresh process.

    Returns:
        `construct_ms` in milliseconds; `bytes_per_block`, the growth of resident memory, on systems that report it;
        `traced_bytes_per_block`, the growth that tracemalloc reports.
    """
    gc.collect()
    before_bytes = _resident_bytes()
    start_ns = time.perf_counter_ns()
    pool = make()
    figures = {"construct_ms": (time.perf_counter_ns() - start_ns) / 1e6}
    gc.collect()
    if before_bytes:
        figures["bytes_per_block"] = (_resident_bytes() - before_bytes) / num_blocks
    del pool
    gc.collect()
    tracemalloc.start()
    pool = make()
    gc.collect()
    figures["traced_bytes_per_block"] = tracemalloc.get_traced_memory()[0] / num_blocks
    tracemalloc.stop()
    del pool
    return figures


def _resident_bytes() -> int:
    """Returns the resident memory of this process; 0 without /proc."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if _STATM.exists() else 0
