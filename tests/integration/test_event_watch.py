"""EventService.Watch through the client: snapshots, heartbeats, and watches that outlive a server."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvpool.client import (
    Client,
    EventBatch,
    FullAttentionSpec,
    HashScheme,
    InvalidArgumentError,
    KVCacheGroup,
    KvpoolError,
    Medium,
    NotFoundError,
    PoolConfig,
    PrefixIndex,
    Session,
    SlidingWindowSpec,
    WatchKind,
    WrongStateError,
    connect,
)
from kvpool.client.admin import AdminClient
from kvpool.core.ids import BlockHash, PoolName
from kvpool.v1 import event_pb2, event_pb2_grpc
from kvpool.wire.errors import from_rpc_error
from support.server import ServerProcess, pool_config, running_server
from support.waiting import DEADLINE_SECONDS

GROUPS = (
    KVCacheGroup(FullAttentionSpec(4), ("layer.0",)),
    KVCacheGroup(SlidingWindowSpec(8, sliding_window=20), ("layer.1",)),
)


def config(name: str) -> PoolConfig:
    """A pool with the same hashes on every server."""
    return PoolConfig(
        PoolName(name), 2000, 4096, GROUPS, hash_scheme=HashScheme(none_hash=b"n" * 32), enable_events=True
    )


def work(session: Session, start: int, end: int) -> None:
    """Admits and frees these requests: all share a prefix, every third one has a block evicted."""
    for i in range(start, end):
        request = session.request(f"r{i}", [1] * 16 + [i] * 200)
        assert session.admit(request) is not None
        session.mark_executed()
        if i % 3 == 0:
            session.evict_blocks([request.block_ids[0][7], request.block_ids[1][-2]])
        session.free(request)


def expected(name: str, end: int) -> PrefixIndex:
    """The cached blocks after that, from a pool in this process."""
    with connect("embedded:") as twin:
        twin.create_pool(config(name))
        with twin.open_session(name) as session:
            work(session, 0, end)
            return index_of(twin.watch(name, snapshot=True))


def index_of(watch: Iterator[EventBatch]) -> PrefixIndex:
    index = PrefixIndex()
    while not index.is_whole:
        index.apply(next(watch))
    return index


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server() as address:
        yield address


def test_a_snapshot_is_the_map_and_batches_continue_from_it(client: Client) -> None:
    client.create_pool(config("late"))
    with client.open_session("late") as session:
        work(session, 0, 60)
        watch = client.watch("late", snapshot=True)
        index = index_of(watch)
        assert index.entries() == expected("late", 60).entries()
        work(session, 60, 90)
        end = client.get_pool("late").event_sequence
        while index.sequence < end:
            batch = next(watch)
            assert (batch.kind, batch.sequence) == (WatchKind.BATCH, index.sequence + 1)
            index.apply(batch)
        assert index.entries() == expected("late", 90).entries()
        assert (index.epoch, len(index.boot_id)) == (1, 16)
        assert abs(index.time_seconds - time.time()) < 60
        hashes = session.request("probe", [1] * 16 + [89] * 200).hashes
        assert index.num_prefix_blocks(hashes) == len(hashes) == 54
        assert index.cached(hashes[1::2], 1)[-2:] == [True, True]
        assert not index.num_prefix_blocks([BlockHash(b"?" * 32)])


def test_a_report_of_executed_steps_publishes_the_copies_in_host_memory(client: Client) -> None:
    client.create_pool(replace(config("tiers"), num_blocks=60, max_model_len=200, num_host_blocks=100))
    with client.open_session("tiers") as session:
        index, watch = PrefixIndex(), client.watch("tiers", snapshot=True)
        for i in range(4):
            request = session.request(f"r{i}", [i] * 60)
            assert session.admit(request) is not None
            before = client.get_pool("tiers").event_sequence
            session.mark_executed()
            if i < 3:
                session.free(request)
        assert client.get_pool("tiers").event_sequence == before + 1
        while not index.is_whole or index.sequence <= before:
            index.apply(next(watch))
        copied = index.entries(Medium.HOST_MEMORY)
        assert copied
        assert index_of(client.watch("tiers", snapshot=True)).entries(Medium.HOST_MEMORY) == copied


def test_a_recreated_pool_has_its_own_numbers_and_epoch(client: Client, address: str) -> None:
    infos = []
    for _ in range(2):
        client.create_pool(config("again"))
        with client.open_session("again") as session:
            work(session, 0, 5)
        infos.append(client.get_pool("again"))
        if len(infos) == 1:
            with AdminClient(address) as admin:
                admin.remove_pool("again")
    assert infos[1].epoch == infos[0].epoch + 1
    for sequence in (infos[0].event_sequence, infos[0].event_sequence + 1):
        with pytest.raises(WrongStateError) as caught:
            next(client.watch("again", from_sequence=sequence))
        assert caught.value.reason == "EVENTS_NOT_KEPT"


def test_a_watch_that_is_never_iterated_leaves_no_thread(client: Client) -> None:
    before = set(threading.enumerate())
    client.create_pool(config("unread"))
    client.watch("unread", snapshot=True)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "kvpool-watch"]


def test_invalid_fields_are_refused_by_name(client: Client, address: str) -> None:
    client.create_pool(config("refusing"))
    with pytest.raises(InvalidArgumentError, match="from_sequence"):
        client.watch("refusing", from_sequence=1, snapshot=True)
    with pytest.raises(NotFoundError):
        client.watch("nowhere", snapshot=True)
    client.create_pool(pool_config("silent"))
    with pytest.raises(WrongStateError, match="the pool publishes no events"):
        client.watch("silent")
    with grpc.insecure_channel(address) as channel:
        stub = event_pb2_grpc.EventServiceStub(channel)
        for fields, kind, field in (
            ({"snapshot": True, "from_sequence": 1}, InvalidArgumentError, "from_sequence"),
            ({"boot_id": "another", "from_sequence": 1}, WrongStateError, "boot_id"),
        ):
            call = stub.Watch(event_pb2.WatchRequest(pool_name="refusing", **fields))
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            error = from_rpc_error(caught.value)
            assert (type(error), error.field) == (kind, field)


class ResumableWatch:
    """A router: an index that a thread updates."""

    def __init__(self, client: Client, pool: str) -> None:
        self.index = PrefixIndex()
        self.news = threading.Condition()
        self.is_over = False
        self._watch = client.watch(pool, snapshot=True, heartbeat_seconds=0.2)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            for batch in self._watch:
                with self.news:
                    self.index.apply(batch)
                    self.news.notify()
        except (KvpoolError, ValueError):
            assert self.is_over

    def wait(self, twin: PrefixIndex, boot_id_before: str = "") -> None:
        """Waits until the index equals the twin's, on another boot than before."""
        with self.news:
            assert self.news.wait_for(
                lambda: (
                    self.index.is_whole
                    and self.index.boot_id != boot_id_before
                    and self.index.entries() == twin.entries()
                ),
                timeout=DEADLINE_SECONDS,
            ), self.index


