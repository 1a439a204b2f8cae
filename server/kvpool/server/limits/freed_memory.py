"""Keeps memory that was freed for the next large message, and returns it when the process has most of its maximum."""

import asyncio
import ctypes
import gc
from typing import Final

from kvpool.core.memory_probe import resident_bytes
from kvpool.wire.backoff import Backoff

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Parameters of glibc's `mallopt`."""
_KEPT_BYTES: Final = 2**26
_MAX_MMAP_THRESHOLD_BYTES: Final = 2**25
_RETURN_SHARE: Final = 0.75
_USEFUL_SHARE: Final = 0.95


def keep_freed_memory() -> None:
    """Lets glibc keep up to 64 MiB of freed memory. No effect with other C libraries.

    It would return the memory of each message of some MiB to the kernel, and get it back page by page for the next. A
    message of 16 MiB is copied four times, so that it stopped the event loop for 30 ms; for 10 ms without the faults.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD_BYTES)


def collect_old_garbage_rarely() -> None:
    """Makes full collections of garbage a hundred times rarer, after one of what recovery has left.

    A full collection visits each request and each kept event, 70 ms for 20,000 requests. Small steps of one token
    caused one in 50 steps. `return_freed_memory` collects while memory is short.
    """
    gc.collect()  # else the next steps visit all recovered objects, as the collector was off
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1000)


async def return_freed_memory(max_bytes: int) -> None:
    """Returns what Python and glibc keep to the kernel, while the process has most of its maximum. Runs indefinitely.

    Otherwise changes would be refused for memory that nothing uses: 256 messages of 4 MiB that had arrived in part left
    1 GiB resident after their calls had ended, since glibc returns only what lies above all memory in use. Python keeps
    thousands of freed tuples for the next ones; these left 240 MiB, as each holds the MiB that it lies in.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    backoff = Backoff(1.0, 30.0, jitter=0.0)
    while trim:
        await asyncio.sleep(backoff.next())
        before_bytes = resident_bytes()
        if before_bytes <= max_bytes * _RETURN_SHARE:
            backoff.reset()
            continue
        gc.collect()  # empties the lists of freed objects, too
        await asyncio.to_thread(trim, 0)
        # What is in use cannot be returned, and a trim holds glibc's lock while it looks for what can.
        if resident_bytes() < before_bytes * _USEFUL_SHARE:
            backoff.reset()
