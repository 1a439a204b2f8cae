"""The directory in one real node of etcd."""

import asyncio
import contextlib
import re
import urllib.error
from pathlib import Path

import pytest

from kvpool.etcd import rpc_pb2
from kvpool.server.cluster.directory import DamagedRecordError, DirectoryError, VersionedRecord
from kvpool.server.cluster.etcd_directory import EtcdDirectory
from kvpool.wire.channels import TlsConfig
from support.auth import Authority
from support.directory import following, record_of, swap
from support.etcd import EtcdCluster, etcd_cluster, needs_etcd
from support.waiting import DEADLINE_SECONDS

from .conftest import OpenDirectory

pytestmark = needs_etcd
ONE, TWO, THREE = record_of(1, "a", "b"), record_of(2, "b"), record_of(3, "b", "c")


@pytest.fixture
def cluster_name(request: pytest.FixtureRequest) -> str:
    return re.sub(r"\W+", "-", request.node.name)[:64]


@pytest.fixture
def directory(etcd: EtcdCluster, cluster_name: str, open_directory: OpenDirectory) -> EtcdDirectory:
    return open_directory(etcd.endpoints, cluster_name)


async def test_a_shard_without_entry(directory: EtcdDirectory) -> None:
    assert await directory.get() == VersionedRecord(0, None)


async def test_a_swap_creates_and_replaces_an_entry(directory: EtcdDirectory) -> None:
    created = await swap(directory, 0, ONE)
    assert created.won
    assert created.entry == await directory.get() == VersionedRecord(created.entry.revision, ONE)
    replaced = await swap(directory, created.entry.revision, TWO)
    assert replaced.won
    assert replaced.entry.revision > created.entry.revision
    assert replaced.entry == await directory.get() == VersionedRecord(replaced.entry.revision, TWO)


async def test_a_lost_swap_returns_the_entry_and_changes_nothing(directory: EtcdDirectory) -> None:
    created = await swap(directory, 0, ONE)
    for revision in (0, created.entry.revision - 1, created.entry.revision + 1):
        lost = await swap(directory, revision, TWO)
        assert (lost.won, lost.entry) == (False, created.entry)
    assert await directory.get() == created.entry


async def test_a_swap_of_a_shard_without_entry_needs_revision_0(directory: EtcdDirectory) -> None:
    lost = await swap(directory, 7, ONE)
    assert (lost.won, lost.entry) == (False, VersionedRecord(0, None))


async def test_one_of_many_swaps_wins(etcd: EtcdCluster, cluster_name: str, open_directory: OpenDirectory) -> None:
    directories = [open_directory(etcd.endpoints, cluster_name) for _ in range(5)]
    records = [record_of(1, f"m{number}", change_id=f"c{number}") for number in range(5)]
    pairs = zip(directories, records, strict=True)
    swaps = await asyncio.gather(*(swap(directory, 0, record) for directory, record in pairs))
    assert [each.won for each in swaps].count(True) == 1
    assert len({each.entry for each in swaps}) == 1


async def test_a_damaged_record_is_reported(etcd: EtcdCluster, directory: EtcdDirectory, cluster_name: str) -> None:
    key = f"/kvpool/{cluster_name}"
    etcd.post("kv/put", key=key.encode(), value=b"{}")
    watch = directory.watch()
    calls = (directory.get(), directory.compare_and_swap(0, ONE), anext(watch))
    for call in calls:
        with pytest.raises(DamagedRecordError, match=f"{key} in etcd: has format None"):
            await call


async def test_a_watch_yields_the_entry_and_each_change(
    etcd: EtcdCluster, directory: EtcdDirectory, cluster_name: str
) -> None:
    async with contextlib.aclosing(directory.watch()) as changes:
        before = await following(changes)
        created = await swap(directory, 0, ONE)
        assert before.record is None
        assert 0 < before.revision < created.entry.revision
        assert await following(changes) == created.entry
        replaced = await swap(directory, created.entry.revision, TWO)
        etcd.post("kv/put", key=f"/kvpool/{cluster_name}-2".encode(), value=b"{}")  # another shard
        assert await following(changes) == replaced.entry
        etcd.post("kv/deleterange", key=f"/kvpool/{cluster_name}".encode())
        deleted = await following(changes)
        assert deleted.record is None
        assert deleted.revision > replaced.entry.revision
        created_again = await swap(directory, 0, THREE)
        assert await following(changes) == created_again.entry
        assert created_again.entry.revision > deleted.revision
    async with contextlib.aclosing(directory.watch()) as changes:
        assert await following(changes) == created_again.entry


async def test_a_watch_ends_with_its_task(directory: EtcdDirectory) -> None:
    changes = directory.watch()
    await following(changes)
    waiting = asyncio.create_task(following(changes))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(DEADLINE_SECONDS):
        await changes.aclose()
    assert [entry async for entry in changes] == []


async def test_close_ends_watches_and_calls(directory: EtcdDirectory) -> None:
    changes = directory.watch()
    assert (await following(changes)).record is None
    created = await swap(directory, 0, ONE)
    assert await following(changes) == created.entry  # so the stream is open
    waiting = asyncio.create_task(anext(changes, None))
    await asyncio.sleep(0)
    await directory.close()
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await waiting is None
    with pytest.raises(DirectoryError, match="closed"):
        await directory.get()


