"""Two real servers of a shard and a real etcd: what sessions, ranks and watchers see when a server dies or stops."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

import pytest

from kvpool.client import (
    AbortedError,
    FullAttentionSpec,
    KVCacheGroup,
    KvpoolError,
    PoolConfig,
    PoolState,
    PrefixIndex,
    Session,
    connect,
)
from kvpool.client.admin import AdminClient
from kvpool.core.ids import PoolName
from support import processes
from support.answers import until_answered
from support.bugs import bugs_in
from support.command import kvpool
from support.etcd import EtcdCluster, etcd_cluster, needs_etcd
from support.pair import Pair
from support.paths import ROOT
from support.waiting import DEADLINE_SECONDS
from support.workers import ready, worker_processes

pytestmark = needs_etcd

CONFIG = PoolConfig(PoolName("m"), 500, 4096, (KVCacheGroup(FullAttentionSpec(16), ("layer",)),), enable_events=True)
PROMPT = list(range(160))
PATIENT = ("--takeover-seconds", "60", "--standby-timeout-seconds", "60")
"""A server must not lose its role because the machine is busy."""


@contextmanager
def a_pair(etcd: EtcdCluster, folder: Path, *options: str) -> Iterator[Pair]:
    """A pair, not started, in a cluster of its own."""
    pair = Pair(folder, f"etcd://{etcd.nodes[0].endpoint}/{folder.name}", options)
    try:
        yield pair
    finally:
        pair.close()


@contextmanager
def working(etcd: EtcdCluster, folder: Path, *options: str) -> Iterator[tuple[Pair, "Work"]]:
    """A pair in sync, with a session whose lease does not expire while a busy machine restarts servers."""
    with a_pair(etcd, folder, *options, *PATIENT) as pair:
        pair.start()
        with connect(pair.seeds, deadline_seconds=DEADLINE_SECONDS) as client:
            client.create_pool(CONFIG)
            yield pair, Work(client.open_session("m", lease_seconds=300))


class Work:
    """One request that stays, and short ones that come and go. Their blocks stay cached."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.num_steps = 0
        self.long = session.request("long", token_ids=PROMPT)
        assert session.admit(self.long)
        session.mark_executed()
        self.first_blocks = list(self.long.block_ids[0])

    def step(self) -> None:
        """Runs one short request, and one token of the long one."""
        self.num_steps += 1
        short = self.session.request(f"short-{self.num_steps}", token_ids=[self.num_steps] * 40)
        assert self.session.admit(short)
        self.long.append([self.num_steps])
        assert self.session.allocate_slots(self.long, 1)
        self.session.mark_executed()
        self.session.free(short)

    def check(self) -> None:
        """The long request has the blocks that it had, and the prompt's prefix is found by others."""
        assert self.long.block_ids[0][: len(self.first_blocks)] == self.first_blocks
        other = self.session.request("other", token_ids=[*PROMPT, 1])
        assert self.session.get_computed_blocks(other).num_tokens == len(PROMPT)


def contents(pair: Pair) -> list[object]:
    """All blocks, requests and sessions of the pool, as the primary lists them."""
    with AdminClient(pair.seeds, deadline_seconds=DEADLINE_SECONDS) as admin:
        blocks, requests = list(admin.blocks("m")), list(admin.requests("m"))
        return [*blocks, *requests, *(each.session_number for each in admin.sessions())]


class Stepper:
    """Steps in a thread."""

    def __init__(self, work: Work) -> None:
        self.errors: list[Exception] = []
        self._work = work
        self._stop = threading.Event()
        self._stepped = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive()

    def wait(self, count: int) -> None:
        """Waits for more steps."""
        with self._stepped:
            wanted = self._work.num_steps + count
            assert self._stepped.wait_for(lambda: self.errors or self._work.num_steps >= wanted, DEADLINE_SECONDS)
        assert not self.errors, self.errors

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._work.step()
                with self._stepped:
                    self._stepped.notify_all()
        except Exception as error:  # noqa: BLE001 - the test's thread raises it
            with self._stepped:
                self.errors.append(error)
                self._stepped.notify_all()


