"""Memory limits of the control groups of this process, for example those of its container."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES: Final = 2**62
"""Version 1 has a number just below 2^63 where there is no limit."""


def memory_limits_bytes(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Memory limits of the process's control groups, of version 2 and 1, from its own group up to the root."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):  # in a container the path may be that of the host; then only the root exists
            try:
                limit = (top / group / file).read_text(encoding="ascii").strip()
            except OSError:
                continue
            if limit.isdigit() and int(limit) < _UNLIMITED_BYTES:
                yield int(limit)
