"""Errors of servers that cannot be reached name the address and the reason."""

import asyncio
from pathlib import Path

import pytest

from kvpool.client import TlsConfig, UnavailableError, aio, connect
from kvpool.client.admin import AdminClient
from support.auth import Authority
from support.server import free_port, server_process


def errors_of(address: str, tls: TlsConfig | None) -> list[str]:
    """The errors of the three clients."""

    async def asynchronous() -> None:
        async with aio.connect(address, tls=tls, deadline_seconds=1.0) as client:
            await client.get_pool("m")

    texts = []
    with connect(address, tls=tls, deadline_seconds=1.0) as client, AdminClient(address, tls=tls) as admin:
        for call in (lambda: client.get_pool("m"), admin.overview, lambda: asyncio.run(asynchronous())):
            with pytest.raises(UnavailableError) as caught:
                call()
            texts.append(str(caught.value))
    return texts


def test_an_address_where_nothing_listens(tmp_path: Path) -> None:
    for address, words in {
        f"127.0.0.1:{free_port()}": "nothing listens there",
        f"unix:{tmp_path / 'none'}": "there is no such socket",
    }.items():
        for text in errors_of(address, None):
            assert text.startswith(f"{address}: {words} (")


def test_tls_that_does_not_match(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    pair = ours.issue("localhost", "127.0.0.1")
    auth = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    with server_process("127.0.0.1:0") as plain, server_process("127.0.0.1:0", auth=auth) as secure:
        for server, tls, words in (
            (plain, ours.trusted_by(), "the server does not use TLS"),
            (secure, None, "it may require TLS"),
            (secure, theirs.trusted_by(), "the server's certificate is not trusted"),
            (secure, ours.trusted_by(server_name="elsewhere.example"), "the server's certificate is for another name"),
        ):
            for text in errors_of(server.addresses[0], tls):
                assert text.startswith(server.addresses[0])
                assert words in text
