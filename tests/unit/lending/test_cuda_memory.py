"""Memory of CUDA devices: on a device where torch finds one, and the calls of the driver everywhere."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpool.core.errors import ExhaustedError, InvalidArgumentError, KvpoolError, WrongStateError
from kvpool.core.ranks.messages import Rank, RankGroupOptions, Registration
from kvpool.lending import cuda_memory, memory_folder
from kvpool.lending.cuda_memory import Addresses, CudaError, CudaMemory, CudaMemoryFolder, VirtualMemory
from kvpool.lending.mapped_memory import reserve_memory
from kvpool.lending.memory_file import close_all
from kvpool.lending.memory_holder import MemoryHolder
from support.lending import LAYER

GRANULARITY = 2 * 2**20
BOOT_ID = "boot-of-this-rank"
DEVICE = torch.device("cuda:0")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")


class Driver:
    """A driver that counts what is held, and fails at one call."""

    def __init__(self, fails: str = "", device: int = 0) -> None:
        self.fails = fails
        self.device = device
        self.mps = 0
        self.exported = 7
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.held = {"handle": 0, "range": 0, "mapping": 0}
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=0)
        for name in ("CUmemAllocationProp", "CUmemAccessDesc"):
            setattr(self, name, lambda: SimpleNamespace(location=SimpleNamespace(type=None, id=None)))
        constants = SimpleNamespace(
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1,
            CU_MEM_ALLOCATION_TYPE_PINNED=1,
            CU_MEM_LOCATION_TYPE_DEVICE=1,
            CU_MEM_ALLOC_GRANULARITY_MINIMUM=0,
            CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3,
        )
        for name in ("AllocationHandleType", "AllocationType", "LocationType", "AllocationGranularity_flags"):
            setattr(self, f"CUmem{name}", constants)
        self.CUmemAccess_flags = constants
        self.CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MPS_ENABLED=133)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls.append((name, arguments))
        if name == self.fails:
            return (SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY"), None)
        changes = {
            "cuMemCreate": ("handle", 1), "cuMemImportFromShareableHandle": ("handle", 1),
            "cuMemRelease": ("handle", -1),
            "cuMemAddressReserve": ("range", 1), "cuMemAddressFree": ("range", -1),
            "cuMemMap": ("mapping", 1), "cuMemUnmap": ("mapping", -1),
        }  # fmt: skip
        if name in changes:
            what, change = changes[name]
            self.held[what] += change
        properties = SimpleNamespace(location=SimpleNamespace(id=self.device))
        answers = {
            "cuDeviceGetAttribute": self.mps,
            "cuMemGetAllocationGranularity": GRANULARITY,
            "cuMemGetAllocationPropertiesFromHandle": properties,
            "cuMemAddressReserve": 2**40,
            "cuMemExportToShareableHandle": self.exported,
        }
        return (0, answers.get(name, 7))

    def arguments(self, name: str) -> tuple[Any, ...]:
        """The arguments of the only call of a function."""
        (found,) = [arguments for called, arguments in self.calls if called == name]
        return found


def test_memory_is_allocated_in_whole_granules_and_kept_by_its_descriptor_alone() -> None:
    driver = Driver()
    assert VirtualMemory(driver, 3).allocate(GRANULARITY + 1) == 7
    size_bytes, properties, _ = driver.arguments("cuMemCreate")
    assert (size_bytes, properties.location.id, properties.requestedHandleTypes) == (2 * GRANULARITY, 3, 1)
    assert driver.held == {"handle": 0, "range": 0, "mapping": 0}


def test_addresses_stay_reserved_while_memory_is_mapped_there_and_unmapped() -> None:
    driver = Driver()
    memory = VirtualMemory(driver, 0)
    addresses = memory.reserve(100)
    assert addresses == Addresses(2**40, GRANULARITY)
    assert driver.held == {"handle": 0, "range": 1, "mapping": 0}
    memory.map(5, addresses)
    assert driver.arguments("cuMemImportFromShareableHandle") == (5, 1)
    ((access,), count) = driver.arguments("cuMemSetAccess")[2:]
    assert (access.location.id, access.flags, count) == (0, 3, 1)
    assert driver.held == {"handle": 0, "range": 1, "mapping": 1}
    for _ in range(2):
        memory.unmap(addresses)
        assert driver.held == {"handle": 0, "range": 1, "mapping": 0}
    memory.map(6, addresses)
    assert [arguments[:2] for name, arguments in driver.calls if name == "cuMemMap"] == [(2**40, GRANULARITY)] * 2
    memory.free(addresses)
    assert driver.held == {"handle": 0, "range": 0, "mapping": 0}


def test_host_memory_is_registered_for_all_contexts_until_the_device_has_used_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    gpu = VirtualMemory(driver, 3)
    gpu.register(2**20, 4096)
    assert driver.arguments("cuMemHostRegister") == (2**20, 4096, 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: driver.calls.append(("synchronize", (index,))))
    gpu.unregister(2**20)
    assert driver.calls[1:] == [("synchronize", (3,)), ("cuMemHostUnregister", (2**20,))]
    driver.fails = "cuMemHostRegister"
    with pytest.raises(CudaError, match="cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"):
        gpu.register(2**20, 4096)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_addresses_are_free_when_the_memory_and_its_tensors_are_gone(
    monkeypatch: pytest.MonkeyPatch, *, is_mapped: bool
) -> None:
    driver = Driver()
    monkeypatch.setattr(cuda_memory, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch, "as_tensor", lambda owner, device: (owner, device))  # a tensor keeps its owner
    memory = CudaMemory(100, DEVICE)
    memory.map(5)
    memory.unmap()
    assert not memory.is_mapped
    if is_mapped:
        memory.map(5)
    tensor = memory.buffer
    del memory
    assert driver.held == {"handle": 0, "range": 1, "mapping": int(is_mapped)}
    del tensor
    assert driver.held == {"handle": 0, "range": 0, "mapping": 0}


@pytest.mark.parametrize("fails", ["cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle"])
def test_a_failed_allocation_holds_nothing(fails: str) -> None:
    driver = Driver(fails)
    with pytest.raises(CudaError, match=f"{fails}: CUDA_ERROR_OUT_OF_MEMORY"):
        VirtualMemory(driver, 0).allocate(100)
    assert driver.held == {"handle": 0, "range": 0, "mapping": 0}


@pytest.mark.parametrize(
    "fails",
    [
        "cuMemImportFromShareableHandle",
        "cuMemGetAllocationPropertiesFromHandle",
        "cuMemMap",
        "cuMemSetAccess",
    ],
)
def test_a_failed_mapping_leaves_the_addresses_as_they_were(fails: str) -> None:
    driver = Driver(fails)
    memory = VirtualMemory(driver, 0)
    addresses = memory.reserve(100)
    with pytest.raises(CudaError, match=fails):
        memory.map(5, addresses)
    assert addresses == Addresses(2**40, GRANULARITY)
    assert driver.held == {"handle": 0, "range": 1, "mapping": 0}


@pytest.mark.parametrize("fails", ["cuMemGetAllocationGranularity", "cuMemAddressReserve"])
def test_a_failed_reservation_holds_nothing(fails: str) -> None:
    driver = Driver(fails)
    with pytest.raises(CudaError, match=fails):
        VirtualMemory(driver, 0).reserve(100)
    assert driver.held == {"handle": 0, "range": 0, "mapping": 0}


def test_memory_of_another_device_is_refused_and_holds_nothing() -> None:
    driver = Driver(device=1)
    memory = VirtualMemory(driver, 0)
    addresses = memory.reserve(100)
    with pytest.raises(WrongStateError, match="on cuda:1, and the engine on cuda:0") as caught:
        memory.map(5, addresses)
    assert caught.value.reason == "OTHER_DEVICE"
    assert driver.held == {"handle": 0, "range": 1, "mapping": 0}


@without_cuda
def test_memory_of_a_device_is_refused_where_there_is_none() -> None:
    with pytest.raises(WrongStateError, match="torch finds no CUDA device"):
        reserve_memory("cuda:0", 100)


def test_missing_bindings_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(InvalidArgumentError, match="install kvpool with its extra 'cuda'") as caught:
        CudaMemoryFolder("m", 0, tmp_path, torch.device("cuda:0"))
    assert caught.value.reason == "NO_CUDA_BINDINGS"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A device without memory of its own: what it exports is a file."""
    driver = Driver()
    monkeypatch.setattr(cuda_memory, "_driver", lambda: driver)
    memory = SimpleNamespace(buffer=torch.empty(0), map=lambda _: None)
    monkeypatch.setattr(cuda_memory, "CudaMemory", lambda *_: memory)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return driver