def test_a_killed_primary_is_replaced_block_for_block(etcd: EtcdCluster, tmp_path: Path) -> None:
    with working(etcd, tmp_path) as (pair, work):
        for _ in range(20):
            work.step()
        before = contents(pair)
        term = pair.wait_in_sync()
        killed = pair.primary()
        killed.kill()
        assert contents(pair) == before
        assert pair.primary() is pair.other(killed)
        work.step()
        work.check()
        killed.start()
        assert pair.wait_in_sync() > term
        assert pair.standby() is killed


@pytest.mark.slow
def test_ranks_stay_and_their_pool_is_never_suspended(etcd: EtcdCluster, tmp_path: Path) -> None:
    with a_pair(etcd, tmp_path, *PATIENT) as pair, worker_processes(tmp_path) as workers:
        pair.start()
        ranks = [workers.start(pair.seeds, rank, 2) for rank in range(2)]
        for rank in ranks:
            rank.wait_for(ready(r"\d+"))
        with connect(pair.seeds, deadline_seconds=DEADLINE_SECONDS) as client:
            work = Work(client.open_session("m", lease_seconds=300))
            for _ in range(2):
                killed = pair.primary()
                killed.kill()
                with AdminClient(pair.seeds, deadline_seconds=DEADLINE_SECONDS) as admin:
                    (pool,) = admin.overview().pools
                assert (pool.state, pool.epoch) == (PoolState.POOL_STATE_READY, work.session.epoch)
                work.step()
                killed.start()
                pair.wait_in_sync()
        for rank in ranks:
            assert rank.is_alive
            assert sum("rank ready" in line for line in rank.lines) == 1
        logs = [*(rank.log for rank in ranks), *(each.log for server in pair.servers for each in server.processes)]
        assert not [log for log in logs if "pool degraded" in log or "epoch passed" in log]


@pytest.mark.slow
def test_a_watch_of_events_goes_on(etcd: EtcdCluster, tmp_path: Path) -> None:
    with working(etcd, tmp_path) as (pair, work), connect(pair.seeds, deadline_seconds=DEADLINE_SECONDS) as client:
        index, watch = PrefixIndex(), client.watch("m", snapshot=True, heartbeat_seconds=1.0)

        def follow(name: str, token: int) -> None:
            request = work.session.request(name, token_ids=[token] * 160)
            assert work.session.admit(request)
            work.session.mark_executed()
            while index.num_prefix_blocks(request.hashes) < 10:
                index.apply(next(watch))

        follow("before", 1)
        pair.wait_in_sync()
        pair.primary().kill()
        follow("after", 2)


@pytest.mark.slow
def test_the_loss_of_both_states_is_told(etcd: EtcdCluster, tmp_path: Path) -> None:
    with working(etcd, tmp_path) as (pair, work):
        for server in pair.servers:
            server.kill()
        for path in (path for server in pair.servers for path in server.folder.iterdir()):
            if path.name != "member":  # they keep their identity
                path.unlink()
        pair.start()
        with pytest.raises(AbortedError) as caught:
            work.step()
        assert caught.value.reason == "JOURNAL_DROPPED"
        with connect(pair.seeds, deadline_seconds=DEADLINE_SECONDS) as client:
            client.create_pool(CONFIG)
            assert client.open_session("m").epoch > work.session.epoch


@pytest.mark.slow
def test_a_hand_over_fails_no_call(etcd: EtcdCluster, tmp_path: Path) -> None:
    with working(etcd, tmp_path) as (pair, work):
        with Stepper(work) as stepper:
            for _ in range(4):
                stopped = pair.primary()
                assert stopped.process.stop() == 0
                stepper.wait(20)
                assert pair.primary() is pair.other(stopped)
                stopped.start()
                pair.wait_in_sync()
        work.check()


