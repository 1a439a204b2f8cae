"""Maps the memory that a rank lends, from the descriptor that the lender sends."""

import mmap
import os

import torch

from kvpool.core.errors import InvalidArgumentError, WrongStateError
from kvpool.lending.cuda_memory import map_cuda_memory


def open_memory(device: str, descriptor: int, size_bytes: int) -> torch.Tensor:
    """Maps memory without a change of its contents. The caller keeps the descriptor, and may close it afterwards.

    Args:
        device: Device of the memory, as the lender states it: "cpu", or "cuda:N".
        descriptor: The memory.
        size_bytes: How much of it to map, at least 1.

    Returns:
        int8 (size_bytes,). The memory is mapped until the tensor and all views of it are gone.

    Raises:
        InvalidArgumentError: The memory is on a device from which it cannot be mapped, or cuda-bindings are missing.
        WrongStateError: The memory is on another device, is smaller than `size_bytes`, or cannot be mapped.
    """
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise WrongStateError("OTHER_DEVICE", f"memory on {device}, and torch finds no CUDA device", field="device")
        return map_cuda_memory(descriptor, size_bytes, torch.device("cuda", torch.cuda.current_device()))
    if device != "cpu":
        message = f"memory on {device} cannot be mapped; memory on cpu and on CUDA devices can"
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
