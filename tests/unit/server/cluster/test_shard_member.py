"""Tests of cluster/shard_member.py: which standbys it accepts, and what it does with the directory."""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.core.errors import KvpoolError, NotPrimaryError, UnauthenticatedError
from kvpool.server.cluster import events
from kvpool.server.cluster.directory import MAX_MEMBERS, Member, MemberId, Seen, ShardRecord
from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.identity import IdentityFile, read_identity
from kvpool.server.cluster.messages import Hello, core_fingerprint, hello
from kvpool.server.cluster.standbys import NOTHING, Standby
from kvpool.wire.address import host_and_port
from support.journal import kill
from support.memory_directory import Store
from support.replicas import SHARD, PlayedStandby, ReplicaServer, servers_of_a_shard, until

OTHER = Member(MemberId("other"), ("other:1",), "127.0.0.1:1")
KNOWN = "good"
HELLO = Hello(SHARD, core_fingerprint(), OTHER, 1, 0, NOTHING)


class Tokens:
    """Knows one token."""

    def check_standby(self, token: str) -> None:
        if token != KNOWN:
            raise UnauthenticatedError("UNKNOWN_TOKEN", "the standby's token is not valid here")


@pytest.fixture(name="store")
async def fixture_store() -> Store:
    return Store()


@pytest.fixture(name="primary")
async def fixture_primary(tmp_path: Path, store: Store) -> AsyncIterator[ReplicaServer]:
    async with servers_of_a_shard(tmp_path, 1, store, tokens=Tokens()) as (server,):
        yield server


@contextlib.asynccontextmanager
async def joining(tmp_path: Path, store: Store, **settings: Any) -> AsyncIterator[ReplicaServer]:
    """A server that begins to join the shard."""
    server = ReplicaServer(tmp_path / "joins", store, **settings)
    await server.start()
    try:
        yield server
    finally:
        await server.die()


def reason_of(server: ReplicaServer, said: Hello, token: str = KNOWN) -> str:
    with pytest.raises(KvpoolError) as caught:
        server.shard.check.check(token, said)
    return caught.value.reason


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (replace(HELLO, core="other"), "OTHER_VERSION"),
        (replace(HELLO, shard="other"), "OTHER_SHARD"),
        (replace(HELLO, term=2), "NOT_PRIMARY"),
        (replace(HELLO, term=0), "NOT_PRIMARY"),
    ],
)
async def test_another_server_is_refused(primary: ReplicaServer, said: Hello, reason: str) -> None:
    assert reason_of(primary, said) == reason
    assert reason_of(primary, said, "") == "UNKNOWN_TOKEN", "the token first"


async def test_a_copy_of_the_journal_of_the_primary_is_refused(primary: ReplicaServer) -> None:
    assert reason_of(primary, replace(HELLO, member=replace(OTHER, member_id=primary.shard.me.member_id))) == (
        "SAME_MEMBER"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("member_id", ""),
        ("member_id", "m" * 3000),
        ("member_id", "\n"),
        ("addresses", ()),
        ("addresses", ("other:1", "")),
        ("addresses", ("other",)),
        ("addresses", ("\0:1",)),
        ("addresses", ("other:1",) * 100),
        ("replication_address", ""),
        ("replication_address", f"{'other' * 200}:1"),
    ],
)
async def test_a_member_that_no_record_can_hold_is_refused_and_changes_nothing(
    primary: ReplicaServer, field: str, value: Any
) -> None:
    record, directory = primary.shard.replica.entry, primary.shard.directory
    address = host_and_port("replication_address", primary.shard.me.replication_address)
    connection = PlayedStandby(*await asyncio.open_connection(*address))
    connection.send(hello(KNOWN, replace(HELLO, member=replace(OTHER, **{field: value}))))
    refused = await connection.answer()
    connection.close()
    assert isinstance(refused, KvpoolError)
    assert refused.field == field
    assert len(refused.message) < 300
    assert not primary.shard.replicator.connections
    assert primary.shard.replica.entry == record == await directory.get()


