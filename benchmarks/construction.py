"""What it takes to make a large pool. Standard library only: vLLM's interpreter runs it, too.

python -m benchmarks.construction NUM_BLOCKS
"""

import gc
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")


def construct(make: Callable[[], object], num_blocks: int) -> dict[str, float]:
    """Makes a pool, once for the time and once for the memory; in a process that has done nothing else.

    Returns:
        `construct_ms`: milliseconds; `bytes_per_block`: by how much the process's resident memory grew, where the
        system tells that; `traced_bytes_per_block`: by what Python's allocator says that is kept.
    """
    gc.collect()
    before_bytes = _resident_bytes()
    start_ns = time.perf_counter_ns()
    pool = make()
    told = {"construct_ms": (time.perf_counter_ns() - start_ns) / 1e6}
    gc.collect()
    if before_bytes:
        told["bytes_per_block"] = (_resident_bytes() - before_bytes) / num_blocks
    del pool
    gc.collect()
    tracemalloc.start()
    pool = make()
    gc.collect()
    told["traced_bytes_per_block"] = tracemalloc.get_traced_memory()[0] / num_blocks
    tracemalloc.stop()
    del pool
    return told


def _resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where there is no /proc."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if _STATM.exists() else 0
