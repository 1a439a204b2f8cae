"""Whether an engine fits on a device beside memory that a lender holds there, in place of vLLM's check at its start.

1. The first engine sizes the memory by vLLM's rule: the share `gpu_memory_utilization` of the device must be free. If
   it is not, as others start at the same time, the share is that of all processes, and what they hold is subtracted.
2. A later engine needs no KV memory of its own. It starts if the weights of the earlier ones fit into what is free, and
   `gpu_memory_utilization` has no effect, as with vLLM's `kv_cache_memory_bytes`.
"""

import contextlib
from typing import Any

from vllm.v1.worker.utils import request_memory

from kvpool.v1.lending_pb2 import LendingOffer
from kvpool.wire.log_fields import format_bytes


def requested_bytes(offer: LendingOffer, snapshot: Any, cache_config: Any, external_bytes: int = 0) -> int:
    """Returns what an engine may use of a device, its KV memory included if it is the first.

    Args:
        offer: What the lender has.
        snapshot: vLLM's `MemorySnapshot` before the weights are loaded.
        cache_config: Has the share.
        external_bytes: Weights that another process holds for the engine, as `vllm preload` does.

    Raises:
        ValueError: Too little is free; names what is needed, what is free and what the lender holds.
    """
    if offer.is_lent:
        needed_bytes = offer.weights_bytes - external_bytes
        if snapshot.free_memory < needed_bytes:
            raise too_full(offer, snapshot, f"{format_bytes(needed_bytes)} for its weights alone")
        return int(snapshot.free_memory)
    for held_bytes in (external_bytes, snapshot.total_memory - snapshot.free_memory):
        with contextlib.suppress(ValueError):
            return int(request_memory(snapshot, cache_config, held_bytes))
    share = cache_config.gpu_memory_utilization
    raise too_full(offer, snapshot, f"a part of the {share:g} of it that all may use (gpu_memory_utilization)")


def too_full(offer: LendingOffer, snapshot: Any, needed: str) -> ValueError:
    """Makes the error of an engine that does not fit."""
    total, free = format_bytes(snapshot.total_memory), format_bytes(snapshot.free_memory)
    lent = f"holds {format_bytes(offer.available_bytes)}" if offer.is_lent else "holds no KV memory yet"
    return ValueError(
        f"kvpool: the engine does not fit on {snapshot.device_}. It needs {needed}; {free} of {total} were free at its"
        f" start, and the lender {lent}. Stop another engine, or lend less memory (--memory of `kvpool worker`)"
    )
