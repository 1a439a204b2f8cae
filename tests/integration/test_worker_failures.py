"""Ranks as real processes that are killed, stopped and cut off: what becomes of the pool and its sessions."""

import contextlib
import signal
import time
from collections.abc import Iterator

import pytest

from kvpool.client import AbortedError, Client, PoolInfo, PoolState, RankState, Session, UnavailableError, connect
from support.answers import until_answered
from support.server import ServerProcess
from support.waiting import DEADLINE_SECONDS, wait_until
from support.workers import Network, Workers, ready

PATIENT = {"heartbeat_seconds": 0.2, "heartbeat_timeout_seconds": 60.0, "grace_seconds": 60.0}
HEARTBEAT_TIMEOUT_SECONDS = 3.0
ATTENTIVE = {**PATIENT, "heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT_SECONDS}
GRACE_SECONDS = 5.0
IMPATIENT = {**ATTENTIVE, "grace_seconds": GRACE_SECONDS}
PROMPT = list(range(100))


@contextlib.contextmanager
def server_on(address: str = "127.0.0.1:0", timing: dict[str, float] = PATIENT) -> Iterator[ServerProcess]:
    with ServerProcess(address, rank_timing=timing, grace_seconds=1.0) as server:
        yield server


@contextlib.contextmanager
def client_of(server: ServerProcess) -> Iterator[Client]:
    with connect(server.addresses[0], deadline_seconds=DEADLINE_SECONDS) as client:
        yield client


def fill(client: Client) -> Session:
    """A session that holds a request, whose prompt is cached for others too."""
    session = client.open_session("m", lease_seconds=60.0)
    request = session.request("r", PROMPT)
    assert session.admit(request)
    session.mark_executed()
    return session


def has_cached(session: Session) -> bool:
    """Whether a new request with the same prompt finds it."""
    return session.get_computed_blocks(session.request(f"again-{session.sequence}", PROMPT)).num_tokens == 96


def wait_for_state(client: Client, state: PoolState.ValueType, epoch: int) -> PoolInfo:
    wait_until(lambda: client.get_pool("m").state == state and client.get_pool("m").epoch == epoch, f"{state} {epoch}")
    return client.get_pool("m")


def assert_refused_for_now(address: str) -> None:
    with connect(address, deadline_seconds=2.0) as client, pytest.raises(UnavailableError) as caught:
        until_answered(lambda: client.open_session("m"))
    assert caught.value.reason == "RANK_LOST"
    assert caught.value.retry_seconds


def assert_starts_anew(client: Client, old: Session, epoch: int) -> None:
    """The session of before is aborted, and a new one finds nothing of what was cached."""
    with pytest.raises(AbortedError) as caught:
        old.get_computed_blocks(old.request("late", PROMPT))
    assert caught.value.reason == "EPOCH_PASSED"
    with client.open_session("m") as session:
        assert session.epoch == epoch
        assert not has_cached(session)
        assert session.admit(session.request("new", PROMPT))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 8])
def test_ranks_with_unequal_memory_form_a_pool(workers: Workers, world_size: int) -> None:
    with server_on() as server, client_of(server) as client:
        started = [
            workers.start(server.addresses[0], rank, world_size, blocks=100 + 7 * (world_size - rank))
            for rank in range(world_size)
        ]
        pool = client.wait_until_ready("m", timeout_seconds=DEADLINE_SECONDS)
        assert (pool.config.num_blocks, len(pool.ranks)) == (107, world_size)
        assert {rank.num_blocks for rank in pool.ranks} == {107}, "planned together, so none allocates in vain"
        assert [rank.pid for rank in pool.ranks] == [worker.pid for worker in started]
        with client.open_session("m") as session:
            assert session.admit(session.request("r", PROMPT))
        for worker in started:
            worker.signal(signal.SIGTERM)
        assert [worker.end() for worker in started] == [0] * world_size


def test_a_killed_rank_degrades_the_pool_at_once_and_its_successor_begins_a_new_epoch(workers: Workers) -> None:
    with server_on() as server, client_of(server) as client:
        ranks = workers.form(server.addresses[0], 2)
        session = fill(client)
        ranks[1].kill()
        pool = wait_for_state(client, PoolState.POOL_STATE_DEGRADED, 1)
        assert pool.ranks[1].state == RankState.RANK_STATE_LOST, "its stream broke: no heartbeat had to be missed"
        assert_refused_for_now(server.addresses[0])
        successor = workers.start(server.addresses[0], 1, 2)
        for rank in (ranks[0], successor):
            rank.wait_for(ready(2))
        assert_starts_anew(client, session, epoch=2)


@pytest.mark.slow
def test_a_killed_rank_without_a_successor_ends_the_epoch_after_the_grace_time(workers: Workers) -> None:
    with server_on(timing={**PATIENT, "grace_seconds": GRACE_SECONDS}) as server, client_of(server) as client:
        ranks = workers.form(server.addresses[0], 2)
        session = fill(client)
        ranks[1].kill()
        pool = wait_for_state(client, PoolState.POOL_STATE_DEGRADED, 2)
        assert (pool.cached_blocks, pool.sessions, pool.free_blocks) == (0, 0, pool.config.num_blocks - 1)
        assert_refused_for_now(server.addresses[0])
        workers.start(server.addresses[0], 1, 2)
        client.wait_until_ready("m", timeout_seconds=DEADLINE_SECONDS)
        assert_starts_anew(client, session, epoch=2)


