"""The device of a rank, and the memory of it that the KV cache may take."""

import os
from pathlib import Path

import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import QUOTED_CHARACTERS
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.status import DeviceMemory
from kvpool.wire.control_groups import memory_limits_bytes
from kvpool.wire.log_fields import format_bytes


def open_device(name: str) -> torch.device:
    """Finds a device.

    Args:
        name: "cpu", "cuda" for the current CUDA device, or "cuda:N".

    Raises:
        InvalidArgumentError: The device does not exist; lists the devices that do.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device and device.type == "cpu" and not device.index:
        return torch.device("cpu")
    if device and device.type == "cuda" and torch.cuda.is_available():
        index = torch.cuda.current_device() if device.index is None else device.index
        if index < torch.cuda.device_count():
            return torch.device("cuda", index)
    raise InvalidArgumentError(
        "device", f"{name[:QUOTED_CHARACTERS]!r} does not exist; available: {', '.join(_devices())}"
    )


def describe_device(device: torch.device) -> str:
    """Describes a device for display: "cuda:0 NVIDIA H200"."""
    if device.type != "cuda":
        return str(device)
    return f"{device} {torch.cuda.get_device_properties(device).name}"


def available_bytes(device: torch.device, settings: WorkerSettings, held_bytes: int = 0) -> int:
    """Memory that the KV cache may take.

    On a CUDA device the memory in use, by this process (its weights) and by other processes, is measured now. Create a
    worker only after its model is loaded.

    Args:
        device: From `open_device`.
        settings: The requested memory or share, and the memory left free.
        held_bytes: Memory in use that is the KV cache, of an earlier process.

    Raises:
        InvalidArgumentError: The requested memory is not available, or nothing is left of the share; states the sizes.
    """
    if device.type == "cuda":
        return _available_on_cuda(device, settings, held_bytes)
    memory_bytes = settings.memory_bytes
    if memory_bytes is None:
        raise InvalidArgumentError("memory_bytes", f"must be given on {device}", reason="MISSING")
    limit_bytes = machine_memory_bytes()
    if memory_bytes > limit_bytes:
        message = f"{format_bytes(memory_bytes)} are more than this machine's {format_bytes(limit_bytes)}"
        raise InvalidArgumentError("memory_bytes", message, reason="LARGER_THAN_THE_DEVICE")
    return memory_bytes


def check_host_memory(device: torch.device, settings: WorkerSettings) -> None:
    """Raises InvalidArgumentError if this machine lacks the host memory, beside memory on CPU."""
    left_bytes = machine_memory_bytes() - (settings.memory_bytes or 0 if device.type == "cpu" else 0)
    if settings.host_memory_bytes > left_bytes:
        stated, left = format_bytes(settings.host_memory_bytes), format_bytes(left_bytes)
        message = f"{stated} are more than this machine has left: {left}"
        raise InvalidArgumentError("host_memory_bytes", message, reason="LARGER_THAN_THE_DEVICE")


def _available_on_cuda(device: torch.device, settings: WorkerSettings, held_bytes: int) -> int:
    torch.cuda.empty_cache()  # memory in torch's cache would count as in use
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    free_bytes += held_bytes
    memory_bytes, share = settings.memory_bytes, settings.gpu_memory_utilization
    reserve = f"{format_bytes(settings.reserve_bytes)} are reserved"
    if memory_bytes is not None:
        if memory_bytes > free_bytes - settings.reserve_bytes:
            free = f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)}"
            message = f"{format_bytes(memory_bytes)} are more than {device} has free: {free}, of which {reserve}"
            raise InvalidArgumentError("memory_bytes", message, reason="LARGER_THAN_THE_DEVICE")
        return memory_bytes
    used_bytes = total_bytes - free_bytes
    left_bytes = int(share * total_bytes) - used_bytes - settings.reserve_bytes
    if left_bytes <= 0:
        message = (
            f"{share:g} of {format_bytes(total_bytes)} on {device} leaves nothing:"
            f" {format_bytes(used_bytes)} are in use, {reserve}"
        )
        raise InvalidArgumentError("gpu_memory_utilization", message, reason="NO_MEMORY")
    return left_bytes


def device_memory(device: torch.device) -> DeviceMemory:
    """Total and free memory of a device, over all processes; for a CPU that of the machine, within its limit."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return DeviceMemory(total_bytes, free_bytes)
    total_bytes = machine_memory_bytes()
    return DeviceMemory(total_bytes, min(_unused_bytes(), total_bytes))


def machine_memory_bytes() -> int:
    """Memory that this process may use: that of the machine, or the limit of a control group."""
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min((physical_bytes, *memory_limits_bytes()))


def _unused_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that new processes can use without swapping, as the kernel estimates it."""
    entries = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
    return int(entries["MemAvailable"].removesuffix("kB")) * 1024


def _devices() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(i) for i in range(count)]
    return [
        "cpu",
        *(f"cuda:{i} ({device.name}, {format_bytes(device.total_memory)})" for i, device in enumerate(found)),
    ]