@pytest.mark.slow
def test_a_primary_that_stops_alone_says_so_and_a_shard_can_be_waited_for(etcd: EtcdCluster, tmp_path: Path) -> None:
    with a_pair(etcd, tmp_path, *PATIENT) as pair:
        first, second = pair.servers
        wait_in_sync = partial(kvpool, "shard", "wait-in-sync", "--address", first.address)
        first.start().wait_for("became primary")
        alone = wait_in_sync("--wait-seconds", "0.1")
        assert (alone.returncode, alone.stdout) == (1, "")
        assert f"shard {tmp_path.name} has 0 standbys in sync" in alone.stderr
        second.start()
        found = wait_in_sync("--json")
        members = json.loads(found.stdout)["shard"]["members"]
        assert [member["addresses"] for member in members] == [[first.address], [second.address]]
        assert second.process.stop() == 0
        assert first.process.stop() == 0
        assert "primary stops without a standby" in first.process.log
        assert "primary stops without a standby" not in second.process.log


@pytest.mark.slow
def test_an_upgrade_to_another_core_keeps_sessions(etcd: EtcdCluster, tmp_path: Path) -> None:
    """The standby of another version gets the state when the primary stops, which then comes back with that version."""
    shutil.copytree(ROOT / "server/kvpool/core", tmp_path / "new/kvpool/core")
    with (tmp_path / "new/kvpool/core/state.py").open("a") as source:
        source.write("# a later version\n")
    program, upgraded = ("/usr/bin/env", processes.KVPOOL), {"PYTHONPATH": str(tmp_path / "new")}  # with fresh imports
    with working(etcd, tmp_path) as (pair, work):
        work.step()
        old, new = pair.primary(), pair.standby()
        new.kill()
        new.start(program, upgraded).wait_for("OTHER_VERSION")
        with Stepper(work) as stepper:
            assert old.process.stop() == 0
            stepper.wait(20)
            assert pair.primary() is new
            old.start(program, upgraded)
            pair.wait_in_sync()
            stepper.wait(20)
        work.check()


@pytest.mark.slow
def test_without_etcd_steps_go_on_until_a_server_dies_too(tmp_path: Path) -> None:
    with etcd_cluster() as etcd, working(etcd, tmp_path, "--confirm-seconds", "0.5") as (pair, work):
        (node,) = etcd.nodes
        node.stop()
        pair.primary().process.wait_for("directory cannot be used")
        for _ in range(50):
            work.step()
        pair.standby().kill()
        with connect(pair.seeds, deadline_seconds=3.0) as other, pytest.raises(KvpoolError) as caught:
            until_answered(lambda: other.open_session("m"))
        assert caught.value.reason == "NOT_CONFIRMED"
        etcd.start(node)
        work.step()
        work.check()


@pytest.mark.slow
def test_servers_wait_for_an_etcd_that_is_not_there_yet(tmp_path: Path) -> None:
    with etcd_cluster() as etcd, a_pair(etcd, tmp_path) as pair:
        (node,) = etcd.nodes
        node.stop()
        for server in pair.servers:
            server.start().wait_for("directory cannot be used")
        with connect(pair.seeds, deadline_seconds=5.0) as client, pytest.raises(KvpoolError) as caught:
            until_answered(lambda: client.create_pool(CONFIG))
        assert caught.value.reason == "NO_PRIMARY"
        assert all(server.address in str(caught.value) for server in pair.servers)
        for server in pair.servers:
            (line,) = [line for line in server.process.lines if "directory cannot be used" in line]
            assert node.endpoint in line
            assert not bugs_in("".join(server.process.lines), ["directory cannot be used"])
        etcd.start(node)
        pair.wait_in_sync()
        with connect(pair.seeds, deadline_seconds=DEADLINE_SECONDS) as client:
            client.create_pool(CONFIG)
