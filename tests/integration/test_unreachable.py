"""Errors of servers that cannot be reached name the address and the reason."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from kvpool.client import TlsConfig, UnavailableError, aio, connect
from kvpool.client.admin import AdminClient
from support.auth import Authority
from support.server import free_port, server_process

DEADLINE_SECONDS = 5.0


def errors_of(*servers: tuple[str, TlsConfig | None]) -> list[list[str]]:
    """The errors of the three clients of each server. The clients wait for their deadlines at the same time."""

    def error(call: Callable[[], object]) -> str:
        with pytest.raises(UnavailableError) as caught:
            call()
        return str(caught.value)

    def synchronous(address: str, tls: TlsConfig | None) -> None:
        with connect(address, tls=tls, deadline_seconds=DEADLINE_SECONDS) as client:
            client.get_pool("m")

    def asynchronous(address: str, tls: TlsConfig | None) -> None:
        async def get_pool() -> None:
            async with aio.connect(address, tls=tls, deadline_seconds=DEADLINE_SECONDS) as client:
                await client.get_pool("m")

        asyncio.run(get_pool())

    def administrative(address: str, tls: TlsConfig | None) -> None:
        with AdminClient(address, tls=tls) as admin:
            admin.overview()

    clients = (synchronous, administrative, asynchronous)
    with ThreadPoolExecutor(len(clients) * len(servers)) as threads:
        errors = [[threads.submit(error, partial(each, *server)) for each in clients] for server in servers]
        return [[each.result() for each in of_server] for of_server in errors]


def test_an_address_where_nothing_listens(tmp_path: Path) -> None:
    expected = {
        f"127.0.0.1:{free_port()}": "nothing listens there",
        f"unix:{tmp_path / 'none'}": "there is no such socket",
    }
    errors = errors_of(*((address, None) for address in expected))
    for (address, words), texts in zip(expected.items(), errors, strict=True):
        for text in texts:
            assert text.startswith(f"{address}: {words} (")


def test_tls_that_does_not_match(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    pair = ours.issue("localhost", "127.0.0.1")
    auth = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    with server_process("127.0.0.1:0") as plain, server_process("127.0.0.1:0", auth=auth) as secure:
        expected = (
            (plain, ours.trusted_by(), "the server does not use TLS"),
            (secure, None, "it may require TLS"),
            (secure, theirs.trusted_by(), "the server's certificate is not trusted"),
            (secure, ours.trusted_by(server_name="elsewhere.example"), "the server's certificate is for another name"),
        )
        errors = errors_of(*((server.addresses[0], tls) for server, tls, _ in expected))
        for (server, _, words), texts in zip(expected, errors, strict=True):
            for text in texts:
                assert text.startswith(server.addresses[0])
                assert words in text
