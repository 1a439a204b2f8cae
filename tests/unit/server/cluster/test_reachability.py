"""Probes of the servers of other shards, with real sockets."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.server.cluster import reachability
from kvpool.server.cluster.directory import ShardName
from kvpool.server.cluster.reachability import Probes, reachable_address
from support.listeners import listening, record_at, refusing, silent

SHARD = ShardName("s")
LIMIT_SECONDS = 60.0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server counts as lost because the machine is slow."""
    monkeypatch.setattr(reachability, "PROBE_SECONDS", LIMIT_SECONDS)


@pytest.fixture
def addresses() -> Iterator[tuple[str, str, str]]:
    """An address that accepts connections, one that refuses them, and one that does not answer."""
    with listening() as accepting, refusing() as closed, silent() as lost:
        yield accepting, closed, lost


async def test_one_member_that_accepts_a_connection_is_enough(addresses: tuple[str, str, str]) -> None:
    accepting, closed, lost = addresses
    for record in (
        record_at(accepting),
        record_at(accepting, closed),
        record_at(closed, accepting),
        record_at(lost, closed, accepting),
    ):
        assert await reachable_address(record, LIMIT_SECONDS) == accepting
    (member,) = record_at(closed).in_sync
    several = replace(record_at(closed), in_sync=(replace(member, addresses=(lost, closed, accepting)),))
    assert await reachable_address(several, LIMIT_SECONDS) == accepting


async def test_a_shard_whose_members_refuse_or_do_not_answer(addresses: tuple[str, str, str]) -> None:
    _, closed, lost = addresses
    assert await reachable_address(record_at(closed), LIMIT_SECONDS) is None
    assert await reachable_address(record_at(closed, lost), 0.2) is None


async def test_a_server_that_was_busy_until_the_limit_takes_the_connection(
    addresses: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "LATE_SECONDS", LIMIT_SECONDS)
    accepting, _, lost = addresses
    probing = asyncio.create_task(reachable_address(record_at(lost, accepting), 0.01))
    for _ in range(2):  # the search begins, then the attempts that it awaits
        await asyncio.sleep(0)
    time.sleep(0.02)  # noqa: ASYNC251 - the loop is busy
    assert await probing == accepting


async def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    assert await reachable_address(record_at(f"unix:{path}"), LIMIT_SECONDS) is None
    async with await asyncio.start_unix_server(lambda _, writer: writer.close(), path):
        assert await reachable_address(record_at(f"unix:{path}"), LIMIT_SECONDS) == f"unix:{path}"


@pytest.mark.parametrize("address", ["", "h", "h:99999", f"{'h' * 70}:1", "unix:relative"])
async def test_a_malformed_address_is_not_reachable(address: str) -> None:
    assert await reachable_address(record_at(address), LIMIT_SECONDS) is None


@pytest.mark.usefixtures("patient")
async def test_calls_at_the_same_time_share_a_probe() -> None:
    ports = asyncio.Queue[int]()

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ports.put_nowait(writer.get_extra_info("peername")[1])
        writer.close()

    async with await asyncio.start_server(accepted, "127.0.0.1", 0) as server, asyncio.timeout(60):
        host, port = server.sockets[0].getsockname()
        record, probes = record_at(f"{host}:{port}"), Probes()
        gone = asyncio.create_task(probes.is_reachable(SHARD, record))
        await asyncio.sleep(0)
        gone.cancel()
        assert await asyncio.gather(*(probes.is_reachable(SHARD, record) for _ in range(50))) == [True] * 50
        await ports.get()
        _, last = await asyncio.open_connection(host, port)
        assert await ports.get() == last.get_extra_info("sockname")[1], "there was one connection before"
        last.close()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        assert await probes.is_reachable(SHARD, record), "each later call probes again"
        await ports.get()
