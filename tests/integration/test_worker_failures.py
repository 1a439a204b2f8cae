"""Ranks as real processes that are killed, stopped and cut off: what becomes of the pool and its sessions."""

import contextlib
import signal
from collections.abc import Iterator

import pytest

from kvpool.client import AbortedError, Client, PoolInfo, PoolState, RankState, Session, UnavailableError, connect
from support.answers import until_answered
from support.server import ServerProcess
from support.waiting import DEADLINE_SECONDS, wait_until
from support.workers import Workers, ready

PATIENT = {"heartbeat_seconds": 0.2, "heartbeat_timeout_seconds": 60.0, "grace_seconds": 60.0}
ATTENTIVE = {**PATIENT, "heartbeat_timeout_seconds": 3.0}
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


@pytest.mark.slow  # a rank is silent
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
