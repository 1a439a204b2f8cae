"""The directory while nodes of etcd are killed, paused, restarted, restored or replaced."""

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.server.cluster.directory import DirectoryError, DirectoryRegressedError
from support.directory import following, record_of, swap
from support.etcd import EtcdCluster, EtcdNode, etcd_cluster, needs_etcd
from support.lost_answers import lost_answers
from support.waiting import DEADLINE_SECONDS

from .conftest import OpenDirectory

pytestmark = [needs_etcd, pytest.mark.slow]
KEY = b"/kvpool/default"
RECORDS = [record_of(term) for term in range(1, 6)]
FAILURES: list[Callable[[EtcdNode], None]] = [EtcdNode.kill, EtcdNode.pause]


@pytest.fixture
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster(size=3) as cluster:
        yield cluster


@pytest.mark.parametrize("fail", FAILURES)
async def test_calls_continue_at_other_nodes(
    etcd: EtcdCluster, open_directory: OpenDirectory, fail: Callable[[EtcdNode], None]
) -> None:
    directory = open_directory(etcd.endpoints, attempt_timeout_seconds=2.0)
    created = await swap(directory, 0, RECORDS[0])
    fail(etcd.nodes[directory._client._preferred])
    assert await directory.get() == created.entry
    replaced = await swap(directory, created.entry.revision, RECORDS[1])
    assert (replaced.won, await directory.get()) == (True, replaced.entry)


@pytest.mark.parametrize("fail", FAILURES)
async def test_a_watch_continues_at_other_nodes(
    etcd: EtcdCluster, open_directory: OpenDirectory, fail: Callable[[EtcdNode], None]
) -> None:
    watching = open_directory(etcd.endpoints, attempt_timeout_seconds=2.0)
    async with contextlib.aclosing(watching.watch()) as changes:
        assert (await following(changes)).record is None
        created = await swap(watching, 0, RECORDS[0])
        assert await following(changes) == created.entry  # so the stream is open
        failed = watching._client._preferred
        fail(etcd.nodes[failed])
        others = tuple(node.endpoint for number, node in enumerate(etcd.nodes) if number != failed)
        changing = open_directory(others, attempt_timeout_seconds=2.0)
        replaced = await swap(changing, created.entry.revision, RECORDS[1])
        assert await following(changes) == replaced.entry


async def test_a_watch_leaves_a_node_without_leader(etcd: EtcdCluster, open_directory: OpenDirectory) -> None:
    """It does so although the node runs and the connection is sound."""
    watching = open_directory(etcd.endpoints, attempt_timeout_seconds=2.0)
    async with contextlib.aclosing(watching.watch()) as changes:
        assert (await following(changes)).record is None
        created = await swap(watching, 0, RECORDS[0])
        assert await following(changes) == created.entry
        stays = watching._client._preferred
        waiting = asyncio.create_task(following(changes))
        paused = [node for number, node in enumerate(etcd.nodes) if number != stays]
        for node in paused:
            node.pause()
        alone = open_directory((etcd.endpoints[stays],), call_timeout_seconds=2.0)
        async with asyncio.timeout(DEADLINE_SECONDS):
            refusal = ""
            while "it has no leader" not in refusal:  # at first, no answer in time
                with pytest.raises(DirectoryError) as refused:
                    await alone.get()
                refusal = str(refused.value)
            while watching._client._preferred == stays:  # noqa: ASYNC110 - the stream has no event for it
                await asyncio.sleep(0.01)
        for node in paused:
            node.resume()
        replaced = await swap(watching, created.entry.revision, RECORDS[1])
        assert await waiting == replaced.entry


async def test_a_watch_reports_a_deletion_that_it_missed(etcd: EtcdCluster, open_directory: OpenDirectory) -> None:
    watching, changing = open_directory(etcd.endpoints[:1]), open_directory(etcd.endpoints[1:])
    created = await swap(changing, 0, RECORDS[0])
    async with contextlib.aclosing(watching.watch()) as changes:
        assert await following(changes) == created.entry
        etcd.nodes[0].kill()
        etcd.post("kv/deleterange", node=1, key=KEY)
        etcd.start(etcd.nodes[0])
        deleted = await following(changes)
        assert deleted.record is None
        assert deleted.revision > created.entry.revision
        created = await swap(changing, 0, RECORDS[1])
        assert await following(changes) == created.entry


