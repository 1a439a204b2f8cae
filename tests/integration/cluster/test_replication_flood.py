"""Connections to the replication port that introduce no standby: they are bounded, and keep no standby out."""

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from kvpool.server.auth.certificates import Certificates
from kvpool.server.auth.config import AuthConfig
from kvpool.server.cluster.replicator import MAX_PENDING
from kvpool.wire.acceptor import MAX_HANDSHAKES
from kvpool.wire.address import host_and_port
from support.auth import Authority
from support.flood import HALF_TLS_HELLO, flooded
from support.memory_directory import Store
from support.replicas import ReplicaServer, servers_of_a_shard
from support.waiting import DEADLINE_SECONDS, until

NUM_OPEN = 300


def num_connections(port: int) -> int:
    """Number of this process's sockets that a listener at a port has accepted."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            own.add(str(descriptor.readlink()))
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(line[1].endswith(f":{port:04X}") and line[3] != "0A" and f"socket:[{line[9]}]" in own for line in lines)


@pytest.mark.parametrize("first_bytes", [b"", HALF_TLS_HELLO], ids=["silent", "half-hello"])
@pytest.mark.parametrize("has_tls", [True, False], ids=["tls", "plaintext"])
async def test_a_flood_of_connections_is_bounded_and_keeps_no_standby_out(
    tmp_path: Path,
    first_bytes: bytes,
    has_tls: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    store, authority = Store(), Authority(tmp_path, "ours")
    pair = authority.issue("127.0.0.1")
    server_tls = Certificates(AuthConfig(pair.cert, pair.key)).new_context() if has_tls else None
    client_tls = ssl.create_default_context(cafile=authority.path) if has_tls else None
    async with servers_of_a_shard(tmp_path, 1, store, server_tls=server_tls) as (primary,):
        address = host_and_port("replication_address", primary.shard.me.replication_address)
        standby = ReplicaServer(tmp_path / "joins", store, client_tls=client_tls)
        # Of a flood that is refused at once, no count need see a connection: one that stays shows that it counts.
        _, writer = await asyncio.open_connection(*address)
        await until(lambda: num_connections(address[1]) == 1)
        writer.close()
        with flooded(address, first_bytes, NUM_OPEN) as flood:
            most = 0

            def is_full() -> bool:
                nonlocal most
                most = max(most, num_connections(address[1]))
                return flood.is_full.is_set()

            await until(is_full)
            try:
                await standby.start()
                await until(lambda: primary.num_in_sync() == 2)
            finally:
                await standby.die()
        assert most <= MAX_HANDSHAKES + MAX_PENDING + 8
        await until(lambda: num_connections(address[1]) == 0)


async def test_a_handshake_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.server.cluster.replicator.HANDSHAKE_SECONDS", 0.1)
    pair = Authority(tmp_path, "ours").issue("127.0.0.1")
    tls = Certificates(AuthConfig(pair.cert, pair.key)).new_context()
    async with servers_of_a_shard(tmp_path, 1, Store(), server_tls=tls) as (primary,):
        address = host_and_port("replication_address", primary.shard.me.replication_address)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HALF_TLS_HELLO)
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert await reader.read() == b""
        writer.close()


async def test_a_server_that_ends_closes_connections_in_a_handshake(tmp_path: Path) -> None:
    pair = Authority(tmp_path, "ours").issue("127.0.0.1")
    tls = Certificates(AuthConfig(pair.cert, pair.key)).new_context()
    async with servers_of_a_shard(tmp_path, 1, Store(), server_tls=tls) as (primary,):
        address = host_and_port("replication_address", primary.shard.me.replication_address)
        reader, writer = await asyncio.open_connection(*address)
        await until(lambda: num_connections(address[1]) == 1)
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await reader.read() == b""
    writer.close()
