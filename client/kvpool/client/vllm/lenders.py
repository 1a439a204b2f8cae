"""Connections of an engine's processes to the lenders of its memory, and what their refusals ask of the user."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final

from vllm.platforms import current_platform

from kvpool.client.process_name import process_name
from kvpool.client.retries import Retries
from kvpool.client.vllm.settings import Settings
from kvpool.core.errors import KvpoolError
from kvpool.lending.lender_client import LenderClient, connect_lender

_REMEDIES: Final = {
    "OTHER_POOL": "Set KVPOOL_POOL to the pool of the lender, or KVPOOL_MEMORY to the lender of this pool",
    "MEMORY_DIFFERS": "Start the engine with the model and options of the others, or stop them first",
    "OUT_OF_MEMORY": "Lend less memory (--memory or --host-memory of `kvpool worker`)",
}


@contextlib.contextmanager
def explained(memory: str) -> Iterator[None]:
    """Adds the lender's address, the reason and what to do to the message of its refusals."""
    try:
        yield
    except KvpoolError as error:
        remedy = _REMEDIES.get(error.reason)
        error.args = (f"kvpool memory {memory}: {error.reason}: {error}" + (f". {remedy}" if remedy else ""),)
        raise


def connect_to_lender(settings: Settings, parallel_config: Any, rank: int, role: str) -> LenderClient:
    """Connects to the lender of a rank; waits for one that starts. `role` is that of the process in the engine.

    Raises:
        ValueError: The lender is of another rank or device.
        KvpoolError: The lender refuses the process, or cannot be reached within `deadline_seconds`.
    """
    address, world_size = settings.memory_of(rank), parallel_config.world_size
    name = f"{settings.client_name or process_name('vllm')} {role}"
    retries = Retries(time.monotonic(), settings.deadline_seconds)
    with explained(address):
        while True:
            try:
                lender = connect_lender(
                    address, settings.pool, settings.memory_token(), name, timeout_seconds=settings.deadline_seconds
                )
                break
            except KvpoolError as error:
                if error.retry_seconds is None:
                    raise
                time.sleep(retries.pause_seconds(error))
    offer, device = lender.offer, current_platform.device_type
    problem = ""
    if (offer.rank, offer.world_size) != (rank, world_size):
        problem = f"it lends rank {offer.rank} of {offer.world_size}, and this is worker {rank} of {world_size}"
    elif offer.device.partition(":")[0] != device:
        problem = f"its memory is on {offer.device}, and the engine computes on {device}"
    if problem:
        lender.close()
        raise ValueError(f"kvpool memory {address}: {problem}")
    return lender