async def test_one_server_more_than_the_maximum_is_refused(primary: ReplicaServer) -> None:
    connected = primary.shard.replica.standbys.connected
    others = (replace(OTHER, member_id=MemberId(f"m{number}")) for number in range(MAX_MEMBERS - 1))
    connected.update((member.member_id, Standby(member, has_state=False)) for member in others)
    assert reason_of(primary, HELLO) == "TOO_MANY_MEMBERS"
    primary.shard.check.check(KNOWN, replace(HELLO, member=replace(OTHER, member_id=MemberId("m0"))))


async def test_a_standby_names_the_primary_and_accepts_no_standbys(tmp_path: Path, store: Store) -> None:
    async with servers_of_a_shard(tmp_path, 2, store) as (primary, standby):
        assert primary.shard.refusal() is None
        refusal = standby.shard.refusal()
        assert refusal
        assert (refusal.addresses, refusal.term) == (primary.shard.me.addresses, 1)
        assert reason_of(standby, HELLO) == "NOT_PRIMARY"
        await until(lambda: standby.shard.replica.is_following)  # its watch is later than the primary's swap
        assert not primary.shard.replica.is_following


async def test_a_server_that_knows_nothing_yet_names_no_primary(tmp_path: Path, store: Store) -> None:
    server = ReplicaServer(tmp_path, store)
    refusal = server.shard.refusal()
    assert refusal
    assert (refusal.addresses, refusal.term) == ((), 0)
    await server.start()
    await server.die()


