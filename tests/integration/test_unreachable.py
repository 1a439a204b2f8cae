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


def test_the_reason_is_stated(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    pair = ours.issue("localhost", "127.0.0.1")
    auth = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    with server_process("127.0.0.1:0") as plain, server_process("127.0.0.1:0", auth=auth) as secure:
        expected = (
            (f"127.0.0.1:{free_port()}", None, ": nothing listens there ("),
            (f"unix:{tmp_path / 'none'}", None, ": there is no such socket ("),
            (plain.addresses[0], ours.trusted_by(), "the server does not use TLS"),
            (secure.addresses[0], None, "it may require TLS"),
            (secure.addresses[0], theirs.trusted_by(), "the server's certificate is not trusted"),
            (secure.addresses[0], ours.trusted_by(server_name="elsewhere.example"), "certificate is for another name"),
        )
        errors = errors_of(*((address, tls) for address, tls, _ in expected))
        for (address, _, words), texts in zip(expected, errors, strict=True):
            for text in texts:
                assert text.startswith(address)
                assert words in text