@pytest.mark.parametrize("fail", FAILURES)
async def test_calls_fail_within_their_limit_if_all_nodes_are_gone(
    etcd: EtcdCluster, open_directory: OpenDirectory, fail: Callable[[EtcdNode], None]
) -> None:
    directory = open_directory(etcd.endpoints, call_timeout_seconds=1.0, attempt_timeout_seconds=0.3)
    with contextlib.suppress(DirectoryError):  # connects, where the machine is not too busy
        await directory.get()
    for node in etcd.nodes:
        fail(node)
    for call in (
        directory.get(),
        directory.compare_and_swap(0, RECORDS[0]),
    ):
        async with asyncio.timeout(DEADLINE_SECONDS):
            with pytest.raises(DirectoryError, match=rf"etcd at {etcd.host[:-1]}[123]:2379: "):
                await call


async def test_a_repeated_swap_wins_if_only_the_answer_was_lost(open_directory: OpenDirectory) -> None:
    """The directory itself does not repeat it, though another endpoint would answer."""
    with etcd_cluster() as etcd:
        direct = open_directory(etcd.endpoints)
        created = await swap(direct, 0, RECORDS[0])
        async with lost_answers(etcd.endpoints[0]) as link:
            directory = open_directory((link.address, etcd.endpoints[0]), attempt_timeout_seconds=2.0)
            while await directory.get() and directory._client._preferred != 0:  # a busy machine was too slow
                directory._client._preferred = 0
            link.lose_answers()
            with pytest.raises(DirectoryError, match="it did not answer in time"):
                await directory.compare_and_swap(created.entry.revision, RECORDS[1])
        applied = await direct.get()
        assert applied.record == RECORDS[1]
        repeated = await direct.compare_and_swap(created.entry.revision, RECORDS[1])
        assert (repeated.won, repeated.entry) == (True, applied)
        other = await direct.compare_and_swap(created.entry.revision, RECORDS[2])
        assert (other.won, other.entry) == (False, applied)


async def test_a_restored_backup_is_detected(tmp_path: Path, open_directory: OpenDirectory) -> None:
    """A backup of the folder of a node that was stopped cleanly keeps the cluster id."""
    with etcd_cluster() as etcd:
        (node,) = etcd.nodes
        directory = open_directory(etcd.endpoints)
        last = (await swap(directory, 0, RECORDS[0])).entry
        node.stop()
        shutil.copytree(node.folder, tmp_path / "backup")
        etcd.start(node)
        assert await directory.get() == last  # a restart alone changes nothing
        for record in RECORDS[1:]:
            last = (await swap(directory, last.revision, record)).entry
        node.stop()
        shutil.rmtree(node.folder)
        shutil.copytree(tmp_path / "backup", node.folder)
        etcd.start(node)
        with pytest.raises(DirectoryRegressedError, match=f"etcd at {etcd.host}:2379: its revision went back from"):
            await directory.get()
        fresh = open_directory(etcd.endpoints)
        found = await fresh.get()
        assert found.record == RECORDS[0]
        for number in range(10):  # past the highest revision
            found = (await swap(fresh, found.revision, record_of(9, change_id=str(number)))).entry
        with pytest.raises(DirectoryRegressedError, match="went back"):
            await directory.compare_and_swap(found.revision, RECORDS[4])
        assert await fresh.get() == found  # the swap was not sent


async def test_another_cluster_is_detected(open_directory: OpenDirectory) -> None:
    with etcd_cluster() as etcd:
        directory = open_directory(etcd.endpoints)
        await swap(directory, 0, RECORDS[0])
        changes = directory.watch()
        await following(changes)
        etcd.kill()
        etcd.replace()
        with pytest.raises(DirectoryRegressedError, match=r"it belongs to cluster .* as before"):
            await following(changes)
        with pytest.raises(DirectoryRegressedError, match=r"it belongs to cluster .* as before"):
            await directory.get()
