"""Addresses in the form `host:port` or `unix:/path`. Cheap to import."""

import contextlib
import ipaddress
import os
import re
import secrets
import socket
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

_MAX_PORT: Final = 65535
_MAX_SOCKET_PATH_BYTES: Final = 107
"""Limit of Linux for the path of a socket."""
_HOST_AND_PORT: Final = re.compile(r"(\[(?P<ipv6>[^\s/@\[\]]+)\]|(?P<name>[^\s/@\[\]:]+)):(?P<port>[0-9]{1,5})")
_BARE_IPV6: Final = re.compile(r"[0-9a-fA-F.]*:[0-9a-fA-F:.]+")
DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
DEFAULT_SOCKET_MODE: Final = 0o600


def check_address(address: str) -> None:
    """Raises ValueError unless `address` is `host:port` or `unix:/path`."""
    if address.startswith("unix:"):
        if not address.removeprefix("unix:").startswith("/"):
            raise ValueError(f"address {address!r}: a unix socket needs an absolute path, unix:/path")
        return
    if _split(address) is None:
        raise ValueError(f"address {address!r}: {_problem(address) or 'needs host:port or unix:/path'}")


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
        raise ValueError(f"{name}: address {address!r}: {_problem(address) or 'needs host:port'}")
    return found


def is_loopback(address: str) -> bool:
    """Whether a TCP address is on this machine: `localhost` or a loopback IP address. Does not resolve names."""
    found = _split(address)
    return found is not None and (found[0] == "localhost" or is_loopback_ip(found[0]))


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


def bind_error(address: str) -> str:
    """Returns why this machine refuses to listen on an address, as `: Address already in use`; empty if it does not."""
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            with socket.socket(socket.AF_UNIX) as probe:
                probe.bind(path)
                Path(path).unlink()
            return ""
        host, port = host_and_port("listen", address)
        for family, kind, *_, resolved in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
                probe.bind(resolved)
                probe.listen()
    except OSError as error:
        return f": {error.strerror or error}"
    return ""


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
    return not all(is_loopback_ip(str(resolved[0])) for *_, resolved in found)


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


class BoundSocket:
    """An address that this process listens on, and the file of its unix socket, if it is one.

    A unix socket is bound under another name, and then moved to its path. So what has bound it, such as gRPC, finds
    nothing to remove when it closes the socket: at the path there may be the socket of a later process.

    Attributes:
        address: The address to bind.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._path: Path | None = None
        self._part: Path | None = None
        self._file: tuple[int, int] | None = None
        if address.startswith("unix:"):
            self._path = Path(address.removeprefix("unix:"))
            self._part = self._path.with_name(f".{secrets.token_hex(3)}")
            self.address = f"unix:{self._part}"

    @contextlib.contextmanager
    def made(self, mode: int) -> Iterator[None]:
        """Moves the socket that is bound in the block to its path, with this file mode from its creation.

        Changes the umask of the process, so no other thread may create files meanwhile. No effect on other addresses.

        Raises:
            FileExistsError: Another process listens there.
            OSError: Another file is there, or the socket cannot be moved.
        """
        if self._path is None or self._part is None:
            yield
            return
        if max(len(os.fsencode(path)) for path in (self._path, self._part)) > _MAX_SOCKET_PATH_BYTES:
            raise OSError(f"{self._path} is too long for a socket: the maximum is {_MAX_SOCKET_PATH_BYTES} bytes")
        _check_unused(self._path)
        before = os.umask(0o777 & ~mode)
        try:
            try:
                yield
            finally:
                os.umask(before)
            self._part.chmod(mode)
            found = self._part.stat()
            self._part.rename(self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._part.unlink()
            raise
        self._file = found.st_dev, found.st_ino

    def listen(self, mode: int, backlog: int, *, names_senders: bool = False) -> socket.socket:
        """Listens on a unix socket without blocking, as `made` says. The caller closes it, and then calls `remove`.

        Args:
            mode: Mode of its file.
            backlog: Maximum number of connections that wait to be accepted.
            names_senders: Whether each message on a connection names the process that sent it (SCM_CREDENTIALS).
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, names_senders)
            with self.made(mode):
                listener.bind(self.address.removeprefix("unix:"))
                listener.listen(backlog)
        except BaseException:
            listener.close()
            raise
        return listener

    def remove(self) -> None:
        """Removes the file, unless there is another one by now. Call it after the socket was closed."""
        if self._path is None or self._file is None:
            return
        with contextlib.suppress(FileNotFoundError):
            found = self._path.lstat()
            if (found.st_dev, found.st_ino) == self._file:
                self._path.unlink()


def _check_unused(path: Path) -> None:
    """Raises OSError if another process listens on a unix socket, or another file is there: both would be replaced."""
    try:
        is_socket = stat.S_ISSOCK(path.stat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise OSError(f"{path} exists, and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
        probe.settimeout(1.0)
        with contextlib.suppress(TimeoutError, BlockingIOError):  # it has many connections
            probe.connect(str(path))
        raise FileExistsError(f"another server listens on unix:{path}")


def is_loopback_ip(host: str) -> bool:
    """Whether a host is a loopback IP address."""
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


def _problem(address: str) -> str:
    """Returns what is wrong with a TCP address, if that is a common mistake."""
    scheme, separator, _ = address.partition("://")
    if separator:
        return f"needs host:port, without {scheme}://"
    if address.startswith(("/", "./", "~/")):
        return "a path of a unix socket needs the prefix unix:, as in unix:/path"
    host, _, port = address.rpartition(":")
    if port.isdecimal() and int(port[:9]) > _MAX_PORT:
        return f"needs a port of at most {_MAX_PORT}"
    if _BARE_IPV6.fullmatch(host):
        return "an IPv6 address needs brackets, as in [::1]:50051"
    return ""


def set_options(connection: socket.socket, dead_peer_seconds: float) -> None:
    """Sends small messages at once over TCP, and breaks a connection whose peer's machine is away for a time."""
    if connection.family is socket.AF_UNIX:
        return
    options = {
        socket.TCP_NODELAY: 1,
        socket.TCP_KEEPIDLE: max(1, round(dead_peer_seconds / 2)),
        socket.TCP_KEEPINTVL: max(1, round(dead_peer_seconds / 6)),
        socket.TCP_KEEPCNT: 3,
        socket.TCP_USER_TIMEOUT: round(dead_peer_seconds * 1000),  # while data waits, no probes are sent
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