def test_a_stopped_rank_that_resumes_within_the_grace_time_loses_nothing(workers: Workers) -> None:
    with server_on(timing=ATTENTIVE) as server, client_of(server) as client:
        ranks = workers.form(server.addresses[0], 2)
        session = fill(client)
        ranks[1].pause()
        pool = wait_for_state(client, PoolState.POOL_STATE_DEGRADED, 1)
        assert pool.ranks[1].state == RankState.RANK_STATE_SILENT
        assert_refused_for_now(server.addresses[0])
        ranks[1].resume()
        wait_for_state(client, PoolState.POOL_STATE_READY, 1)
        assert has_cached(session)


@pytest.mark.slow
def test_a_stopped_rank_that_resumes_too_late_joins_the_next_epoch(workers: Workers) -> None:
    with server_on(timing=IMPATIENT) as server, client_of(server) as client:
        ranks = workers.form(server.addresses[0], 2)
        session = fill(client)
        ranks[1].pause()
        wait_for_state(client, PoolState.POOL_STATE_DEGRADED, 2)
        ranks[1].resume()
        for rank in ranks:
            rank.wait_for(ready(2))
        pids = [rank.pid for rank in ranks]
        assert [rank.pid for rank in client.get_pool("m").ranks] == pids
        assert_starts_anew(client, session, epoch=2)


@pytest.mark.slow
@pytest.mark.parametrize("comes_back_in_time", [True, False])
def test_a_rank_that_is_cut_off(workers: Workers, *, comes_back_in_time: bool) -> None:
    timing = ATTENTIVE if comes_back_in_time else IMPATIENT
    with server_on(timing=timing) as server, client_of(server) as client:
        network = Network(server.addresses[0])
        first = workers.start(server.addresses[0], 0, 2)
        second = workers.start(network.address, 1, 2)
        for rank in (first, second):
            rank.wait_for(ready(1))
        session = fill(client)
        network.cut()
        if comes_back_in_time:
            wait_for_state(client, PoolState.POOL_STATE_DEGRADED, 1)
            second.wait_for("SERVER_SILENT")
            network.heal()
            wait_for_state(client, PoolState.POOL_STATE_READY, 1)
            assert has_cached(session)
        else:
            wait_for_state(client, PoolState.POOL_STATE_DEGRADED, 2)
            network.heal()
            for rank in (first, second):
                rank.wait_for(ready("[2-9]"))
            assert_starts_anew(client, session, client.get_pool("m").epoch)
        network.close()


@pytest.mark.slow
def test_a_second_process_that_claims_a_rank_is_refused(workers: Workers) -> None:
    with server_on() as server, client_of(server) as client:
        ranks = workers.form(server.addresses[0], 1)
        session = fill(client)
        before = client.get_pool("m")
        second = workers.start(server.addresses[0], 0, 1)
        assert second.end() == 1
        second.wait_for(f"RANK_TAKEN.*process {ranks[0].pid}")
        assert client.get_pool("m") == before
        assert has_cached(session)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ranks_rejoin_a_restarted_server_by_themselves(workers: Workers, how: signal.Signals) -> None:
    with server_on() as server, client_of(server) as client:
        address = server.addresses[0]
        ranks = workers.form(address, 2)
        fill(client)
        server.signal(how)
        server.end()
    with server_on(address) as server, client_of(server) as client:
        for rank in ranks:
            rank.wait_for(ready(2))
        pool = client.wait_until_ready("m", timeout_seconds=DEADLINE_SECONDS)
        assert [rank.pid for rank in pool.ranks] == [rank.pid for rank in ranks]
        for rank in ranks:
            since = rank.lines[rank.lines.index(rank.wait_for(ready(1))) :]
            assert not any("rank allocating" in line for line in since), "it keeps its tensors"
        with client.open_session("m") as session:
            assert session.epoch == 2
            assert not has_cached(session)


@pytest.mark.slow
def test_a_paused_server_gives_up_no_rank(workers: Workers) -> None:
    with server_on(timing=IMPATIENT) as server, client_of(server) as client:
        workers.form(server.addresses[0], 2)
        session = fill(client)
        server.pause()
        # Longer than ranks wait, and longer than they are waited for.
        time.sleep(2 * HEARTBEAT_TIMEOUT_SECONDS + GRACE_SECONDS)
        server.resume()
        wait_for_state(client, PoolState.POOL_STATE_READY, 1)
        assert has_cached(session)


def test_a_rank_leaves_on_sigterm(workers: Workers) -> None:
    with server_on() as server, client_of(server) as client:
        ranks = workers.form(server.addresses[0], 2)
        session = fill(client)
        assert ranks[1].stop() == 0
        pool = wait_for_state(client, PoolState.POOL_STATE_DEGRADED, 2)
        assert pool.ranks[1].state == RankState.RANK_STATE_ABSENT
        workers.start(server.addresses[0], 1, 2)
        client.wait_until_ready("m", timeout_seconds=DEADLINE_SECONDS)
        assert_starts_anew(client, session, epoch=2)
