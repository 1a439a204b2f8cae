"""Steps where something stands between a client and the listener of links: over gRPC if they must."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from kvpool.client import Client, aio, connect
from kvpool.client.transports import step_stream
from kvpool.wire import link as wire_link
from kvpool.wire.frames import encode_frame
from support.blocking_aio import BlockingAio
from support.conversations import Answers, converse, converse_synchronously
from support.haproxy import HTTP1, HTTP2, TCP, HAProxy, needs_haproxy
from support.server import CommandLineServer, ServerProcess, free_port, pool_config, server_process

_numbers = count()
NEAR: Final = "127.0.0.2"
"""Host of the proxy. A server tells the port where it takes steps, so the proxy has the same ports."""
Converse = Callable[..., Answers]


@pytest.fixture(params=["blocking", "asyncio"])
def conversation(request: pytest.FixtureRequest) -> Converse:
    if request.param == "blocking":
        return converse_synchronously
    return lambda *args: asyncio.run(converse(*args))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of a server, which takes steps at the next one."""
    port = free_port(2)
    with server_process(f"127.0.0.1:{port}"):
        yield port


def new_pool(port: int) -> str:
    with connect(f"127.0.0.1:{port}") as client:
        return client.create_pool(pool_config(f"p{next(_numbers)}")).config.name


def direct_answers(port: int) -> Answers:
    return converse_synchronously(f"127.0.0.1:{port}", new_pool(port))


def num_warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message == "steps not reached, using gRPC" for record in caplog.records)


@contextmanager
def silent(_: Path, port: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, socket.create_server((NEAR, port)):
        patch.setattr(step_stream, "CONNECT_SECONDS", 0.5)
        yield


def http(folder: Path, port: int) -> AbstractContextManager[object]:
    return HAProxy(folder, {f"{NEAR}:{port}": HTTP1})


def links_of_another_server(_: Path, port: int) -> AbstractContextManager[object]:
    return ServerProcess(f"{NEAR}:0", steps_listen=[f"{NEAR}:{port}"])


def another_server(_: Path, port: int) -> AbstractContextManager[object]:
    return ServerProcess(f"{NEAR}:{port}")


def nothing(_: Path, __: int) -> AbstractContextManager[object]:
    return ExitStack()


@needs_haproxy
@pytest.mark.parametrize(
    ("mode", "beside"),
    [(HTTP2, nothing), *((TCP, each) for each in (nothing, silent, http, links_of_another_server, another_server))],
    ids=lambda each: each.__name__ if callable(each) else each.split("\n")[1].split()[1],
)
def test_steps_go_over_grpc_where_a_proxy_forwards_only_its_port(  # noqa: PLR0913, PLR0917 - fixtures
    mode: str,
    beside: Callable[[Path, int], AbstractContextManager[object]],
    conversation: Converse,
    port: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another program may have the next port of the proxy."""
    near = f"{NEAR}:{port}"
    (tmp_path / "beside").mkdir()
    with HAProxy(tmp_path, {near: mode}) as proxy, beside(tmp_path / "beside", port + 1):
        assert conversation(near, new_pool(port)) == direct_answers(port)
        assert proxy.num_connections(near) == 1
    assert num_warnings(caplog) == 1


@needs_haproxy
@pytest.mark.parametrize("mode", [TCP, HTTP2, None], ids=["tcp", "http", "links"])
def test_a_client_goes_on_after_the_server_behind_a_proxy_was_killed(
    mode: str | None, conversation: Converse, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port(2)
    near, steps = f"{NEAR}:{port}", f"{NEAR}:{port + 1}"
    with (
        CommandLineServer(f"127.0.0.1:{port}", options=("--journal", tmp_path / "journal")) as server,
        HAProxy(tmp_path, {near: mode or TCP} | ({} if mode else {steps: TCP})) as proxy,
    ):
        expected = direct_answers(port)
        assert conversation(near, new_pool(port), server.restart) == expected
        if mode is None:
            assert proxy.num_connections(steps) >= 2
    assert num_warnings(caplog) == (mode is not None)


@needs_haproxy
def test_steps_go_over_a_link_where_a_proxy_forwards_both_ports(
    conversation: Converse, port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    near, steps = f"{NEAR}:{port}", f"{NEAR}:{port + 1}"
    with HAProxy(tmp_path, {near: TCP, steps: TCP}) as proxy:
        assert conversation(near, new_pool(port)) == direct_answers(port)
        assert (proxy.num_connections(near), proxy.num_connections(steps)) == (1, 1)
    assert num_warnings(caplog) == 0


@pytest.fixture(params=["blocking", "asyncio"])
def open_client(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    with asyncio.Runner() as runner, ExitStack() as closing:

        async def connected(address: str) -> aio.AsyncClient:
            return aio.connect(address)

        def open_client(address: str) -> Client | BlockingAio:
            if request.param == "blocking":
                return closing.enter_context(connect(address))
            client = BlockingAio(runner.run(connected(address)), runner)
            closing.callback(client.close)
            return client

        yield open_client


@pytest.mark.parametrize("pause_seconds", [step_stream.GRPC_SECONDS, 0.0])
def test_a_link_is_tried_again_after_a_pause(
    pause_seconds: float,
    open_client: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(step_stream, "FIRST_GRPC_SECONDS", pause_seconds)
    steps, hidden = tmp_path / "s.steps", tmp_path / "hidden"

    def num_connections() -> int:
        """Number of connections that the server has; one of them carries gRPC."""
        rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
        return sum(row[-1].startswith(f"{tmp_path}/") and row[5] == "03" for row in rows)

    with server_process(f"unix:{tmp_path / 's'}"):
        steps.rename(hidden)
        client = open_client(f"unix:{tmp_path / 's'}")
        client.create_pool(pool_config())
        session = client.open_session("m")
        session.admit(session.request("a", range(9)))
        assert num_connections() == 1
        hidden.rename(steps)
        session.admit(session.request("b", range(9)))
        assert (num_connections(), session.sequence) == (1 if pause_seconds else 2, 2)
        session.close()
    assert num_warnings(caplog) == 1


def test_a_stranger_at_the_address_of_steps_learns_no_token(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        monkeypatch.setattr(wire_link, "listener_address", lambda *_: f"127.0.0.1:{stranger.getsockname()[1]}")
        with connect(f"127.0.0.1:{port}", token="secret", allow_plaintext=True) as client:  # noqa: S106 - any
            opening = threading.Thread(target=client.open_session, args=(new_pool(port),))
            opening.start()
            connection, _ = stranger.accept()
            with connection:
                received = connection.recv(4096)
                connection.sendall(encode_frame(wire_link.Kind.PROOF, bytes(32)))
                while more := connection.recv(4096):
                    received += more
            opening.join()
    assert len(received) == len(encode_frame(wire_link.Kind.PROBE, bytes(16)))
