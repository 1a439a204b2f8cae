"""Addresses in the form `host:port` or `unix:/path`. Cheap to import."""

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_MAX_PORT: Final = 65535
_HOST_AND_PORT: Final = re.compile(r"(\[(?P<ipv6>[^\s/@\[\]]+)\]|(?P<name>[^\s/@\[\]:]+)):(?P<port>[0-9]{1,5})")
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


def parse_seeds(text: str) -> tuple[str, ...]:
    """Parses the addresses of a shard's servers, without duplicates: one address, or several separated by commas.

    Raises:
        ValueError: An address is neither `host:port` nor `unix:/path`; the message names it.
    """
    seeds = tuple(dict.fromkeys(text.split(",")))
    for seed in seeds:
        check_address(seed)
    return seeds


def host_and_port(name: str, address: str) -> tuple[str, int]:
    """Parses a TCP address. Removes the brackets of an IPv6 address.

    Args:
        name: Name of the flag or field, for the error.
        address: `host:port` or `[::]:port`; port 0 for a free one.

    Raises:
        ValueError: The address is invalid.
    """
    found = _split(address)
    if found is None:
        raise ValueError(f"{name}: address {address!r}: needs host:port")
    return found


def is_loopback(address: str) -> bool:
    """Whether a TCP address is on this machine: `localhost` or a loopback IP address. Does not resolve names."""
    found = _split(address)
    return found is not None and (found[0] == "localhost" or _is_loopback_ip(found[0]))


def ip_addresses(address: str) -> list[str]:
    """Returns the TCP addresses that a listener on `address` binds: one per IP address of its host on this machine.

    A name may also stand for addresses that this machine lacks, such as `::1` without IPv6; they are left out. If there
    is no other, `address` itself is returned.
    """
    host, port = host_and_port("listen", address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return [address]
    hosts = dict.fromkeys(str(resolved[0]) for family, *_, resolved in found if _is_here(family, str(resolved[0])))
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts] or [address]


def _is_here(family: int, host: str) -> bool:
    """Whether this machine has an IP address."""
    with contextlib.suppress(OSError), socket.socket(family) as probe:
        probe.bind((host, 0))
        return True
    return False


def resolves_beyond_loopback(host: str) -> bool:
    """Whether other machines may reach a listener on `host`. Resolves the name; an unknown host counts as reachable."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return not all(_is_loopback_ip(str(resolved[0])) for *_, resolved in found)


def refuse_plaintext(name: str, kind: str, address: str, allowed: Collection[str]) -> None:
    """Raises ValueError if other machines can reach an address that is served without TLS.

    Args:
        name: Name of the flag or field, for the error.
        kind: Kind of the endpoint, as in `allow_plaintext`.
        address: `host:port` or `tcp://host:port`; addresses of other forms are not reachable from other machines.
        allowed: Kinds of endpoints that may be served without TLS.
    """
    if kind in allowed or address.startswith(("unix:", "ipc:")):
        return
    host = address.removeprefix("tcp://").rpartition(":")[0].removeprefix("[").removesuffix("]")
    if resolves_beyond_loopback(host):
        raise ValueError(
            f"{name}: {address} can be reached from other machines and is not encrypted; "
            f"if you trust that network: allow_plaintext {kind}"
        )


@contextlib.contextmanager
def socket_mode(address: str, mode: int) -> Iterator[None]:
    """Sets the file mode of a unix socket that is bound in the block, from its creation. No effect on other addresses.

    Changes the umask of the process, so no other thread may create files meanwhile.
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
    """Raises OSError if another server listens on a unix socket. gRPC would silently replace the socket file."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        raise OSError(f"another server listens on unix:{path}")


def _is_loopback_ip(host: str) -> bool:
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return (mapped or number).is_loopback


def _split(address: str) -> tuple[str, int] | None:
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None or int(found["port"]) > _MAX_PORT:
        return None
    return found["ipv6"] or found["name"], int(found["port"])
