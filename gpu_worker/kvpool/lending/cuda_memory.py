"""Memory of a CUDA device that several processes map, by CUDA's virtual memory management.

The memory exists while a process maps it or holds its file descriptor. A process without a device holds the descriptor,
so that the next process of the rank finds the memory again; see `memory_holder`. See "Virtual Memory Management" in
NVIDIA's CUDA Driver API.
"""

import contextlib
import logging
import os
import subprocess
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kvpool.core.errors import InvalidArgumentError, WrongStateError
from kvpool.core.ranks.messages import Registration
from kvpool.lending.memory_file import open_all
from kvpool.lending.memory_folder import HOST_FILE, MemoryFolder
from kvpool.lending.memory_holder import MemoryHolder
from kvpool.wire.file_ids import file_id

_REGISTERED_FOR_ALL_CONTEXTS: Final = 1
"""CU_MEMHOSTREGISTER_PORTABLE."""
_log = logging.getLogger("kvpool.worker")


class CudaError(RuntimeError):
    """A call of the driver has failed."""


class CudaMemoryFolder(MemoryFolder):
    """The folder of a rank whose memory is on a device, and the process that holds the memory. See `MemoryFolder`."""

    def __init__(self, pool: str, rank: int, root: Path, device: torch.device) -> None:
        """Creates and locks the folder.

        Raises:
            InvalidArgumentError: cuda-bindings are not installed.
            WrongStateError: The process uses the device through NVIDIA MPS, or as `MemoryFolder` raises.
        """
        self._vmm = open_virtual_memory(device)
        self._device = device
        super().__init__(pool, rank, root)
        self._holder = MemoryHolder.connect(self.path)
        self._held = self._holder.descriptor if self._holder else -1
        self._memory_id = self._holder.name if self._holder else ""

    def close(self) -> None:
        """Releases the lock. The memory stays held."""
        self._close_held()
        if self._holder:
            self._holder.close()
        super().close()

    def create(self, size_bytes: int, host_bytes: int = 0) -> tuple[int, ...]:
        """See `MemoryFolder`. Host memory alone is a file."""
        self._number += 1
        try:
            descriptor = self._vmm.allocate(size_bytes)
        except CudaError as error:
            raise MemoryError(f"{size_bytes} bytes do not fit {self._device}: {error}") from error
        try:
            memory = CudaMemory(size_bytes, self._device)
            memory.map(descriptor)
            memory.buffer.zero_()
            torch.cuda.synchronize(self._device)
            host = self._create_files({HOST_FILE: host_bytes})
        except BaseException:
            os.close(descriptor)
            raise
        self._memory_id = uuid.uuid4().hex
        self._hold(descriptor)
        return descriptor, *host

    def open(self) -> tuple[int, ...]:
        """Opens the memory of an earlier process; returns its descriptors as `create` does.

        Raises:
            OSError: It is not held.
            WrongStateError: It is on another device.
        """
        if self._held < 0:
            raise FileNotFoundError(f"no process holds the memory of {self.path}")
        try:
            self._vmm.check(self._held)
        except CudaError as error:
            raise OSError(str(error)) from error
        host = open_all(self._host_files())
        return os.dup(self._held), *host

    def memory_id(self, descriptors: Sequence[int]) -> str:
        """Identifies the memory, also across processes of the rank: a random value, for host memory too."""
        del descriptors  # another export of the same memory is another file
        return self._memory_id

    def read_rank(self) -> Registration | None:
        """See `MemoryFolder`. None also if no process holds the memory."""
        return super().read_rank() if self._held >= 0 else None

    def _identity(self) -> str:
        """See `MemoryFolder`."""
        return " ".join((self._memory_id, *map(file_id, self._host_files())))

    def delete(self) -> None:
        """See `MemoryFolder`."""
        super().delete()
        self._close_held()
        if self._holder:
            self._holder.drop()
            self._holder = None

    def _hold(self, descriptor: int) -> None:
        """Has a process hold the memory. Without it the memory ends with this process."""
        try:
            self._make_again()
            self._holder = self._holder or MemoryHolder.start(self.path)
            self._holder.hold(self._memory_id, descriptor)
        except (OSError, subprocess.SubprocessError) as error:
            self._holder = None
            _log.warning("memory not held", extra={**self._rank_fields, "error": str(error)})

    def _close_held(self) -> None:
        if self._held >= 0:
            os.close(self._held)
        self._held = -1


