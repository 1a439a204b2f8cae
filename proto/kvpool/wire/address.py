"""Addresses as people write them: `host:port` or `unix:/path`. Cheap to import."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_LAST_PORT: Final = 65535
DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
DEFAULT_SOCKET_MODE: Final = 0o600


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


def is_loopback(address: str) -> bool:
    """Whether a TCP address is this machine's own, whatever a resolver may say: `localhost` or a loopback number."""
    found = _split(address)
    return found is not None and (found[0] == "localhost" or _is_loopback_number(found[0]))


def resolves_beyond_loopback(host: str) -> bool:
    """Whether others may reach what listens on `host`; asks the resolver. One that it does not know may be reached."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return not all(_is_loopback_number(str(where[0])) for *_, where in found)


def refuse_plaintext(name: str, what: str, address: str, allowed: Collection[str]) -> None:
    """Raises ValueError if an address that is listened on without TLS can be reached by others.

    Args:
        name: The flag or field that it came by, for the error.
        what: What listens, as `allow_plaintext` names it.
        address: `host:port`, as `tcp://host:port` too, or of another kind, which others cannot reach.
        allowed: What may listen so.
    """
    if what in allowed or address.startswith(("unix:", "ipc:")):
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].removeprefix("[").removesuffix("]")
    if resolves_beyond_loopback(host):
        raise ValueError(
            f"{name}: {address} can be reached from beyond this machine, and is not encrypted; "
            f"if that network is to be trusted: allow_plaintext {what}"
        )


@contextlib.contextmanager
def socket_mode(address: str, mode: int) -> Iterator[None]:
    """Gives the unix socket that is bound within its mode, from the beginning; other addresses have none.

    A process has one umask: call it where no other thread makes files.
    """
    if not address.startswith("unix:"):
        yield
        return
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)
    Path(address.removeprefix("unix:")).chmod(mode)


def refuse_live_socket(path: Path) -> None:
    """Raises OSError if another server listens on a unix socket: grpc would replace its file without asking."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        raise OSError(f"another server listens on unix:{path}")


def _is_loopback_number(host: str) -> bool:
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return (mapped or number).is_loopback


def _split(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > _LAST_PORT:
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)
