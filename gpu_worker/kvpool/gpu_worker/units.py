"""Figures for people."""

from typing import Final

_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def format_bytes(size_bytes: int) -> str:
    """Writes a size in the largest unit of which there is one: "139.8 GiB", "8.0 MiB", "512 bytes"."""
    for name, unit_bytes in _UNITS:
        if abs(size_bytes) >= unit_bytes:
            return f"{size_bytes / unit_bytes:,.1f} {name}"
    return f"{size_bytes} bytes"
