"""Connections are bounded, so that clients without permission take no file descriptor that the server needs."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import UnauthenticatedError, aio, connect
from kvpool.client.admin import AdminClient
from kvpool.server.app import Server
from kvpool.server.auth.config import AuthConfig
from kvpool.server.config import ServerConfig
from kvpool.wire import channels
from kvpool.wire.address import host_and_port
from support.auth import Authority, Entry, secret_of, write_tokens
from support.flood import HALF_TLS_HELLO, flooded
from support.server import ServerProcess, pool_config
from support.waiting import DEADLINE_SECONDS

NUM_FILES = 256
TOKENS: list[Entry] = [{"name": name, "role": "admin", "pools": ["*"]} for name in ("ops", "other")]
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


@contextmanager
def flood(address: str, first_bytes: bytes) -> Iterator[None]:
    with flooded(host_and_port("address", address), first_bytes, 2 * NUM_FILES) as flood:
        assert flood.is_full.wait(DEADLINE_SECONDS)
        yield


@pytest.mark.parametrize("first_bytes", [b"", HALF_TLS_HELLO], ids=["silent", "half-hello"])
def test_a_flood_of_connections_costs_neither_sessions_nor_the_journal(tmp_path: Path, first_bytes: bytes) -> None:
    authority, tokens = Authority(tmp_path, "ca"), tmp_path / "tokens.toml"
    pair, unix = authority.issue("127.0.0.1"), f"unix:{tmp_path / 's'}"
    write_tokens(tokens, TOKENS)
    server = ServerProcess(
        "127.0.0.1:0",
        unix,
        auth={"tokens": str(tokens), "tls_cert": str(pair.cert), "tls_key": str(pair.key)},
        journal={"folder": str(tmp_path / "journal")},
        max_files=NUM_FILES,
    )
    tcp, tls = server.addresses[0], authority.trusted_by()
    with (
        connect(tcp, token=secret_of("ops"), tls=tls) as client,
        connect(tcp, token=secret_of("other"), tls=tls) as other,
        AdminClient(tcp, token=secret_of("ops"), tls=tls) as admin,
    ):
        client.create_pool(pool_config())
        assert other.get_pool("m").sessions == 0
        with client.open_session("m", lease_seconds=60) as session:
            with session.step():
                pass
            assert [pool.config.name for pool in admin.overview().pools] == ["m"]
            with flood(tcp, first_bytes):
                for number in range(20):
                    client.create_pool(pool_config(f"m{number}"))
                    with session.step():
                        pass
                    admin.remove_pool(f"m{number}")
                write_tokens(tokens, TOKENS[:1])
                with pytest.raises(UnauthenticatedError, match="unknown, or was revoked"):
                    other.get_pool("m")
                with connect(unix, token=secret_of("ops")) as local:  # another address has connections of its own
                    assert local.get_pool("m").sessions == 1
                assert admin.overview().server.journal_error == ""
            with connect(tcp, token=secret_of("ops"), tls=tls, deadline_seconds=DEADLINE_SECONDS) as newcomer:
                assert newcomer.get_pool("m").sessions == 1
    assert "journal given up" not in server.stop_cleanly()


def test_connections_are_refused_above_the_maximum_and_silent_ones_end() -> None:
    server = ServerProcess("127.0.0.1:0", limits={"max_connections": 3, "stall_seconds": 0.5})
    host, _, port = server.addresses[0].rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) for _ in range(3)]
    for opened in silent:
        assert opened.recv(1), "the server begins"
    with socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS) as refused:
        assert refused.recv(1) == b""
    with connect(
        server.addresses[0], deadline_seconds=DEADLINE_SECONDS
    ) as client:  # waits until the handshakes have timed out
        client.create_pool(pool_config())
    for opened in silent:
        while opened.recv(1000):
            pass
        opened.close()
    server.stop_cleanly()


async def test_a_connection_without_calls_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "IDLE_SECONDS", 0.3)
    server = Server(ServerConfig(addresses=(f"unix:{tmp_path / 's'}",)))
    await server.start()
    async with aio.connect(f"unix:{tmp_path / 's'}") as client:
        await client.create_pool(pool_config())
        async with await client.open_session("m") as session:
            async with session.step():
                pass
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(HTTP2_HELLO)
            await asyncio.wait_for(reader.read(), DEADLINE_SECONDS)  # until the server closes it
            writer.close()
            async with session.step():
                pass
            assert (await client.get_pool("m")).sessions == 1, "the client connects again"
    await server.stop()


def test_more_connections_than_files_are_refused_at_the_start() -> None:
    message = r"--max-connections: 200 for each address, .* need 528 .* the limit is 256"
    with pytest.raises(AssertionError, match=message):
        ServerProcess("127.0.0.1:0", limits={"max_connections": 200}, max_files=NUM_FILES)


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that stands for two IP addresses of this machine, and for one that it does not have."""
    resolve = socket.getaddrinfo

    def resolved(host: str, *arguments: Any, **options: Any) -> list[Any]:
        hosts = ("192.0.2.1", "127.0.0.2", "127.0.0.3") if host == "both.test" else (host,)
        return [found for each in hosts for found in resolve(each, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return "both.test"


async def test_a_server_listens_on_all_addresses_of_a_name(name: str) -> None:
    server = Server(ServerConfig(addresses=(f"{name}:0",), auth=AuthConfig(allow_plaintext=frozenset({"grpc"}))))
    (address,) = await server.start()
    host, _, port = address.rpartition(":")
    assert host == name
    for each in ("127.0.0.2", "127.0.0.3"):
        async with aio.connect(f"{each}:{port}") as client:
            await client.create_pool(pool_config())
    await server.stop()


async def test_a_server_does_not_start_beside_another_on_one_address_of_a_name(name: str) -> None:
    with socket.create_server(("127.0.0.3", 0)) as other:
        port = other.getsockname()[1]
        config = ServerConfig(addresses=(f"{name}:{port}",), auth=AuthConfig(allow_plaintext=frozenset({"grpc"})))
        server = Server(config)
        with pytest.raises(
            OSError,
            match=f"^cannot listen on both.test:{port}, which stands for 127.0.0.3:{port}: Address already in use$",
        ):
            await server.start()
        await server.stop()
