"""Maps the memory that a rank lends, from the descriptor that the lender sends."""

import mmap
import os

import torch

from kvpool.core.errors import InvalidArgumentError, WrongStateError

MemoryIdentity = tuple[int, int]
"""Device and inode number of the file behind a descriptor: equal for two descriptors of the same memory."""


def identity(descriptor: int) -> MemoryIdentity:
    """Identifies the memory behind a descriptor, for comparison."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def open_memory(device: str, descriptor: int, size_bytes: int) -> torch.Tensor:
    """Maps memory without a change of its contents. The caller keeps the descriptor, and may close it afterwards.

    Args:
        device: Device of the memory, as the lender states it: "cpu", or "cuda:N".
        descriptor: The memory.
        size_bytes: How much of it to map, at least 1.

    Returns:
        int8 (size_bytes,). The memory is mapped until the tensor and all views of it are gone.

    Raises:
        InvalidArgumentError: The memory is on a device from which it cannot be mapped.
        WrongStateError: The memory is smaller than `size_bytes`, or the kernel cannot map it.
    """
    if device != "cpu":
        message = f"memory on {device} cannot be mapped; memory on cpu can"
        raise InvalidArgumentError("device", message, reason="UNSUPPORTED_DEVICE")
    found_bytes = os.fstat(descriptor).st_size
    if found_bytes < size_bytes:
        message = f"the lender's memory has {found_bytes} bytes, and the engine needs {size_bytes}"
        raise WrongStateError("DESCRIPTOR_TOO_SMALL", message, field="size_bytes")
    try:
        mapped = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED)
        mapped.madvise(mmap.MADV_DONTFORK)  # a child process would write after the lender has seen this one exit
    except OSError as error:
        raise WrongStateError("CANNOT_MAP", f"the lender's memory cannot be mapped: {error.strerror}") from None
    return torch.frombuffer(mapped, dtype=torch.int8)  # keeps the mapping
