"""Addresses as people write them: `host:port` or `unix:/path`. Cheap to import."""

import contextlib
import socket
from pathlib import Path
from typing import Final

_LAST_PORT: Final = 65535


def check_address(address: str) -> None:
    """Raises ValueError unless `address` is `host:port` or `unix:/path`."""
    if address.startswith("unix:"):
        if not address.removeprefix("unix:").startswith("/"):
            raise ValueError(f"address {address!r}: a unix socket needs an absolute path, unix:/path")
        return
    if _split(address) is None:
        raise ValueError(f"address {address!r}: needs host:port or unix:/path")


def host_and_port(name: str, address: str) -> tuple[str, int]:
    """Reads a TCP address; an IPv6 address stands in brackets, which are taken off.

    Args:
        name: The flag or field that it came by, for the error.
        address: `host:port`, `[::]:port`; port 0 for a free one.

    Raises:
        ValueError: It is none.
    """
    found = _split(address)
    if found is None:
        raise ValueError(f"{name}: address {address!r}: needs host:port")
    return found


def refuse_live_socket(path: Path) -> None:
    """Raises OSError if another server listens on a unix socket: grpc would replace its file without asking."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        raise OSError(f"another server listens on unix:{path}")


def _split(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > _LAST_PORT:
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)
