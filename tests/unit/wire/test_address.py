import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.wire.address import (
    BoundSocket,
    bind_error,
    check_address,
    host_and_port,
    ip_addresses,
    parse_seeds,
)


@pytest.mark.parametrize(
    "address", ["localhost:0", "0.0.0.0:65535", "[::1]:50051", "[fe80::1%eth0]:1", "unix:/run/kvpool.sock"]
)
def test_valid_addresses(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    "address",
    [
        *("", "localhost", ":50051", "host:", "host:65536", "host:-1", "host:٣", "unix:s"),
        *(
            "ipv4:1.2.3.4:5",
            "ipv4:127.0.0.1:1,10.0.0.7:2",
            "::1:1",
            "user@h:1",
            "a b:1",
            " h:1",
            "h:1\n",
            "h: 1",
            "[::1:1",
            "::1]:1",
            "[]:1",
            "[::1]h:1",
        ),
    ],
)
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="needs"):
        check_address(address)


@pytest.mark.parametrize(
    ("address", "expected"), [("10.0.0.7:9465", ("10.0.0.7", 9465)), ("[::]:0", ("::", 0)), ("h:1", ("h", 1))]
)
def test_host_and_port_are_split(address: str, expected: tuple[str, int]) -> None:
    assert host_and_port("--metrics-listen", address) == expected


@pytest.mark.parametrize("address", ["unix:/s", "9465", "h:x"])
def test_an_address_without_port_is_refused_with_the_name_of_its_flag(address: str) -> None:
    with pytest.raises(ValueError, match=f"^--metrics-listen: address '{address}': needs host:port$"):
        host_and_port("--metrics-listen", address)


@contextlib.contextmanager
def listening(path: Path) -> Iterator[BoundSocket]:
    """Listens on a unix socket as servers do, and removes nothing at the end."""
    bound = BoundSocket(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as listener:
        with bound.made(0o600):
            listener.bind(bound.address.removeprefix("unix:"))
            listener.listen()
        yield bound


def test_a_socket_without_a_listener_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(path):
        before = path.stat().st_ino
        with pytest.raises(FileExistsError, match=f"another server listens on unix:{path}"), listening(path):
            pass
        assert (path.stat().st_ino, list(tmp_path.iterdir())) == (before, [path])
    with listening(path) as bound, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    bound.remove()
    bound.remove()
    assert list(tmp_path.iterdir()) == []


def test_another_file_is_not_replaced_by_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("a file")
    with pytest.raises(OSError, match="exists, and is not a socket"), listening(path):
        pass
    assert path.read_text() == "a file"


def test_the_socket_of_a_later_process_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(path) as first:
        pass
    with listening(path) as second, socket.socket(socket.AF_UNIX) as client:
        first.remove()
        client.connect(str(path))
    second.remove()
    assert not path.exists()


def test_a_socket_that_cannot_be_bound_leaves_no_file(tmp_path: Path) -> None:
    bound = BoundSocket(f"unix:{tmp_path / 's'}")
    with contextlib.suppress(InterruptedError), socket.socket(socket.AF_UNIX) as listener, bound.made(0o600):
        listener.bind(bound.address.removeprefix("unix:"))
        raise InterruptedError
    bound.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_no_client_could_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is too long for a socket"), listening(tmp_path / ("s" * 107)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_tcp_address_has_no_file() -> None:
    bound = BoundSocket("127.0.0.1:1")
    with bound.made(0o600):
        assert bound.address == "127.0.0.1:1"
    bound.remove()


@pytest.mark.parametrize("address", ["http://h:50051", "grpc://h:50051", "dns:///h:50051", "tcp://[::1]:50051"])
def test_an_address_with_another_scheme_is_refused(address: str) -> None:
    scheme = address.partition("://")[0]
    with pytest.raises(ValueError, match=f"needs host:port, without {scheme}://$"):
        check_address(address)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("h:65536", "needs a port of at most 65535"),
        ("h:" + "9" * 5000, "needs a port of at most 65535"),
        ("/run/kvpool.sock", "a path of a unix socket needs the prefix unix:, as in unix:/path"),
        ("./s", "a path of a unix socket needs the prefix unix:, as in unix:/path"),
        ("::1:50051", "an IPv6 address needs brackets, as in [::1]:50051"),
    ],
)
def test_a_common_mistake_is_named(address: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f": {re.escape(problem)}$"):
        check_address(address)
    with pytest.raises(ValueError, match=f"^listen: .*: {re.escape(problem)}$"):
        host_and_port("listen", address)


def test_the_reason_of_a_refused_address_is_found(tmp_path: Path) -> None:
    with listening(tmp_path / "s"), socket.create_server(("127.0.0.1", 0)) as tcp:
        assert bind_error(f"127.0.0.1:{tcp.getsockname()[1]}") == ": Address already in use"
        assert bind_error(f"unix:{tmp_path}/s") == ": Address already in use"
    assert bind_error(f"unix:{tmp_path}/none/s") == ": No such file or directory"
    assert bind_error(f"unix:{tmp_path}/t") == bind_error("127.0.0.1:0") == ""
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("h:1", ("h:1",)),
        ("unix:/s", ("unix:/s",)),
        ("h:1,[::1]:2,unix:/s", ("h:1", "[::1]:2", "unix:/s")),
        ("h:1,g:1,h:1", ("h:1", "g:1")),
    ],
)
def test_seeds_are_separated_by_commas(text: str, seeds: tuple[str, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    ("text", "bad"),
    [("", ""), ("h:1,", ""), ("h:1,g", "g"), ("h:1, g:1", " g:1"), ("x,h:1", "x"), ("h:1;g:1", "h:1;g:1")],
)
def test_a_bad_seed_is_named(text: str, bad: str) -> None:
    with pytest.raises(ValueError, match=f"^address '{bad}': needs host:port or unix:/path$"):
        parse_seeds(text)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:50051", "192.0.2.1:50051", "unknown.invalid:50051"])
def test_an_address_without_a_name_is_bound_as_it_is(address: str) -> None:
    assert ip_addresses(address) == [address]


def test_a_name_is_bound_on_the_addresses_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(_: str, port: int, **__: object) -> list[object]:
        inet, kind = socket.AF_INET, socket.SOCK_STREAM
        found = [(inet, kind, 6, "", (host, port)) for host in ("127.0.0.1", "192.0.2.1", "127.0.0.2", "127.0.0.1")]
        return [*found, (socket.AF_INET6, kind, 6, "", ("2001:db8::1", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert ip_addresses("name:7") == ["127.0.0.1:7", "127.0.0.2:7"]
