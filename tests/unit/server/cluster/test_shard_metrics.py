"""The metrics of a server of a shard, whose directory is in memory and whose standby is a connection of the test."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpool.server.cluster import events
from kvpool.server.cluster.directory import DirectoryError, VersionedRecord
from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.shard_member import ShardMember
from kvpool.server.cluster.shard_metrics import shard_metrics
from support.directory import member_of
from support.journal import kill
from support.memory_directory import MemoryDirectory, Store
from support.replicas import ReplicaServer, servers_of_a_shard, until
from support.shard_figures import shard_member

STANDBY, NEAR, FAR = map(member_of, ("standby", "near", "far"))


def values(member: ShardMember) -> dict[str, float]:
    """Samples by the rest of their names, and by the values of labels beside the shard."""
    found = {}
    for metric in shard_metrics(member):
        for each in metric.samples:
            labels = dict(each.labels)
            assert labels.pop("shard") == member.name
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


async def test_a_primary_is_alone_until_a_standby_is_in_sync(tmp_path: Path) -> None:
    store = Store()
    before = values(ReplicaServer(tmp_path / "starting", store).shard)
    assert (before["role starting"], before["term"], before["alone"], before["standbys_missing"]) == (1, 0, 0, 0)
    async with servers_of_a_shard(tmp_path, 1, store) as (primary,):
        alone = values(primary.shard)
        assert (alone["term"], alone["takeovers_total"], alone["in_sync_servers"], alone["alone"]) == (1, 1, 1, 1)
        assert alone["standbys_missing"] == 1
    async with servers_of_a_shard(tmp_path / "pair", 2, Store()) as (primary, _):
        paired = values(primary.shard)
        assert (paired["in_sync_servers"], paired["alone"], paired["standbys_connected"]) == (2, 0, 1)
        assert paired["sent_bytes_total"] > 0


async def test_a_wait_for_a_standby_is_measured_and_an_answer_without_one_is_not(tmp_path: Path) -> None:
    async with servers_of_a_shard(tmp_path, 1, Store()) as (primary,):
        shard = primary.shard
        await shard.gate.wait(None)
        before = values(shard)
        assert before["confirm_seconds_count"] == 0
        shard.step(events.StandbyConnected(STANDBY, resumes=True))
        shard.step(events.Acknowledged(STANDBY.member_id, shard.replica.last_position))  # awaited from now on
        shard.replicator.append(b"record")
        waiting = asyncio.create_task(shard.gate.wait(None))
        await asyncio.sleep(0)
        shard.step(events.Acknowledged(STANDBY.member_id, shard.replica.last_position))
        await waiting
        after = values(shard)
        assert after["confirm_seconds_count"] == 1
        assert after["records_total"] == before["records_total"] + 1


async def test_the_lag_is_of_the_standby_that_is_furthest_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ReplicaServer(tmp_path, Store())  # not started: it ticks when the test does
    shard, now_seconds = server.shard, 100.0
    shard.step(events.DirectoryRead(VersionedRecord(0, None)))
    await until(server.is_primary)
    monkeypatch.setattr("time.monotonic", lambda: now_seconds)
    first = shard.replicator.log.last_position
    for member in (NEAR, FAR):
        shard.step(events.StandbyConnected(member, resumes=True))
        shard.step(events.Acknowledged(member.member_id, first))
    for _ in range(3):
        shard.replicator.append(b"record")
    shard.tick()
    now_seconds = 102.0
    shard.step(events.Acknowledged(NEAR.member_id, first + 3))
    assert (values(shard)["lag_positions"], values(shard)["lag_seconds"]) == (3, 2.0)
    shard.tick()
    now_seconds = 103.0
    assert values(shard)["lag_seconds"] == 3.0
    shard.step(events.Acknowledged(FAR.member_id, first + 3))
    assert (values(shard)["lag_positions"], values(shard)["lag_seconds"]) == (0, 0.0)
    await shard.stop()
    kill(server.journal)


async def test_a_directory_that_is_down_is_found_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    went_down = asyncio.Event()

    async def watch(directory: MemoryDirectory) -> AsyncIterator[VersionedRecord]:
        yield await directory.get()
        await went_down.wait()
        raise DirectoryError("is down")

    monkeypatch.setattr(MemoryDirectory, "watch", watch)
    async with servers_of_a_shard(tmp_path, 1, Store()) as (primary,):
        primary.directory.is_up = False
        went_down.set()
        await until(lambda: not values(primary.shard)["directory_up"])
        went_down.clear()
        primary.directory.is_up = True
        await until(lambda: values(primary.shard)["directory_up"])