async def test_a_server_whose_term_cannot_be_written_takes_over(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with servers_of_a_shard(tmp_path, 2, store) as (primary, standby):
        (standby.folder / "member.part").mkdir()
        await primary.die()
        await until(lambda: "record not kept" in caplog.messages)
        await until(standby.is_primary)
        assert standby.state.journal, "it serves"
        (standby.folder / "member.part").rmdir()
        await until(lambda: IdentityFile(standby.folder, SHARD).identity.known_term == 2)


async def test_a_server_whose_folder_was_deleted_stays_the_same_member(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with servers_of_a_shard(tmp_path, 1, store) as (server,):
        before = read_identity(server.folder)
        shutil.rmtree(server.folder)
        server.shard.tick()
        assert not server.folder.exists(), "another server could take it before the journal has locked it again"
        await until(lambda: "identity written again" in caplog.messages)
        assert server.journal.is_complete, "a member without the state that it acknowledged would lose it"
        assert read_identity(server.folder) == before
        assert IdentityFile(server.folder, SHARD).identity == before


async def test_a_server_whose_work_for_the_shard_ends_with_a_bug_restarts(
    primary: ReplicaServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(primary.shard, "tick", fail)
    await until(lambda: primary.deposed)
    (record,) = [record for record in caplog.records if record.message == "bug: the server restarts"]
    assert record.levelno == logging.CRITICAL
    with pytest.raises(NotPrimaryError):
        await primary.shard.gate.wait(None)


async def test_a_token_that_is_not_known_is_refused_over_the_network(
    tmp_path: Path, store: Store, primary: ReplicaServer, caplog: pytest.LogCaptureFixture
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("wrong\n")
    async with joining(tmp_path, store, replication_token_file=token_file):
        await until(lambda: "refused by the primary" in caplog.messages)
        assert primary.num_in_sync() == 1
        token_file.write_text("good\n")
        await until(lambda: primary.num_in_sync() == 2)


async def test_a_token_file_that_cannot_be_read_is_tried_again(
    tmp_path: Path, store: Store, primary: ReplicaServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvpool.server.cluster")
    async with joining(tmp_path, store, replication_token_file=tmp_path / "token"):
        await until(lambda: "primary not reached" in caplog.messages)
        (tmp_path / "token").write_text("good\n")
        await until(lambda: primary.num_in_sync() == 2)


async def test_an_address_that_is_in_use_is_an_error_with_the_name_of_the_setting(
    tmp_path: Path, store: Store, primary: ReplicaServer
) -> None:
    address = primary.shard.me.replication_address
    server = ReplicaServer(tmp_path / "other", store, replication_listen=address)
    with pytest.raises(OSError, match=f"^replication_listen: cannot listen on {address}"):
        await server.shard.replicator.listen()
    kill(server.journal)


async def test_a_directory_that_is_down_is_logged_once_and_is_used_when_it_is_back(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    async with servers_of_a_shard(tmp_path, 1, store) as (primary,):
        standby = ReplicaServer(tmp_path / "joins", store)
        standby.directory.is_up = False
        primary.directory.is_up = False
        try:
            await standby.start()
            primary.shard.step(events.StandbyConnected(OTHER, resumes=True))
            primary.shard.step(events.Acknowledged(OTHER.member_id, primary.shard.replica.last_position))
            await until(lambda: primary.shard.directory_client.error)
            first = primary.shard.directory_client._alerted_seconds
            await until(lambda: len(primary.shard._tasks) >= 2 and primary.shard.replica.pending)
            assert primary.shard.directory_client._alerted_seconds == first
            primary.directory.is_up = standby.directory.is_up = True
            await until(lambda: primary.num_in_sync() >= 2)
        finally:
            await standby.die()
        assert not primary.shard.directory_client.error
    assert caplog.messages.count("directory cannot be used") == 1
    assert caplog.messages.count("directory works again") == 1


async def test_a_directory_that_went_back_is_reported_and_changes_nothing(
    store: Store, primary: ReplicaServer, tmp_path: Path
) -> None:
    async with joining(tmp_path, store) as standby:
        standby.shard.replica.seen = Seen(5)
        await until(lambda: standby.shard.directory_client.error)
        assert "has seen term 5" in standby.shard.directory_client.error
        assert standby.role is Role.STARTING
        assert primary.role is Role.PRIMARY


async def test_the_term_is_remembered_before_the_server_serves(tmp_path: Path, store: Store) -> None:
    async with servers_of_a_shard(tmp_path, 1, store) as (primary,):
        assert primary.shard._identity.identity.known_term == 1
        assert primary.shard.num_takeovers == 1


async def test_a_primary_that_an_operator_replaced_is_deposed(store: Store, primary: ReplicaServer) -> None:
    waiting = asyncio.create_task(primary.shard.gate.wait(primary.shard.gate.position))
    await asyncio.gather(waiting)
    store.put(ShardRecord(2, OTHER.member_id, (OTHER,), "operator"))
    await until(lambda: primary.deposed)
    assert primary.deposed
    assert (primary.deposed.addresses, primary.deposed.term) == (OTHER.addresses, 2)
    with pytest.raises(NotPrimaryError):
        await primary.shard.gate.wait(None)
    refusal = primary.shard.refusal()
    assert refusal
    assert refusal.addresses == OTHER.addresses


async def test_a_server_that_stops_leaves_the_record_as_it_is(tmp_path: Path, store: Store) -> None:
    """Its standby takes over only because it is in sync in the record."""
    async with servers_of_a_shard(tmp_path, 2, store) as (primary, standby):
        standby.directory.is_up = False
        before = len(store.history)
        await primary.die()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(store.history) == before
        assert not primary.shard._tasks


async def test_a_server_of_a_shard_that_was_removed_does_not_serve(
    primary: ReplicaServer, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.delete()
    await until(lambda: primary.deposed)
    assert primary.deposed
    assert primary.deposed.addresses == ()
    await primary.die()
    again = ReplicaServer(primary.folder, store)
    try:
        await again.start()
        await until(lambda: again.shard.directory_client.error)
        assert "holds no record of the shard, this server has seen term 1" in again.shard.directory_client.error
        assert again.role is Role.STARTING
        assert again.shard.refusal()
        assert store.get().record is None
    finally:
        await again.die()
    assert "directory cannot be used" in caplog.messages
