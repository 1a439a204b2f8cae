"""Memory on the CPU that is unmapped and mapped again."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvpool.core.errors import WrongStateError
from kvpool.lending import mapped_memory
from kvpool.lending.cuda_memory import CudaError, VirtualMemory
from kvpool.lending.mapped_memory import HostMemory, MappedMemory, reserve_host_memory, reserve_memory

SIZE_BYTES = 3 * 2**20 + 100


class Gpu(VirtualMemory):
    """A GPU that registers at most `most` ranges of host memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.registered: dict[int, int] = {}
        self.unregistered: list[list[str]] = []
        self.memory: HostMemory | None = None

    def register(self, address: int, size_bytes: int) -> None:
        if len(self.registered) == self._most:
            raise CudaError("cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY")
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        assert self.memory
        self.unregistered.append(mapped_there(self.memory))
        del self.registered[address]


@pytest.fixture
def descriptor() -> Iterator[int]:
    number = os.memfd_create("memory")
    os.truncate(number, SIZE_BYTES)
    yield number
    os.close(number)


@pytest.fixture
def memory(descriptor: int) -> MappedMemory:
    memory = reserve_memory("cpu", SIZE_BYTES)
    assert not memory.is_mapped
    memory.map(descriptor)
    return memory


def mapped_there(memory: MappedMemory) -> list[str]:
    """Permissions of what is mapped at the buffer's addresses."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        first, end = (int(each, 16) for each in addresses.split("-"))
        if first < memory.buffer.data_ptr() + SIZE_BYTES and end > memory.buffer.data_ptr():
            found.append(permissions)
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_comes_back_at_its_addresses_with_what_others_wrote(descriptor: int, memory: MappedMemory) -> None:
    view = memory.buffer[8:16].view(torch.int32)
    view[0] = 5
    for value in (6, 7):
        memory.unmap()
        assert not memory.is_mapped
        assert mapped_there(memory) == ["---p"], "the addresses stay reserved"
        os.pwrite(descriptor, value.to_bytes(4, "little"), 12)
        memory.map(descriptor)
        assert memory.is_mapped
        assert mapped_there(memory) == ["rw-s"]
        assert view.tolist() == [5, value]
    view[1] = 9
    assert os.pread(descriptor, 4, 12) == b"\t\0\0\0"


def test_unmapped_memory_is_not_resident(memory: MappedMemory) -> None:
    memory.buffer.fill_(1)
    before = resident_bytes()
    memory.unmap()
    assert before - resident_bytes() > SIZE_BYTES // 2


@pytest.mark.parametrize("is_mapped", [True, False])
def test_the_addresses_are_free_when_the_last_view_is_gone(memory: MappedMemory, *, is_mapped: bool) -> None:
    buffer = memory.buffer
    if not is_mapped:
        memory.unmap()
    assert mapped_there(memory)
    address = buffer.data_ptr()
    del buffer, memory.buffer, memory._range  # type: ignore[attr-defined]
    lines = Path("/proc/self/maps").read_text().splitlines()
    starts = {int(line.partition("-")[0], 16) for line in lines}
    assert address not in starts


def test_memory_that_the_kernel_does_not_map_is_refused(descriptor: int, memory: MappedMemory) -> None:
    memory.unmap()
    read_only = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    with pytest.raises(WrongStateError, match="cannot be mapped: Permission denied") as caught:
        memory.map(read_only)
    os.close(read_only)
    assert caught.value.reason == "CANNOT_MAP"
    assert not memory.is_mapped


@pytest.mark.parametrize("most", [4, 2])
def test_a_gpu_registers_host_memory_in_parts_while_it_is_mapped(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    monkeypatch.setattr(mapped_memory, "_REGISTERED_BYTES", 2**20)
    gpu = Gpu(most)
    memory = gpu.memory = HostMemory(SIZE_BYTES, gpu)
    start = memory.buffer.data_ptr()
    parts = {start: 2**20, start + 2**20: 2**20, start + 2 * 2**20: 2**20, start + 3 * 2**20: 100}
    for _ in range(2):
        caplog.clear()
        memory.map(descriptor)
        assert gpu.registered == dict([*parts.items()][:most])
        warned = [(record.message, vars(record)["bytes"]) for record in caplog.records]
        assert warned == ([] if most == 4 else [("host memory not registered", SIZE_BYTES - 2 * 2**20)])
        memory.buffer.fill_(1)
        memory.unmap()
        assert not gpu.registered
        assert set(map(tuple, gpu.unregistered)) == {("rw-s",)}, "before it is unmapped"
    memory.map(descriptor)
    memory.unregister()
    assert (memory.is_mapped, gpu.registered) == (True, {})


def test_host_memory_beside_memory_of_a_gpu_is_registered_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[torch.device] = []
    monkeypatch.setattr(mapped_memory, "open_virtual_memory", opened.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert reserve_host_memory("cpu", 4096).buffer.device == torch.device("cpu")
    assert opened == []
    reserve_host_memory("cuda:5", 4096)  # as the lender numbers it
    assert opened == [torch.device("cuda:2")]


_ACCESS = """
import os
from kvpool.lending.mapped_memory import reserve_memory
descriptor = os.memfd_create("memory")
os.truncate(descriptor, 4096)
memory = reserve_memory("cpu", 4096)
memory.map(descriptor)
memory.unmap()
memory.buffer[0] = 1
"""

_FORK = """
import os, sys
from kvpool.lending.mapped_memory import reserve_memory
descriptor = os.memfd_create("memory")
os.truncate(descriptor, 4096)
memory = reserve_memory("cpu", 4096)
memory.map(descriptor)
memory.unmap()
memory.map(descriptor)
child = os.fork()
if not child:
    memory.buffer[0] = 1
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -11)
"""


@pytest.mark.slow  # processes that import torch
def test_an_access_to_unmapped_memory_ends_the_process() -> None:
    assert subprocess.run([sys.executable, "-c", _ACCESS], check=False).returncode == -signal.SIGSEGV


@pytest.mark.slow  # processes that import torch
def test_a_child_process_does_not_get_memory_that_was_mapped_again() -> None:
    subprocess.run([sys.executable, "-c", _FORK], check=True)
