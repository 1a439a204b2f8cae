"""Listening on host names."""

import asyncio
import socket
import ssl
from typing import Any

import pytest

from kvpool.wire.acceptor import Acceptor, bound_listeners


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    found: list[Any] = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def names_of(host: str, port: int = 0) -> list[tuple[str, int]]:
    listeners = bound_listeners(host, port)
    try:
        return [listener.getsockname() for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()


def test_all_addresses_of_a_name_are_bound_on_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "127.0.0.1", "127.0.0.2", "127.0.0.1")
    first, second = names_of("node")
    assert (first[0], second[0]) == ("127.0.0.1", "127.0.0.2")
    assert first[1] == second[1]


def test_addresses_that_cannot_be_bound_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "127.0.0.1", "127.0.0.2")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert names_of("node", taken.getsockname()[1]) == [("127.0.0.2", taken.getsockname()[1])]


def test_a_name_without_an_address_that_can_be_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="already in use"):
        bound_listeners("node", taken.getsockname()[1])


async def test_a_connection_at_the_moment_of_the_close_causes_no_error() -> None:
    loop, errors = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    acceptor = Acceptor(asyncio.Protocol)
    port = await acceptor.listen("127.0.0.1", 0)
    await asyncio.sleep(0)  # it waits for connections
    loop.call_soon(acceptor.close)  # in the iteration of the loop that also finds the connection
    with socket.create_connection(("127.0.0.1", port)):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not errors


async def test_a_connection_whose_handshake_has_not_begun_is_closed() -> None:
    loop = asyncio.get_running_loop()

    async def close_before_the_handshake() -> None:
        loop.call_soon(acceptor.close)  # the task of the handshake begins after this

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    acceptor = Acceptor(asyncio.Protocol, tls, admit=close_before_the_handshake)
    port = await acceptor.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
