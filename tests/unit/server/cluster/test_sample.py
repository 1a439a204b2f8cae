"""The figures of a server of a shard, whose directory is in memory and whose standby is a connection of the test."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from kvpool.core.state import State
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import DirectoryError, Entry, Member, MemberId, ShardName
from kvpool.server.cluster.identity import IdentityFile
from kvpool.server.cluster.messages import VERSION, Hello, acknowledgement, core_fingerprint, to_frame
from kvpool.server.cluster.sample import sample_shard
from kvpool.server.cluster.shard import Shard
from kvpool.server.cluster.shipper import FollowerLink
from support.journal import begin, journal_in
from support.memory_directory import MemoryDirectory, Store

WAIT_SECONDS: Final = 60.0
STANDBY: Final = Member(MemberId("standby"), ("b:1",), "b:2")


class _Directory(MemoryDirectory):
    """A directory whose watch ends with an error when it goes down."""

    def __init__(self) -> None:
        super().__init__(Store())
        self.went_down = asyncio.Event()

    async def watch(self, shard: ShardName) -> AsyncIterator[Entry]:
        yield await self.get(shard)
        await self.went_down.wait()
        raise DirectoryError("is down")


class _Transport(asyncio.Transport):
    """Takes what the primary sends."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.num_bytes += len(data)

    def abort(self) -> None:
        pass


class _Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def shard_in(folder: Path, directory: _Directory) -> Shard:
    journal = journal_in(folder)
    begin(journal)
    return Shard(
        ClusterConfig(url="etcd://e:2379/prod", shard="llama", replication_listen="127.0.0.1:1"),
        directory,
        IdentityFile(folder, "prod/llama"),
        journal,
        State,
        state_seconds=lambda: 0.0,
        addresses=("a:1",),
        server_tls=None,
        client_tls=None,
        check_token=None,
        on_primary=lambda *_: None,
        on_deposed=lambda _: None,
    )


async def until_changed(shard: Shard, wanted: str) -> None:
    """Waits until the server has a role."""
    async with asyncio.timeout(WAIT_SECONDS):
        while shard.replica.role.value != wanted:
            await shard.changed.wait()


async def test_a_primary_is_alone_until_a_standby_is_in_sync(tmp_path: Path) -> None:
    shard = shard_in(tmp_path, _Directory())
    before = sample_shard(shard)
    assert (before.shard, before.role, before.term, before.is_alone) == ("prod/llama", "starting", 0, False)
    shard.start()
    try:
        await until_changed(shard, "primary")
        alone = sample_shard(shard)
        assert (alone.term, alone.takeovers, alone.in_sync_servers, alone.is_alone) == (1, 1, 1, True)
        link, transport = FollowerLink(shard.shipper), _Transport()
        link.connection_made(transport)
        hello = Hello(VERSION, "prod/llama", core_fingerprint(), "", STANDBY, 1, 0, -1)
        link.data_received(to_frame(hello))
        async with asyncio.timeout(WAIT_SECONDS):
            while not link.is_live:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0)
            link.data_received(acknowledgement(shard.shipper.log.last_position))
            while len(shard.replica.in_sync) < 2:
                await shard.changed.wait()
        paired = sample_shard(shard)
        assert (paired.in_sync_servers, paired.is_alone, paired.standbys_connected) == (2, False, 1)
        assert paired.sent_bytes == transport.num_bytes > 0
    finally:
        await shard.stop()


async def test_a_wait_for_a_standby_is_measured_and_an_answer_without_one_is_not(tmp_path: Path) -> None:
    shard = shard_in(tmp_path, _Directory())
    shard.start()
    try:
        await until_changed(shard, "primary")
        await shard.gate.wait(None)
        assert sum(sample_shard(shard).confirm_seconds.counts) == 0
        shard.replica.follower_connected(STANDBY, resumes=True)
        shard.replica.acknowledged(STANDBY.member_id, shard.shipper.log.last_position)  # awaited from now on
        shard.shipper.append(b"record")
        waiting = asyncio.create_task(shard.gate.wait(None))
        await asyncio.sleep(0)
        shard.replica.acknowledged(STANDBY.member_id, shard.shipper.log.last_position)
        shard.gate.release()
        await waiting
        sample = sample_shard(shard)
        assert (sum(sample.confirm_seconds.counts), sample.records) == (1, 1)
        assert sample.confirm_seconds is not shard.gate.waits
    finally:
        await shard.stop()


async def test_the_lag_is_of_the_standby_that_is_furthest_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = shard_in(tmp_path, _Directory())  # not started: nothing is sent on its own
    clock = _Clock()
    shard.shipper.now_seconds = clock
    monkeypatch.setattr("kvpool.server.cluster.sample.time.monotonic", clock)
    links = {MemberId(name): FollowerLink(shard.shipper) for name in ("near", "far")}
    shard.shipper.links.update(links)
    near, far = links.values()
    for _ in range(3):
        shard.shipper.append(b"record")
    shard.shipper.measure_lags()
    clock.seconds = 102.0
    near.acknowledged = 2
    assert (sample_shard(shard).lag_positions, sample_shard(shard).lag_seconds) == (3, 2.0)
    shard.shipper.measure_lags()
    clock.seconds = 103.0
    assert sample_shard(shard).lag_seconds == 3.0
    far.acknowledged = 2
    assert (sample_shard(shard).lag_positions, sample_shard(shard).lag_seconds) == (0, 0.0)


async def test_a_directory_that_is_down_is_found_without_a_change(tmp_path: Path) -> None:
    directory = _Directory()
    shard = shard_in(tmp_path, directory)
    shard.start()
    try:
        await until_changed(shard, "primary")
        for is_up in (False, True):
            directory.is_up = is_up
            if is_up:
                directory.went_down.clear()
            else:
                directory.went_down.set()
            async with asyncio.timeout(WAIT_SECONDS):
                while sample_shard(shard).is_directory_up is not is_up:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.01)
    finally:
        await shard.stop()