class CudaMemory:
    """Addresses of a device. See `MappedMemory`."""

    buffer: torch.Tensor

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """Reserves them.

        Args:
            size_bytes: Size of the memory, at least 1.
            device: The device that the memory is on, as this process numbers it.

        Raises:
            InvalidArgumentError: cuda-bindings are not installed.
            WrongStateError: No range is free, or the process uses the device through NVIDIA MPS.
        """
        self._vmm = open_virtual_memory(device)
        self._device = device
        with _can_map():
            self._addresses = self._vmm.reserve(size_bytes)
        self._owner = _Owner(self._addresses.start, size_bytes)
        # Tensors keep the owner, and not this object. The exit of the process unmaps the memory.
        weakref.finalize(self._owner, _free, self._vmm, self._addresses, device).atexit = False

    @property
    def is_mapped(self) -> bool:
        """See `MappedMemory`."""
        return self._addresses.are_mapped

    def map(self, descriptor: int) -> None:
        """See `MappedMemory`."""
        with _can_map():
            self._vmm.map(descriptor, self._addresses)
        self.buffer = torch.as_tensor(self._owner, device=self._device)  # which asks the driver about the address

    def unmap(self) -> None:
        """See `MappedMemory`."""
        torch.cuda.synchronize(self._device)
        self._vmm.unmap(self._addresses)


@contextlib.contextmanager
def _can_map() -> Iterator[None]:
    try:
        yield
    except CudaError as error:
        raise WrongStateError("CANNOT_MAP", f"the lender's memory cannot be mapped: {error}") from error


@dataclass(slots=True)
class Addresses:
    """A reserved range of addresses.

    Attributes:
        start: The first one.
        size_bytes: Size of the range.
        are_mapped: Whether memory is mapped there.
    """

    start: int
    size_bytes: int
    are_mapped: bool = False