def serve_requests(address: str, count: int) -> None:
    """A scheduler that creates the pool, serves `count` requests, and ends."""
    with connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(config("m"))
        with client.open_session("m") as session:
            work(session, 0, count)


def test_an_index_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    where, first, second = (f"unix:{tmp_path / name}" for name in ("router", "first", "second"))
    server = ServerProcess(where, first)
    with connect(where, deadline_seconds=DEADLINE_SECONDS) as client:
        serve_requests(first, 30)
        router = ResumableWatch(client, "m")
        router.wait(expected("m", 30))
        boot_id = router.index.boot_id
        server.kill()
        server = ServerProcess(where, second)
        serve_requests(second, 20)
        router.wait(expected("m", 20), boot_id)
        router.is_over = True
    server.stop_cleanly()


def test_a_hanging_server_is_detected_by_its_silence(tmp_path: Path) -> None:
    where = f"unix:{tmp_path / 's'}"
    server = ServerProcess(where)
    with connect(where) as client:
        client.create_pool(config("m"))
        watch = client.watch("m", snapshot=True, heartbeat_seconds=0.1)
        index = index_of(watch)
        server.pause()
        threading.Timer(1.0, server.resume).start()
        kinds = [next(watch).kind for _ in range(12)]
        assert set(kinds) <= {WatchKind.HEARTBEAT}, "it went on where it was, without another snapshot"
        assert index.is_whole
    server.kill()
