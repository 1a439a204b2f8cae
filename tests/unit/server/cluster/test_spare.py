"""Spares, and the primaries that admit and dismiss them: real sockets and journals, with a directory in memory."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvpool.core.errors import ExhaustedError, WrongStateError
from kvpool.server.cluster import spare as spare_module
from kvpool.server.cluster.cluster_view import ClusterView
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import Entry, MemberId, ShardName, ShardRecord
from kvpool.server.cluster.identity import Identity, IdentityFile, read_identity, write_identity
from kvpool.server.cluster.messages import VERSION, Hello
from kvpool.server.cluster.replica import NOTHING, Role
from kvpool.server.cluster.sample import sample_spare
from kvpool.server.cluster.spare import Spare, forget_shard
from kvpool.server.cluster.standbys import PROMISE_SECONDS
from support.directory import member_of
from support.journal import begin, journal_in, kill
from support.memory_directory import MemoryDirectory, Store
from support.replicas import SHARD, ReplicaServer, servers_of_a_shard, until

ME = member_of("spare")
OTHER = MemberId("other")
CONFIG = ClusterConfig(url="etcd://127.0.0.1:1/test", replication_listen="127.0.0.1:1", spare=True, adopt_seconds=0)


@pytest.fixture(name="store")
async def fixture_store() -> Store:
    return Store()


@pytest.fixture(autouse=True)
def fixture_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are read, and primaries asked, without pauses."""
    monkeypatch.setattr(spare_module, "POLL_SECONDS", (0.0, 0.01))
    monkeypatch.setattr("kvpool.server.cluster.shard_choice.FIRST_PAUSE_SECONDS", 0.01)


@asynccontextmanager
async def waiting_spare(folder: Path, store: Store, **settings: Any) -> AsyncIterator[tuple[Spare, asyncio.Task[None]]]:
    view, directory = ClusterView(), MemoryDirectory(store)
    spare = Spare(replace(CONFIG, **settings), view, directory, ME, folder, tls=None)
    adopting, following = asyncio.create_task(spare.adopt()), asyncio.create_task(view.follow(directory))
    try:
        yield spare, adopting
    finally:
        for task in (adopting, following):
            task.cancel()
        await asyncio.gather(adopting, following, return_exceptions=True)
        await spare.close()


def joining_spare(folder: Path, store: Store, **settings: Any) -> ReplicaServer:
    """A spare that has adopted the shard."""
    return ReplicaServer(folder, store, **{"spare": True, "adopt_seconds": 0, **settings})


# The spare


async def test_a_spare_adopts_a_shard_that_has_no_standby(tmp_path: Path, store: Store) -> None:
    async with servers_of_a_shard(tmp_path, 1, store) as (primary,):
        async with waiting_spare(tmp_path / "spare", store) as (_, adopting), asyncio.timeout(60):
            await adopting
        identity = Identity(f"test/{SHARD}", ME.member_id, 1)
        assert read_identity(tmp_path / "spare") == identity
        assert primary.num_in_sync() == 1
        spare = joining_spare(tmp_path / "spare", store)
        assert spare.shard.me.member_id == ME.member_id
        try:
            await spare.start()
            await until(lambda: primary.num_in_sync() == 2)
            assert not spare.shard.released.is_set()
        finally:
            await spare.die()


