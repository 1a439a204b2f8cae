"""Devices found and measured; a GPU that is not there is played, one that is there is used."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.gpu_worker.device import (
    available_bytes,
    check_host_memory,
    describe_device,
    device_memory,
    machine_memory_bytes,
    open_device,
)
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.wire.log_fields import format_bytes
from support.torch import on_each_device

GIB = 2**30
CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """Two GPUs; what is free of them, and their size, in bytes, for the test to set."""
    memory = {0: (100 * GIB, 140 * GIB), 1: (80 * GIB, 80 * GIB)}

    def properties(device: torch.device | int) -> SimpleNamespace:
        index = device if isinstance(device, int) else device.index
        return SimpleNamespace(name=f"NVIDIA Fake{index}", total_memory=memory[index][1])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(memory))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory[device.index])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return memory


@on_each_device
def test_a_device_is_found_by_its_name(device: torch.device) -> None:
    assert open_device(str(device)) == device
    assert describe_device(device).startswith(str(device))


def test_cuda_alone_is_the_current_device(gpus: dict[int, tuple[int, int]]) -> None:
    assert open_device("cuda") == torch.device("cuda", 1)
    assert describe_device(torch.device("cuda", 1)) == "cuda:1 NVIDIA Fake1"
    assert len(gpus) == 2


@pytest.mark.parametrize("name", ["cuda:2", "cpu:1", "gpu", "", "meta", "cuda:-1", "x" * 5000])
def test_a_missing_device_is_refused_and_the_available_ones_are_listed(
    gpus: dict[int, tuple[int, int]], name: str
) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        open_device(name)
    available = "available: cpu, cuda:0 (NVIDIA Fake0, 140.0 GiB), cuda:1 (NVIDIA Fake1, 80.0 GiB)"
    assert raised.value.message == f"{name[:64]!r} does not exist; {available}"
    assert gpus


def test_without_a_gpu_only_the_cpu_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match=r"'cuda:0' does not exist; available: cpu$"):
        open_device("cuda:0")


def settings(memory_bytes: int | None, share: float = 0.9, reserve_bytes: int = GIB) -> WorkerSettings:
    return WorkerSettings(
        "unix:/unused",
        "m",
        0,
        1,
        RankGroupOptions(1024),
        memory_bytes=memory_bytes,
        gpu_memory_utilization=share,
        reserve_bytes=reserve_bytes,
    )


def measured(memory_bytes: int | None = None, share: float = 0.9, reserve_bytes: int = GIB // 4) -> int:
    return available_bytes(CUDA, settings(memory_bytes, share, reserve_bytes))


def test_a_share_includes_memory_in_use(gpus: dict[int, tuple[int, int]]) -> None:
    assert measured() == int(0.9 * 140 * GIB) - 40 * GIB - GIB // 4
    gpus[0] = (140 * GIB, 140 * GIB)
    assert measured(share=1.0, reserve_bytes=0) == 140 * GIB


def test_an_exhausted_share_is_refused(gpus: dict[int, tuple[int, int]]) -> None:
    gpus[0] = (10 * GIB, 140 * GIB)
    expected = r"0\.9 of 140\.0 GiB on cuda:0 leaves nothing: 130\.0 GiB are in use, 256\.0 MiB are reserved"
    with pytest.raises(InvalidArgumentError, match=expected) as raised:
        measured()
    assert (raised.value.field, raised.value.reason) == ("gpu_memory_utilization", "NO_MEMORY")


@pytest.mark.parametrize(("device", "left"), [(torch.device("cpu"), 60), (CUDA, 100)])
def test_host_memory_must_fit_the_machine(monkeypatch: pytest.MonkeyPatch, device: torch.device, left: int) -> None:
    monkeypatch.setattr("kvpool.gpu_worker.device.machine_memory_bytes", lambda: 100 * GIB)
    stated = replace(settings(40 * GIB), host_memory_bytes=left * GIB)
    check_host_memory(device, stated)
    with pytest.raises(InvalidArgumentError, match=rf"more than this machine has left: {left}\.0 GiB") as raised:
        check_host_memory(device, replace(stated, host_memory_bytes=left * GIB + 1))
    assert (raised.value.field, raised.value.reason) == ("host_memory_bytes", "LARGER_THAN_THE_DEVICE")


def test_stated_memory_must_be_free(gpus: dict[int, tuple[int, int]]) -> None:
    assert measured(memory_bytes=99 * GIB) == 99 * GIB
    expected = r"100\.0 GiB are more than cuda:0 has free: 100\.0 GiB of 140\.0 GiB, of which 256\.0 MiB are reserved"
    with pytest.raises(InvalidArgumentError, match=expected) as raised:
        measured(memory_bytes=100 * GIB)
    assert (raised.value.field, raised.value.reason) == ("memory_bytes", "LARGER_THAN_THE_DEVICE")
    assert gpus


def test_memory_of_an_earlier_process_is_not_taken_by_others(gpus: dict[int, tuple[int, int]]) -> None:
    gpus[0] = (10 * GIB, 140 * GIB)
    assert available_bytes(CUDA, settings(100 * GIB), held_bytes=100 * GIB) == 100 * GIB
    assert available_bytes(CUDA, settings(None), held_bytes=100 * GIB) == int(0.9 * 140 * GIB) - 30 * GIB - GIB


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_a_real_gpu_is_measured() -> None:
    free_bytes, total_bytes = torch.cuda.mem_get_info(CUDA)
    got = measured()
    assert abs(got - (int(0.9 * total_bytes) - (total_bytes - free_bytes) - GIB // 4)) < GIB
    taken = torch.empty(2 * GIB, dtype=torch.int8, device=CUDA)
    assert got - measured() >= 2 * GIB - 2**21
    del taken
    with pytest.raises(InvalidArgumentError, match="are more than cuda:0 has free"):
        measured(memory_bytes=total_bytes)


@on_each_device
def test_free_memory_is_part_of_the_device_memory(device: torch.device) -> None:
    memory = device_memory(device)
    assert 0 < memory.free_bytes <= memory.total_bytes
    if device.type == "cuda":
        taken = torch.empty(2 * GIB, dtype=torch.int8, device=device)
        assert memory.free_bytes - device_memory(device).free_bytes >= taken.numel() - 2**21
    else:
        assert memory.total_bytes == machine_memory_bytes()


def on_cpu(memory_bytes: int | None) -> int:
    return available_bytes(torch.device("cpu"), settings(memory_bytes))


def test_on_cpu_memory_is_required_and_limited_by_the_machine() -> None:
    limit_bytes = machine_memory_bytes()
    assert on_cpu(limit_bytes) == limit_bytes
    with pytest.raises(InvalidArgumentError, match="are more than this machine's"):
        on_cpu(limit_bytes + 1)
    with pytest.raises(InvalidArgumentError, match="memory_bytes: must be given on cpu"):
        on_cpu(None)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (8 * 2**20, "8.0 MiB"), (1536, "1.5 KiB"), (2000 * GIB, "2,000.0 GiB")],
)
def test_sizes_are_formatted_in_the_largest_unit(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text
