"""The metrics of a server of a shard, whose directory is in memory and whose standby is a connection of the test."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from kvpool.core.state import State
from kvpool.server.cluster import events
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import DirectoryError, Member, MemberId, VersionedRecord
from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.identity import IdentityFile
from kvpool.server.cluster.member_settings import MemberSettings
from kvpool.server.cluster.messages import VERSION, Hello, acknowledgement, core_fingerprint, to_frame
from kvpool.server.cluster.replicated_state import ReplicatedState
from kvpool.server.cluster.replicator import StandbyConnection
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.cluster.shard_metrics import shard_metrics
from support.directory import member_of
from support.journal import begin, journal_in
from support.memory_directory import MemoryDirectory, Store
from support.replicas import NoServer, StoppedClock
from support.shard_figures import shard_member

WAIT_SECONDS: Final = 60.0
STANDBY: Final = Member(MemberId("standby"), ("b:1",), "b:2")


class _Directory(MemoryDirectory):
    """A directory whose watch ends with an error when it goes down."""

    def __init__(self) -> None:
        super().__init__(Store())
        self.went_down = asyncio.Event()

    async def watch(self) -> AsyncIterator[VersionedRecord]:
        yield await self.get()
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


def member_in(folder: Path, directory: _Directory) -> ShardMember:
    journal = journal_in(folder)
    begin(journal)
    config = ClusterConfig(url="etcd://e:2379/llama", replication_listen="127.0.0.1:1")
    identity = IdentityFile(folder, "llama")
    settings = MemberSettings(config, "llama", Member(identity.identity.member_id, ("a:1",), "a:2"))
    return ShardMember(settings, directory, identity, ReplicatedState(journal, State, StoppedClock()), NoServer())


def values(member: ShardMember) -> dict[str, float]:
    """Samples by the rest of their names, and by the values of labels beside the shard."""
    found = {}
    for metric in shard_metrics(member):
        for each in metric.samples:
            labels = dict(each.labels)
            assert labels.pop("shard") == "llama"
            found[" ".join((each.name.removeprefix("kvpool_shard_"), *labels.values()))] = each.value
    return found


def test_every_sample_has_its_figure() -> None:
    exported = values(shard_member())
    assert {name: value for name, value in exported.items() if " " not in name} == {
        "term": 7,
        "in_sync_servers": 2,
        "alone": 0,
        "standbys_missing": 1,
        "takeovers_total": 1,
        "standbys_connected": 1,
        "lag_positions": 3,
        "lag_seconds": 0.2,
        "records_total": 11,
        "sent_bytes_total": 1300,
        "directory_up": 1,
        "confirm_seconds_count": 1,
        "confirm_seconds_sum": 0.5,
    }
    assert [exported[f"confirm_seconds_bucket {bound}"] for bound in ("0.001", "1.0", "+Inf")] == [0, 1, 1]
    assert exported["state_lost_total no_state"] == 1
    assert exported["state_lost_total difference"] == 0


def test_one_role_is_one_and_the_others_are_zero() -> None:
    for role in Role:
        exported = values(shard_member(role))
        assert [exported[f"role {each.value}"] for each in Role] == [each is role for each in Role]


async def until_changed(shard: ShardMember, wanted: str) -> None:
    """Waits until the server has a role."""
    async with asyncio.timeout(WAIT_SECONDS):
        while shard.replica.role.value != wanted:
            await shard.changed.wait()


async def test_a_primary_is_alone_until_a_standby_is_in_sync(tmp_path: Path) -> None:
    shard = member_in(tmp_path, _Directory())
    before = values(shard)
    assert (before["role starting"], before["term"], before["alone"], before["standbys_missing"]) == (1, 0, 0, 0)
    shard.start()
    try:
        await until_changed(shard, "primary")
        alone = values(shard)
        assert (alone["term"], alone["takeovers_total"], alone["in_sync_servers"], alone["alone"]) == (1, 1, 1, 1)
        assert alone["standbys_missing"] == 1
        connection, transport = StandbyConnection(shard.replicator), _Transport()
        connection.connection_made(transport)
        hello = Hello(VERSION, "llama", core_fingerprint(), "", STANDBY, 1, 0, -1)
        connection.data_received(to_frame(hello))
        async with asyncio.timeout(WAIT_SECONDS):
            while not connection.is_live:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0)
            connection.data_received(acknowledgement(shard.replicator.log.last_position))
            while len(shard.replica.in_sync) < 2:
                await shard.changed.wait()
        paired = values(shard)
        assert (paired["in_sync_servers"], paired["alone"], paired["standbys_connected"]) == (2, 0, 1)
        assert paired["sent_bytes_total"] == transport.num_bytes > 0
    finally:
        await shard.stop()


async def test_a_wait_for_a_standby_is_measured_and_an_answer_without_one_is_not(tmp_path: Path) -> None:
    shard = member_in(tmp_path, _Directory())
    shard.start()
    try:
        await until_changed(shard, "primary")
        await shard.gate.wait(None)
        assert values(shard)["confirm_seconds_count"] == 0
        shard.step(events.StandbyConnected(STANDBY, resumes=True))
        shard.step(events.Acknowledged(STANDBY.member_id, shard.replica.last_position))  # awaited from now on
        shard.replicator.append(b"record")
        waiting = asyncio.create_task(shard.gate.wait(None))
        await asyncio.sleep(0)
        shard.step(events.Acknowledged(STANDBY.member_id, shard.replica.last_position))
        await waiting
        assert (values(shard)["confirm_seconds_count"], values(shard)["records_total"]) == (1, 1)
    finally:
        await shard.stop()


async def test_the_lag_is_of_the_standby_that_is_furthest_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = member_in(tmp_path, _Directory())  # not started: it ticks when the test does
    now_seconds = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_seconds)
    shard.step(events.DirectoryRead(VersionedRecord(0, None)))
    await until_changed(shard, "primary")
    near, far = member_of("near"), member_of("far")
    for member in (near, far):
        shard.step(events.StandbyConnected(member, resumes=True))
    for _ in range(3):
        shard.replicator.append(b"record")
    shard.tick()
    now_seconds = 102.0
    shard.step(events.Acknowledged(near.member_id, 2))
    assert (values(shard)["lag_positions"], values(shard)["lag_seconds"]) == (3, 2.0)
    shard.tick()
    now_seconds = 103.0
    assert values(shard)["lag_seconds"] == 3.0
    shard.step(events.Acknowledged(far.member_id, 2))
    assert (values(shard)["lag_positions"], values(shard)["lag_seconds"]) == (0, 0.0)
    await shard.stop()


async def test_a_directory_that_is_down_is_found_without_a_change(tmp_path: Path) -> None:
    directory = _Directory()
    shard = member_in(tmp_path, directory)
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
                while values(shard)["directory_up"] != is_up:  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(0.01)
    finally:
        await shard.stop()
