"""Maps the memory that a rank lends, from the descriptor that the lender sends, at addresses that stay reserved."""

import ctypes
import logging
import mmap
import os
from typing import Final, Protocol

import torch

from kvpool.core.errors import InvalidArgumentError, WrongStateError
from kvpool.lending.cuda_memory import CudaError, CudaMemory, VirtualMemory, open_virtual_memory

_MAP_FIXED: Final = 0x10
"""Replaces what is mapped at the address; absent in Python's `mmap`."""
_REGISTERED_BYTES: Final = 2**30
"""How much host memory is registered with a GPU in one call."""
_log = logging.getLogger("kvpool.lending")

_mmap: Final = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p


class MappedMemory(Protocol):
    """A range of addresses of this process where memory of a rank is mapped, or was. Not thread-safe.

    Views of the memory and graphs of a device hold addresses, so these stay the same.

    Attributes:
        buffer: int8 (size_bytes,). There since the first `map`; the addresses are reserved as long as a view of it is.
    """

    buffer: torch.Tensor

    @property
    def is_mapped(self) -> bool:
        """Whether memory is mapped there. The buffer must not be used while none is."""

    def map(self, descriptor: int) -> None:
        """Maps memory without a change of its contents. The caller keeps the descriptor, and may close it afterwards.

        Raises:
            WrongStateError: The memory is on another device, is smaller than the range, or cannot be mapped.
        """

    def unmap(self) -> None:
        """Unmaps the memory, which no step may use any more."""


def reserve_memory(device: str, size_bytes: int) -> MappedMemory:
    """Reserves addresses for memory.

    Args:
        device: Device of the memory, as the lender states it: "cpu", or "cuda:N".
        size_bytes: How much of it to map, at least 1.

    Raises:
        InvalidArgumentError: The memory is on a device from which it cannot be mapped, or cuda-bindings are missing.
        WrongStateError: There is no such device here, or it is used through NVIDIA MPS; or no range is free.
    """
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise WrongStateError("OTHER_DEVICE", f"memory on {device}, and torch finds no CUDA device", field="device")
        return CudaMemory(size_bytes, torch.device("cuda", torch.cuda.current_device()))
    if device != "cpu":
        message = f"memory on {device} cannot be mapped; memory on cpu and on CUDA devices can"
        raise InvalidArgumentError("device", message, reason="UNSUPPORTED_DEVICE")
    return HostMemory(size_bytes)


def reserve_host_memory(device: str, size_bytes: int) -> "HostMemory":
    """Reserves addresses of the CPU for host memory beside memory on a device; raises as `reserve_memory` does."""
    if not device.startswith("cuda"):
        return HostMemory(size_bytes)
    return HostMemory(size_bytes, open_virtual_memory(torch.device("cuda", torch.cuda.current_device())))


class HostMemory:
    """Addresses of the CPU. See `MappedMemory`."""

    def __init__(self, size_bytes: int, gpu: VirtualMemory | None = None) -> None:
        """Reserves them. Memory that is mapped there is registered with a GPU, if it is given."""
        try:
            self._range = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE)
        except OSError as error:
            raise _cannot_map(error.errno or 0) from None
        self.buffer = torch.frombuffer(self._range, dtype=torch.int8)  # keeps the range
        self.is_mapped = False
        self._gpu = gpu
        self._registered: list[int] = []
        """Addresses of the registered parts."""

    def map(self, descriptor: int) -> None:
        """See `MappedMemory`."""
        found_bytes, size_bytes = os.fstat(descriptor).st_size, self.buffer.numel()
        if found_bytes < size_bytes:
            message = f"the lender's memory has {found_bytes} bytes, and the engine needs {size_bytes}"
            raise WrongStateError("DESCRIPTOR_TOO_SMALL", message, field="size_bytes")
        self._replace(mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor)
        self._range.madvise(mmap.MADV_DONTFORK)  # a child process would write after the lender has seen this one exit
        self.is_mapped = True
        if self._gpu:
            self._register(self._gpu)

    def unmap(self) -> None:
        """See `MappedMemory`. An access to the buffer then ends the process."""
        self.unregister()
        self._replace(0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.is_mapped = False

    def unregister(self) -> None:
        """Ends the registration with the GPU, which would use the old memory at these addresses. Repeats do nothing."""
        while self._gpu and self._registered:
            self._gpu.unregister(self._registered.pop())

    def _register(self, gpu: VirtualMemory) -> None:
        """Registers the memory. Without it copies are slower, and as correct."""
        start, size_bytes = self.buffer.data_ptr(), self.buffer.numel()
        try:
            for offset in range(0, size_bytes, _REGISTERED_BYTES):
                gpu.register(start + offset, min(_REGISTERED_BYTES, size_bytes - offset))
                self._registered.append(start + offset)
        except CudaError as error:
            fields = {"bytes": size_bytes - offset, "error": str(error)}
            _log.warning("host memory not registered", extra=fields)

    def _replace(self, protection: int, flags: int, descriptor: int) -> None:
        address = self.buffer.data_ptr()
        if _mmap(address, self.buffer.numel(), protection, flags | _MAP_FIXED, descriptor, 0) != address:
            raise _cannot_map(ctypes.get_errno())


def _cannot_map(number: int) -> WrongStateError:
    return WrongStateError("CANNOT_MAP", f"the lender's memory cannot be mapped: {os.strerror(number)}")