def leave_memory(root: Path, driver: Driver, host_bytes: int = 0) -> str:
    """Allocates memory that holds "prefixes", and leaves it as a killed process does."""
    driver.exported = os.memfd_create("memory")
    os.write(driver.exported, b"prefixes")
    registration = Registration(Rank(0), 1, BOOT_ID, RankGroupOptions(64), {"layer.0": LAYER}, 2**20)
    with CudaMemoryFolder("m", 0, root, DEVICE) as folder:
        descriptors = folder.create(100, host_bytes)
        folder.write_rank("m", registration)
        memory_id = folder.memory_id(descriptors)
        close_all(descriptors)
    return memory_id


def test_the_next_process_of_a_rank_finds_the_memory(tmp_path: Path, driver: Driver) -> None:
    memory_id = leave_memory(tmp_path, driver)
    with CudaMemoryFolder("m", 0, tmp_path, DEVICE) as folder:
        past = folder.read_rank()
        assert past
        assert past.boot_id == BOOT_ID
        (descriptor,) = folder.open()
        assert (folder.memory_id([descriptor]), os.pread(descriptor, 100, 0)) == (memory_id, b"prefixes")
        os.close(descriptor)
        folder.delete()
    with CudaMemoryFolder("m", 0, tmp_path, DEVICE) as folder:
        assert folder.read_rank() is None
        with pytest.raises(FileNotFoundError, match="no process holds the memory"):
            folder.open()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_host_memory_is_a_file_that_is_found_with_the_memory(
    tmp_path: Path, driver: Driver, *, is_replaced: bool
) -> None:
    leave_memory(tmp_path, driver, host_bytes=8192)
    path = tmp_path / f"kvpool-{os.getuid()}" / "m" / "0" / "host-1"
    if is_replaced:
        Path(shutil.copy2(path, tmp_path / "copy")).rename(path)
    with CudaMemoryFolder("m", 0, tmp_path, DEVICE) as folder:
        assert (folder.read_rank() is None) == is_replaced
        descriptors = folder.open()
        assert [os.fstat(number).st_size for number in descriptors] == [8, 8192]
        close_all(descriptors)
        folder.delete()
        assert not path.exists()


