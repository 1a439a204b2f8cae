"""Standbys connect over TLS, and verify the primary."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpool.core.errors import DeniedError
from kvpool.server.auth.certificates import Certificates
from kvpool.server.auth.config import AuthConfig
from kvpool.server.cluster import events
from support.auth import Authority, Pair
from support.core import config
from support.journal import Traffic
from support.memory_directory import Store
from support.replicas import ReplicaServer, servers_of_a_shard
from support.waiting import until


@pytest.fixture(name="authority")
def fixture_authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def server_tls(authority: Authority, name: str = "127.0.0.1") -> ssl.SSLContext:
    return context_of(authority.issue(name))


def context_of(pair: Pair) -> ssl.SSLContext:
    return Certificates(AuthConfig(pair.cert, pair.key)).new_context()


def client_tls(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.path)


@pytest.fixture(name="store")
async def fixture_store() -> Store:
    return Store()


@pytest.fixture(name="primary")
async def fixture_primary(tmp_path: Path, authority: Authority, store: Store) -> AsyncIterator[ReplicaServer]:
    async with servers_of_a_shard(tmp_path, 1, store, server_tls=server_tls(authority)) as (server,):
        yield server


async def test_records_are_replicated_over_tls(
    tmp_path: Path, authority: Authority, store: Store, primary: ReplicaServer
) -> None:
    traffic = Traffic(primary.state, config(60), seed=1)
    for _ in range(20):
        traffic.change()
    standby = ReplicaServer(tmp_path / "joins", store, client_tls=client_tls(authority))
    try:
        await standby.start()
        await until(lambda: primary.num_in_sync() == 2)
        for _ in range(50):
            traffic.change()
        await primary.shard.gate.wait(None)
        assert await standby.encoded() == await primary.encoded()
    finally:
        await standby.die()


async def test_a_new_connection_gets_the_certificate_of_that_time(
    tmp_path: Path, authority: Authority, store: Store
) -> None:
    pair, later = authority.issue("127.0.0.1"), Authority(tmp_path, "later")
    async with servers_of_a_shard(tmp_path, 1, store, server_tls=context_of(pair)) as (primary,):
        standby = ReplicaServer(tmp_path / "before", store, client_tls=client_tls(authority))
        await standby.start()
        await until(lambda: primary.num_in_sync() == 2)
        renewed = later.issue("127.0.0.1")
        renewed.key.replace(pair.key)
        renewed.cert.replace(pair.cert)
        joins = ReplicaServer(tmp_path / "joins", store, client_tls=client_tls(later))
        await joins.start()
        await until(lambda: primary.num_in_sync() == 3)  # open connections stay
        await joins.die()
        await standby.die()


async def refused(standby: ReplicaServer, primary: ReplicaServer, caplog: pytest.LogCaptureFixture) -> None:
    """Checks that a standby tries again and again, and never follows."""
    lost, step = 0, standby.shard.step

    def count(event: events.Event) -> None:
        nonlocal lost
        lost += isinstance(event, events.StreamLost)
        step(event)

    standby.shard.step = count  # type: ignore[method-assign]
    try:
        with caplog.at_level("INFO", "kvpool.server.cluster"):
            await standby.start()
            await until(lambda: lost >= 3)
    finally:
        await standby.die()
    assert "standby connected" not in caplog.messages
    assert primary.num_in_sync() == 1
    assert not standby.shard.replica.has_state


async def test_a_standby_without_tls_is_not_served(
    tmp_path: Path, store: Store, primary: ReplicaServer, caplog: pytest.LogCaptureFixture
) -> None:
    await refused(ReplicaServer(tmp_path / "joins", store), primary, caplog)


async def test_a_standby_of_another_authority_does_not_follow(
    tmp_path: Path, store: Store, primary: ReplicaServer, caplog: pytest.LogCaptureFixture
) -> None:
    tls = client_tls(Authority(tmp_path, "theirs"))
    await refused(ReplicaServer(tmp_path / "joins", store, client_tls=tls), primary, caplog)


async def test_a_primary_with_the_certificate_of_another_host_is_not_followed(
    tmp_path: Path, authority: Authority, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    tls = server_tls(authority, "elsewhere.example")
    async with servers_of_a_shard(tmp_path, 1, store, server_tls=tls) as (primary,):
        await refused(ReplicaServer(tmp_path / "joins", store, client_tls=client_tls(authority)), primary, caplog)


async def test_a_primary_without_tls_is_not_followed(
    tmp_path: Path, authority: Authority, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """It must not get the token of the standby."""
    tokens: list[str] = []

    class Tokens:
        """Refuses each token."""

        def check_standby(self, token: str) -> None:
            tokens.append(token)
            raise DeniedError("ROLE", "no")

    async with servers_of_a_shard(tmp_path, 1, store, tokens=Tokens()) as (primary,):
        await refused(ReplicaServer(tmp_path / "joins", store, client_tls=client_tls(authority)), primary, caplog)
        await asyncio.sleep(0)
    assert not tokens