async def test_close_ends_a_call_in_progress(open_directory: OpenDirectory) -> None:
    with etcd_cluster() as etcd:
        directory = open_directory(etcd.endpoints)
        await directory.get()
        etcd.nodes[0].pause()
        waiting = asyncio.create_task(directory.get())
        await asyncio.sleep(0)
        await directory.close()
        async with asyncio.timeout(DEADLINE_SECONDS):
            with pytest.raises(DirectoryError, match="the directory was closed"):
                await waiting


async def test_the_stream_of_a_compacted_revision_ends(etcd: EtcdCluster, directory: EtcdDirectory) -> None:
    """The watch then reads again."""
    created = await swap(directory, 0, ONE)
    etcd.post("kv/compaction", revision=created.entry.revision)
    keys = rpc_pb2.RangeRequest(key=b"k")
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert [event async for event in directory._client.changes(keys, created.entry.revision - 1)] == []


async def test_a_full_database_is_named(open_directory: OpenDirectory) -> None:
    with etcd_cluster(options=["--quota-backend-bytes", "16384"]) as etcd:
        directory = open_directory(etcd.endpoints)
        assert await directory.get() == VersionedRecord(0, None)
        with contextlib.suppress(urllib.error.HTTPError):
            etcd.post("kv/put", key=b"k", value=bytes(20000))
        with pytest.raises(DirectoryError, match=rf"etcd at {etcd.host}:2379: its database is full \(alarm NOSPACE\)"):
            await directory.compare_and_swap(0, ONE)
        assert await directory.get() == VersionedRecord(0, None)


async def test_authentication(tmp_path: Path, open_directory: OpenDirectory) -> None:
    """Tokens are renewed when they become invalid: here with another password, which is read again."""
    password = tmp_path / "password"
    password.write_text("first\n")
    with etcd_cluster() as etcd:
        etcd.enable_authentication("kvpool", "first", "/kvpool/default")
        directory = open_directory(etcd.endpoints, user="kvpool", password_file=password)
        created = await swap(directory, 0, ONE)
        async with contextlib.aclosing(directory.watch()) as changes:
            assert await following(changes) == created.entry
            password.write_text("second\n")
            etcd.change_password("kvpool", "second")
            assert await directory.get() == created.entry
            replaced = await swap(directory, created.entry.revision, TWO)
            assert await following(changes) == replaced.entry

        elsewhere = open_directory(etcd.endpoints, "other", user="kvpool", password_file=password)
        with pytest.raises(DirectoryError, match="lacks a permission"):
            await elsewhere.get()
        with pytest.raises(DirectoryError, match="lacks a permission"):
            await anext(elsewhere.watch())
        with pytest.raises(DirectoryError, match="requires a user and a password"):
            await open_directory(etcd.endpoints).get()
        password.write_text("wrong")
        refused = open_directory(etcd.endpoints, user="kvpool", password_file=password)
        with pytest.raises(DirectoryError, match="does not accept the user or the password"):
            await refused.get()
        password.unlink()
        with pytest.raises(DirectoryError, match=r"password file of etcd's user: .*No such file"):
            await refused.get()


async def test_a_user_where_authentication_is_off(
    tmp_path: Path, etcd: EtcdCluster, open_directory: OpenDirectory
) -> None:
    (tmp_path / "password").write_text("x")
    directory = open_directory(etcd.endpoints, user="kvpool", password_file=tmp_path / "password")
    with pytest.raises(DirectoryError, match="its authentication is not enabled"):
        await directory.get()


@pytest.mark.slow
async def test_an_expired_token_is_renewed(tmp_path: Path, open_directory: OpenDirectory) -> None:
    (tmp_path / "password").write_text("first")
    with etcd_cluster(options=["--auth-token-ttl", "1"]) as etcd:
        etcd.enable_authentication("kvpool", "first", "/kvpool/")
        directory = open_directory(etcd.endpoints, user="kvpool", password_file=tmp_path / "password")
        await directory.get()
        token = directory._client._token
        async with asyncio.timeout(DEADLINE_SECONDS):
            while directory._client._token == token:
                await asyncio.sleep(2.5)  # etcd looks for expired tokens each second
                assert await directory.get() == VersionedRecord(0, None)


@pytest.mark.slow
async def test_tls(tmp_path: Path, open_directory: OpenDirectory) -> None:
    authority, stranger = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    client = authority.issue("client")
    options = ["--client-cert-auth", "--trusted-ca-file", str(authority.path)]
    pair = authority.issue("etcd.test")  # a name: the address is not known yet
    options += ["--cert-file", str(pair.cert), "--key-file", str(pair.key)]
    with etcd_cluster(options=options, scheme="https") as etcd:
        trusting = authority.trusted_by(client, "etcd.test")
        directory = open_directory(etcd.endpoints, tls=trusting)
        created = await swap(directory, 0, ONE)
        assert await directory.get() == created.entry
        for settings in (stranger.trusted_by(client, "etcd.test"), authority.trusted_by(None, "etcd.test"), None):
            refused = open_directory(etcd.endpoints, tls=settings, call_timeout_seconds=1.0)
            with pytest.raises(DirectoryError, match=f"etcd at {etcd.host}:2379: "):
                await refused.get()


async def test_a_missing_tls_file_is_named(etcd: EtcdCluster, open_directory: OpenDirectory) -> None:
    with pytest.raises(ValueError, match=r"cluster: tls_ca: /missing.pem: No such file"):
        open_directory(etcd.endpoints, tls=TlsConfig(Path("/missing.pem")))
