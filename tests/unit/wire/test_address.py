import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from kvpool.wire.address import (
    BoundSocket,
    bind_error,
    check_address,
    host_and_port,
    ip_addresses,
    parse_seeds,
)
from support.transcripts import check

CALLS: Final[dict[str, Callable[[str], object]]] = {
    "check": check_address,
    "split": partial(host_and_port, "--metrics-listen"),
    "seeds": parse_seeds,
    "resolve": ip_addresses,
}


def execute(call: str, address: str) -> list[str]:
    try:
        return [f"accepted: {CALLS[call](json.loads(address))}"]
    except ValueError as error:
        return [f"refused: {error}"]


def test_addresses_are_accepted_or_refused_as_the_transcript_shows() -> None:
    check(Path(__file__).with_name("transcripts") / "addresses.txt", execute)


def test_a_port_of_many_digits_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a port of at most 65535"):
        check_address("h:" + "9" * 5000)


@contextlib.contextmanager
def listening(path: Path) -> Iterator[BoundSocket]:
    """Listens on a unix socket as servers do, and removes nothing at the end."""
    bound = BoundSocket(f"unix:{path}")
    with bound.listen(0o600, 1):
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


def test_the_reason_of_a_refused_address_is_found(tmp_path: Path) -> None:
    with listening(tmp_path / "s"), socket.create_server(("127.0.0.1", 0)) as tcp:
        assert bind_error(f"127.0.0.1:{tcp.getsockname()[1]}") == ": Address already in use"
        assert bind_error(f"unix:{tmp_path}/s") == ": Address already in use"
    assert bind_error(f"unix:{tmp_path}/none/s") == ": No such file or directory"
    assert bind_error(f"unix:{tmp_path}/t") == bind_error("127.0.0.1:0") == ""
    assert not (tmp_path / "t").exists()


def test_a_name_is_bound_on_the_addresses_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(_: str, port: int, **__: object) -> list[object]:
        inet, kind = socket.AF_INET, socket.SOCK_STREAM
        found = [(inet, kind, 6, "", (host, port)) for host in ("127.0.0.1", "192.0.2.1", "127.0.0.2", "127.0.0.1")]
        return [*found, (socket.AF_INET6, kind, 6, "", ("2001:db8::1", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert ip_addresses("name:7") == ["127.0.0.1:7", "127.0.0.2:7"]