class VirtualMemory:
    """Allocation, export and mapping of memory on one device; each call frees what it took when it fails."""

    def __init__(self, driver: Any, index: int) -> None:  # noqa: ANN401 - the module has no types
        """Args: driver: `cuda.bindings.driver`. index: Number of the device."""
        self._driver: Final = driver
        self._index: Final = index
        self._kind: Final = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def uses_mps(self) -> bool:
        """Says whether this process uses the device through NVIDIA MPS; raises CudaError if the driver cannot."""
        attribute = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        return bool(self._call("cuDeviceGetAttribute", attribute, self._call("cuDeviceGet", self._index)))

    def allocate(self, size_bytes: int) -> int:
        """Allocates memory, which is not zeroed. Returns a descriptor of it, which the caller closes.

        Raises:
            CudaError: It does not fit, or the device cannot share memory.
        """
        properties = self._properties()
        handle = self._call("cuMemCreate", self._padded(size_bytes, properties), properties, 0)
        try:
            return int(self._call("cuMemExportToShareableHandle", handle, self._kind, 0))
        finally:
            self._call("cuMemRelease", handle)  # the descriptor keeps the memory

    def reserve(self, size_bytes: int) -> Addresses:
        """Reserves addresses without memory. Raises CudaError if the driver cannot."""
        padded = self._padded(size_bytes, self._properties())
        return Addresses(int(self._call("cuMemAddressReserve", padded, 0, 0, 0)), padded)

    def map(self, descriptor: int, addresses: Addresses) -> None:
        """Maps memory for reads and writes of the device.

        Raises:
            WrongStateError: The memory is on another device.
            CudaError: It is smaller than the range, or the driver cannot map it.
        """
        with self._imported(descriptor) as handle:
            self._call("cuMemMap", addresses.start, addresses.size_bytes, 0, handle, 0)
            addresses.are_mapped = True
            try:
                self._call("cuMemSetAccess", addresses.start, addresses.size_bytes, [self._access()], 1)
            except CudaError:
                self.unmap(addresses)
                raise

    def check(self, descriptor: int) -> None:
        """Checks that memory could be mapped; raises as `map`."""
        with self._imported(descriptor):
            pass

    def unmap(self, addresses: Addresses) -> None:
        """Ends a mapping, if there is one. The device must not use it any more."""
        if addresses.are_mapped:
            self._call("cuMemUnmap", addresses.start, addresses.size_bytes)
            addresses.are_mapped = False

    def free(self, addresses: Addresses) -> None:
        """Ends a mapping, and the reservation of its addresses."""
        self.unmap(addresses)
        self._call("cuMemAddressFree", addresses.start, addresses.size_bytes)

    def register(self, address: int, size_bytes: int) -> None:
        """Has the device read and write a range of host memory by DMA; raises CudaError if the driver cannot.

        An error of the driver stays with this call. One of CUDA's runtime would surface again in a later call of torch.
        """
        self._call("cuMemHostRegister", address, size_bytes, _REGISTERED_FOR_ALL_CONTEXTS)

    def unregister(self, address: int) -> None:
        """Ends the registration of the range at an address, when the device does not use it any more."""
        torch.cuda.synchronize(self._index)
        self._call("cuMemHostUnregister", address)

    @contextlib.contextmanager
    def _imported(self, descriptor: int) -> Iterator[Any]:
        """Imports memory of this device; yields its handle. What is mapped then keeps the memory."""
        handle = self._call("cuMemImportFromShareableHandle", descriptor, self._kind)
        try:
            properties = self._call("cuMemGetAllocationPropertiesFromHandle", handle)
            if properties.location.id != self._index:
                message = (
                    f"the lender's memory is on cuda:{properties.location.id}, and the engine on cuda:{self._index}"
                )
                raise WrongStateError("OTHER_DEVICE", message, field="device")
            yield handle
        finally:
            self._call("cuMemRelease", handle)

    def _properties(self) -> Any:  # noqa: ANN401 - a type of the driver
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._index
        properties.requestedHandleTypes = self._kind
        return properties

    def _access(self) -> Any:  # noqa: ANN401 - a type of the driver
        access = self._driver.CUmemAccessDesc()
        access.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._index
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _padded(self, size_bytes: int, properties: Any) -> int:  # noqa: ANN401 - a type of the driver
        flags = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(self._call("cuMemGetAllocationGranularity", properties, flags))
        return -(-size_bytes // granularity) * granularity

    def _call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - what the driver returns
        error, *values = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{name}: {getattr(error, 'name', error)}")
        return values[0] if values else None


class _Owner:
    """Memory as an array that torch can use; torch keeps it as long as a tensor uses the memory."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|i1",
            "data": (address, False),
            "version": 3,
        }


def _free(vmm: VirtualMemory, addresses: Addresses, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    vmm.free(addresses)


def open_virtual_memory(device: torch.device) -> VirtualMemory:
    """Opens the memory of a device.

    Refuses NVIDIA MPS: its server owns the contexts, so that kernels of a process may write after its exit.
    """
    vmm = VirtualMemory(_driver(), device.index or 0)
    torch.cuda.init()  # type: ignore[no-untyped-call]  # the driver answers no call before
    try:
        uses_mps = vmm.uses_mps()
    except CudaError as error:
        message = f"the driver does not say whether NVIDIA MPS is used, under which memory is not shared: {error}"
        raise WrongStateError("MPS", message, field="device") from error
    if uses_mps:
        message = (
            f"memory on {device} is not shared under NVIDIA MPS, where kernels of a killed process may write after its"
            " exit: stop nvidia-cuda-mps-control, or set CUDA_MPS_PIPE_DIRECTORY to an empty folder"
        )
        raise WrongStateError("MPS", message, field="device")
    return vmm


def _driver() -> Any:  # noqa: ANN401 - a module without types
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - optional
    except ModuleNotFoundError as error:
        message = "memory on CUDA devices is shared through cuda-bindings: install kvpool with its extra 'cuda'"
        raise InvalidArgumentError("device", message, reason="NO_CUDA_BINDINGS") from error
    return driver