async def test_a_spare_writes_nothing_while_it_waits(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with servers_of_a_shard(tmp_path, 2, store) as (primary, _):
        num_changes = len(store.history)
        refused = asyncio.Event()
        primary.shard.shipper._check = lambda _: refuse(refused)
        async with waiting_spare(tmp_path / "spare", store) as (_, adopting):
            for _ in range(3):
                await asyncio.wait_for(refused.wait(), 60)
                refused.clear()
            assert not adopting.done()
        assert len(store.history) == num_changes
    assert read_identity(tmp_path / "spare") is None
    assert not [record for record in caplog.records if "refused" in record.message or "adopted" in record.message]


def refuse(refused: asyncio.Event) -> None:
    refused.set()
    raise ExhaustedError("ENOUGH_STANDBYS", "enough")


async def test_a_primary_that_does_not_answer_is_logged_once(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with servers_of_a_shard(tmp_path, 1, store) as (primary,):
        dead = replace(primary.shard.me, replication_address="127.0.0.1:1")
        store.put(ShardName("dead"), ShardRecord(1, dead.member_id, (dead,), "c"))
        primary.shard.shipper._check = lambda _: refuse(asyncio.Event())
        async with waiting_spare(tmp_path / "spare", store) as (spare, _):
            await until(lambda: num_refusals(spare) > 2)
        assert caplog.messages.count("shard not adopted") == 1


def num_refusals(spare: Spare) -> int:
    """How often each of two shards was asked in vain."""
    refusals = [shard.num_refusals for shard in spare._choice._shards.values()]
    return min(refusals) if len(refusals) == 2 else 0


async def test_a_directory_that_is_down_is_logged_once_and_the_spare_waits(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    spares = waiting_spare(tmp_path / "spare", store)
    async with servers_of_a_shard(tmp_path, 1, store) as (primary,), spares as (spare, adopting):
        shipper, asked = primary.shard.shipper, asyncio.Event()
        check, shipper._check = shipper._check, lambda _: refuse(asked)
        await asyncio.wait_for(asked.wait(), 60)
        spare.view.error = "down"
        shipper._check = check
        await until(lambda: "directory cannot be used" in caplog.messages)
        assert not sample_spare(spare).is_directory_up
        assert not adopting.done()
        store.notify()  # the view reads all again
        async with asyncio.timeout(60):
            await adopting
        assert sample_spare(spare).is_directory_up
    assert [message for message in caplog.messages if "directory" in message] == [
        "directory cannot be used",
        "directory works again",
    ]


async def test_a_spare_waits_until_the_shard_has_lacked_a_standby_for_a_while(tmp_path: Path, store: Store) -> None:
    spares = waiting_spare(tmp_path / "spare", store, adopt_seconds=3600)
    async with servers_of_a_shard(tmp_path, 1, store), spares as (spare, adopting):
        await until(lambda: spare._choice._shards)
        assert not adopting.done()


async def test_a_spare_that_cannot_write_adopts_nothing(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(spare_module, "write_identity", fail)
    async with servers_of_a_shard(tmp_path, 1, store), waiting_spare(tmp_path / "spare", store) as (_, adopting):
        await until(lambda: "shard not adopted" in caplog.messages)
        assert not adopting.done()
        monkeypatch.undo()
        async with asyncio.timeout(60):
            await adopting


async def test_the_folder_of_a_spare_is_locked_and_has_no_journal_of_a_server_alone(
    tmp_path: Path, store: Store
) -> None:
    async with waiting_spare(tmp_path / "spare", store):
        with pytest.raises(OSError, match="another server uses the journal"):
            Spare(CONFIG, ClusterView(), MemoryDirectory(store), ME, tmp_path / "spare", tls=None)
    journal = journal_in(tmp_path / "alone")
    begin(journal)
    kill(journal)
    before = sorted(path.name for path in (tmp_path / "alone").iterdir())
    for _ in range(2):
        with pytest.raises(OSError, match=r"^journal: .* without a shard"):
            Spare(CONFIG, ClusterView(), MemoryDirectory(store), ME, tmp_path / "alone", tls=None)
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == before


def test_nothing_of_a_shard_that_was_left_remains(tmp_path: Path) -> None:
    write_identity(tmp_path, Identity("test/main", ME.member_id, 1))
    journal = journal_in(tmp_path)
    begin(journal)
    kill(journal)
    forget_shard(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["lock"]


# The primary


def asking(member_id: MemberId, core: str = "") -> Hello:
    member = replace(ME, member_id=member_id)
    return Hello(VERSION, f"test/{SHARD}", core, "", member, 1, 0, NOTHING, is_spare=True, asks=True)


async def test_a_primary_admits_as_many_spares_as_standbys_are_missing(tmp_path: Path, store: Store) -> None:
    async with servers_of_a_shard(tmp_path, 2, store, standbys=2) as (primary, standby):
        standbys = primary.shard.standbys
        assert standbys.num_missing == 1
        standbys.check_spare(asking(ME.member_id), 100.0)
        standbys.check_spare(asking(ME.member_id), 101.0)
        with pytest.raises(ExhaustedError, match="2 standbys") as caught:
            standbys.check_spare(asking(OTHER), 102.0)
        assert caught.value.reason == "ENOUGH_STANDBYS"
        standbys.check_spare(asking(standby.shard.me.member_id), 103.0)  # its state may be needed
        standbys.check_spare(asking(OTHER), 101.0 + PROMISE_SECONDS)
        standbys.check_spare(replace(asking(OTHER), asks=False), 102.0 + PROMISE_SECONDS)  # it connects
        standbys.check_spare(asking(ME.member_id), 102.0 + PROMISE_SECONDS)


async def test_a_spare_of_another_version_gets_no_place_and_is_no_successor(tmp_path: Path, store: Store) -> None:
    async with servers_of_a_shard(tmp_path, 1, store) as (primary,):
        with pytest.raises(WrongStateError) as caught:
            primary.shard.admission.check(asking(ME.member_id, "other"))
        assert caught.value.reason == "OTHER_VERSION"
        assert not await primary.shard.hand_overs.run(lambda: None, lambda: None)
        primary.shard.standbys.check_spare(asking(OTHER), 100.0)  # the only place is free


async def test_an_adopted_spare_of_another_version_waits_for_the_hand_over(tmp_path: Path, store: Store) -> None:
    async with servers_of_a_shard(tmp_path, 1, store):
        spare = joining_spare(tmp_path / "spare", store, adopt_seconds=60)
        kill(spare.journal)
        spare.shard._of_use_seconds = 0.0
        spare.shard.replica.role = Role.STANDBY
        spare.shard._refused("OTHER_VERSION")
        spare.shard._look_for_silence(time.monotonic())
        assert not spare.shard.released.is_set()
        spare.shard._look_for_silence(time.monotonic() + 61)
        assert spare.shard.released.is_set()


async def test_others_than_spares_are_always_admitted(tmp_path: Path, store: Store) -> None:
    async with servers_of_a_shard(tmp_path, 3, store) as (primary, *_):
        assert (primary.num_in_sync(), primary.shard.standbys.num_missing) == (3, 0)


async def test_a_spare_too_many_is_refused_and_leaves(tmp_path: Path, store: Store) -> None:
    async with servers_of_a_shard(tmp_path, 2, store) as (primary, _):
        spare = joining_spare(tmp_path / "spare", store)
        try:
            await spare.start()
            async with asyncio.timeout(60):
                await spare.shard.released.wait()
            assert primary.num_in_sync() == 2
            assert await spare.shard.leave()
        finally:
            await spare.die()


async def test_a_spare_is_dismissed_when_the_standby_is_back(tmp_path: Path, store: Store) -> None:
    async with servers_of_a_shard(tmp_path, 1, store, adopt_seconds=0) as (primary,):
        spare, standby = joining_spare(tmp_path / "spare", store), ReplicaServer(tmp_path / "standby", store)
        try:
            await spare.start()
            await until(lambda: primary.num_in_sync() == 2)
            await standby.start()
            async with asyncio.timeout(60):
                await spare.shard.released.wait()
            assert await spare.shard.leave()
            assert {member.member_id for member in primary.shard.replica.in_sync} == {
                server.shard.me.member_id for server in (primary, standby)
            }
            assert all(len(record.in_sync) > 1 for record in store.history[2:])
        finally:
            await spare.die()
            await standby.die()


async def test_a_spare_that_is_the_only_standby_or_not_too_long_one_too_many_stays(
    tmp_path: Path, store: Store
) -> None:
    async with servers_of_a_shard(tmp_path, 1, store, adopt_seconds=3600) as (primary,):
        spare, standby = joining_spare(tmp_path / "spare", store), ReplicaServer(tmp_path / "standby", store)
        standbys = primary.shard.standbys
        try:
            await spare.start()
            await until(lambda: primary.num_in_sync() == 2)
            assert standbys.dismiss_surplus(1e9) == standbys.dismiss_surplus(2e9) == []
            await standby.start()
            await until(lambda: primary.num_in_sync() == 3)
            assert standbys.dismiss_surplus(3e9) == []
            assert standbys.dismiss_surplus(3e9 + 3599) == []
            assert standbys.dismiss_surplus(3e9 + 3600)
        finally:
            await spare.die()
            await standby.die()


async def test_a_primary_hands_over_to_a_server_of_the_shard_rather_than_to_a_spare(
    tmp_path: Path, store: Store
) -> None:
    async with servers_of_a_shard(tmp_path, 1, store) as (primary,):
        spare, standby = joining_spare(tmp_path / "spare", store), ReplicaServer(tmp_path / "standby", store)
        try:
            for number, server in enumerate((spare, standby), start=2):
                await server.start()
                await until(partial(primary.has_in_sync, number))
            assert await primary.shard.hand_overs.run(lambda: None, lambda: None)
            await until(standby.is_primary)
        finally:
            await spare.die()
            await standby.die()


async def test_a_spare_that_finds_no_primary_before_it_has_a_state_leaves(tmp_path: Path, store: Store) -> None:
    async with servers_of_a_shard(tmp_path, 1, store) as (primary,):
        await primary.die()
        spare = joining_spare(tmp_path / "spare", store, adopt_seconds=0.3)
        try:
            await spare.start()
            async with asyncio.timeout(60):
                await spare.shard.released.wait()
            assert await spare.shard.leave()
        finally:
            await spare.die()


async def test_a_spare_with_a_state_waits_for_its_primary(tmp_path: Path, store: Store) -> None:
    """Its state may be the only one."""
    async with servers_of_a_shard(tmp_path, 2, store) as (_, standby):
        await until(lambda: standby.journal.counts.is_up)
        await standby.die()
        spare = joining_spare(standby.folder, store)
        assert spare.shard.replica.has_state
        spare.shard._look_for_silence(1e9)
        assert not spare.shard.released.is_set()
        kill(spare.journal)


async def test_the_state_of_a_member_is_kept_and_so_it_is_when_the_directory_is_down(
    tmp_path: Path, store: Store
) -> None:
    async with servers_of_a_shard(tmp_path, 2, store) as (_, standby):
        standby.directory.is_up = False
        assert not await standby.shard.leave()
        standby.directory.is_up = True
        assert not await standby.shard.leave()
        store.entries[SHARD] = Entry(99, None)
        assert not await standby.shard.leave()


def test_a_spare_of_another_cluster_is_refused(tmp_path: Path) -> None:
    write_identity(tmp_path, Identity("elsewhere/main", ME.member_id, 1))
    with pytest.raises(OSError, match="belongs to shard elsewhere/main"):
        IdentityFile(tmp_path, "test/main")
