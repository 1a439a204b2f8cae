"""Description of the machine."""

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def processor_us(pid: int) -> float | None:
    """Returns the processor time of a process, with threads that have ended; None if the system is not Linux."""
    try:
        # The clock that clock_getcpuclockid of the C library returns. /proc/PID/stat counts in steps of 10 ms.
        return time.clock_gettime((~pid << 3) | 2) * 1e6
    except OSError:
        return None


def machine() -> dict[str, str | int]:
    """Returns the hardware and the versions that determine speed."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpu": _cpu_model() or platform.processor() or "unknown",
        "cores": os.cpu_count() or 0,
        "grpcio": version("grpcio"),
        "protobuf": version("protobuf"),
    }


def _cpu_model() -> str:
    if not _CPUINFO.exists():
        return ""
    lines = (line.partition(":") for line in _CPUINFO.read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), "")
