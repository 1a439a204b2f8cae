import socket
from pathlib import Path

import pytest

from kvpool.wire.address import check_address, host_and_port, ip_addresses, parse_seeds, refuse_live_socket


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


def test_only_a_live_socket_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    refuse_live_socket(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        refuse_live_socket(path)
        listener.listen()
        with pytest.raises(OSError, match=f"another server listens on unix:{path}"):
            refuse_live_socket(path)
    refuse_live_socket(path)


@pytest.mark.parametrize("address", ["http://h:50051", "grpc://h:50051", "dns:///h:50051", "tcp://[::1]:50051"])
def test_an_address_with_another_scheme_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="needs host:port or unix:/path"):
        check_address(address)


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