def test_memory_that_does_not_fit_beside_its_host_memory_is_freed(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.exported = os.memfd_create("memory")
    monkeypatch.setattr(memory_folder, "free_bytes", lambda _: 0)
    with CudaMemoryFolder("m", 0, tmp_path, DEVICE) as folder:
        with pytest.raises(ExhaustedError, match="8192 bytes do not fit") as caught:
            folder.create(100, 8192)
        assert caught.value.field == "host_memory"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(driver.exported)
        with pytest.raises(FileNotFoundError, match="no process holds the memory"):
            folder.open()


def test_memory_of_another_device_is_not_continued_with(tmp_path: Path, driver: Driver) -> None:
    leave_memory(tmp_path, driver)
    driver.device = 1
    with CudaMemoryFolder("m", 0, tmp_path, DEVICE) as folder:
        with pytest.raises(WrongStateError, match="on cuda:1"):
            folder.open()
        driver.fails = "cuMemImportFromShareableHandle"
        with pytest.raises(OSError, match="cuMemImport"):
            folder.open()
        folder.delete()


def test_what_describes_lost_memory_is_not_used(tmp_path: Path, driver: Driver) -> None:
    leave_memory(tmp_path, driver)
    holder = MemoryHolder.connect(tmp_path / f"kvpool-{os.getuid()}" / "m" / "0")
    assert holder
    os.close(holder.descriptor)
    holder.drop()
    with CudaMemoryFolder("m", 0, tmp_path, DEVICE) as folder:
        assert folder.read_rank() is None


def test_without_a_holder_memory_is_lent_as_well(
    tmp_path: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nothing")
    leave_memory(tmp_path, driver)
    assert "memory not held" in caplog.text


def test_memory_is_neither_lent_nor_mapped_under_mps(tmp_path: Path, driver: Driver) -> None:
    memory_id = leave_memory(tmp_path, driver)
    driver.mps = 1
    before = len(driver.calls)
    with pytest.raises(WrongStateError, match="cuda:0 is not shared under NVIDIA MPS") as caught:
        CudaMemoryFolder("m", 0, tmp_path, DEVICE)
    assert (caught.value.reason, caught.value.field) == ("MPS", "device")
    with pytest.raises(WrongStateError, match="stop nvidia-cuda-mps-control"):
        CudaMemory(100, DEVICE)
    driver.mps, driver.fails = 0, "cuDeviceGetAttribute"
    with pytest.raises(WrongStateError, match="does not say whether NVIDIA MPS is used"):
        CudaMemory(100, DEVICE)
    assert {name for name, _ in driver.calls[before:]} == {"cuDeviceGet", "cuDeviceGetAttribute"}
    driver.fails = ""
    with CudaMemoryFolder("m", 0, tmp_path, DEVICE) as folder:
        (descriptor,) = folder.open()
        assert (folder.memory_id([descriptor]), os.pread(descriptor, 100, 0)) == (memory_id, b"prefixes")
        os.close(descriptor)
        folder.delete()


# On a device.


def mapped(descriptor: int, size_bytes: int, device: torch.device) -> CudaMemory:
    memory = CudaMemory(size_bytes, device)
    memory.map(descriptor)
    return memory


_WRITER = """
import sys, torch
from kvpool.lending.cuda_memory import CudaMemory
mapped = CudaMemory(int(sys.argv[2]), torch.device("cuda:0"))
mapped.map(int(sys.argv[1]))
memory = mapped.buffer
del mapped
assert int(memory[0]) == 7, "what the other process wrote"
memory[-1] = 9
torch.cuda.synchronize()
print("written", flush=True)
sys.stdin.read()
"""


@needs_cuda
def test_what_one_process_writes_another_reads_and_a_kill_loses_nothing(tmp_path: Path) -> None:
    device, size_bytes = torch.device("cuda:0"), 3 * GRANULARITY + 5
    with CudaMemoryFolder("m", 0, tmp_path, device) as folder:
        (descriptor,) = folder.create(size_bytes)
        memory = mapped(descriptor, size_bytes, device).buffer
        assert (memory.dtype, memory.shape, memory.device) == (torch.int8, (size_bytes,), device)
        assert not memory.any(), "fresh memory is zeroed"
        memory[0] = 7
        torch.cuda.synchronize()
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - the parameter has no name
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(descriptor), str(size_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor],
            text=True,
        )
        assert process.stdout
        assert process.stdout.readline() == "written\n"
        assert int(memory[-1]) == 9
        process.send_signal(signal.SIGKILL)
        process.communicate()
        os.close(descriptor)
        assert (int(memory[0]), int(memory[-1])) == (7, 9), "the mapping keeps the memory"
        folder.delete()


@needs_cuda
def test_a_descriptor_that_is_too_small_is_refused(tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    with CudaMemoryFolder("m", 0, tmp_path, device) as folder:
        (descriptor,) = folder.create(GRANULARITY)
        with pytest.raises(KvpoolError):
            mapped(descriptor, 2 * GRANULARITY, device)
        os.close(descriptor)
        folder.delete()


@needs_cuda
def test_memory_comes_back_at_its_addresses_for_views_and_graphs(tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    with CudaMemoryFolder("m", 0, tmp_path, device) as folder:
        (descriptor,) = folder.create(GRANULARITY)
        memory, other = (mapped(descriptor, GRANULARITY, device) for _ in range(2))
        view, graph = memory.buffer.view(torch.int32)[:4], torch.cuda.CUDAGraph()
        view.fill_(7)
        with torch.cuda.graph(graph):
            view.add_(1)
        for i in range(3):
            memory.unmap()
            assert not memory.is_mapped
            taken = torch.empty(4 * GRANULARITY, dtype=torch.int8, device=device)
            other.buffer.view(torch.int32)[0] += 10
            memory.map(descriptor)
            graph.replay()
            assert view.tolist() == [7 + 11 * (i + 1), *[8 + i] * 3]
            del taken
        os.close(descriptor)
        folder.delete()
