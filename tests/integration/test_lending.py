"""Memory that processes of engines share and that outlives them: a real server, real lenders and real processes."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client import Client, NotFoundError, PoolState, WrongStateError, connect
from kvpool.client.admin import AdminClient
from kvpool.lending.lender_client import connect_lender
from support.lending import BLOCK_BYTES, NUM_BLOCKS, LenderProcess, declared_with, engine, lender_process
from support.server import pool_config, running_server
from support.waiting import DEADLINE_SECONDS, wait_until
from support.workers import ready

PROMPT = list(range(100, 120))


@pytest.fixture
def server() -> Iterator[str]:
    """A server on which nothing but the answers of ranks ends a quarantine."""
    with running_server(quarantine_seconds=3600.0) as address:
        yield address


@pytest.fixture
def client(server: str) -> Iterator[Client]:
    with connect(server) as client:
        yield client


@pytest.fixture
def lender(server: str) -> Iterator[LenderProcess]:
    with lender_process(server) as lender:
        yield lender


def used_blocks(client: Client) -> int:
    pool = client.get_pool("m")
    return NUM_BLOCKS - 1 - pool.free_blocks


def wait_for_used(client: Client, count: int) -> None:
    wait_until(lambda: used_blocks(client) == count, f"{count} blocks are used")


def wait_for_quarantined(client: Client, count: int) -> None:
    wait_until(
        lambda: client.get_pool("m").quarantined_sessions == count,
        f"{count} sessions are in quarantine",
        DEADLINE_SECONDS,
    )


@pytest.mark.slow
def test_a_second_engine_hits_what_the_first_has_computed(server: str, lender: LenderProcess, client: Client) -> None:
    with engine(server, lender.address) as first, engine(server, lender.address) as second:
        assert first.started["offers"] == [[False, NUM_BLOCKS * BLOCK_BYTES]]
        assert second.started["offers"] == [[True, NUM_BLOCKS * BLOCK_BYTES]]
        assert first("run", "a", PROMPT)["hit"] == 0
        assert second("run", "b", [*PROMPT, 1, 2])["hit"] == len(PROMPT)
        assert second("check", "b", [*PROMPT, 1, 2]) == 0
        assert client.get_pool("m").prefix_cache.shared_hits_tokens == len(PROMPT)


def test_the_blocks_of_a_killed_engine_are_free_at_once_and_stay_cached(
    server: str, lender: LenderProcess, client: Client
) -> None:
    with engine(server, lender.address) as first:
        first("run", "a", PROMPT)
        assert used_blocks(client) == 5
        first.kill()
        wait_for_used(client, 0)
    assert client.get_pool("m").activity.processes_gone == 1
    with engine(server, lender.address) as next_one:
        assert next_one.started["epoch"] == first.started["epoch"]
        assert next_one("run", "b", [*PROMPT, 7])["hit"] == len(PROMPT)
        assert next_one("check", "b", [*PROMPT, 7]) == 0


@pytest.mark.slow
def test_blocks_of_a_stopped_engine_are_given_to_nobody_until_it_answers(
    server: str, lender: LenderProcess, client: Client
) -> None:
    with engine(server, lender.address, lease_seconds=3.0) as stopped, engine(server, lender.address) as other:
        blocks = stopped("run", "a", PROMPT)["blocks"]
        stopped.pause()
        wait_for_quarantined(client, 1)
        for i in range(20):
            taken = other("run", f"r{i}", [1000 + 50 * i + j for j in range(20)])["blocks"]
            assert not set(taken or ()) & set(blocks)
            other("free", f"r{i}")
        assert client.get_pool("m").quarantined_blocks == 5
        stopped.send("step")
        stopped.resume()
        assert stopped.read() == "SESSION_ENDED"
        wait_for_quarantined(client, 0)


@pytest.mark.slow
def test_an_operator_kills_a_stopped_engine(server: str, lender: LenderProcess, client: Client) -> None:
    with (
        engine(server, lender.address, lease_seconds=3.0) as stopped,
        engine(server, lender.address) as other,
        AdminClient(server) as admin,
    ):
        stopped("run", "a", PROMPT)
        other("run", "b", [1, 2, 3, 4, 5])
        stopped.pause()
        wait_for_quarantined(client, 1)
        admin.evict_session("m", stopped.session_number, kill=True)
        wait_for_used(client, 2)
        assert stopped.process.wait(DEADLINE_SECONDS) == -signal.SIGKILL
        admin.evict_session("m", other.session_number, kill=True)
        assert other.process.wait(DEADLINE_SECONDS) == -signal.SIGKILL
        wait_for_used(client, 0)
        with engine(server, lender.address) as idle:
            admin.evict_session("m", idle.session_number, kill=True)
            assert idle.process.wait(DEADLINE_SECONDS) == -signal.SIGKILL, "although the session holds no block"
        with pytest.raises(NotFoundError):
            admin.evict_session("m", 99, kill=True)


@pytest.mark.slow
def test_an_engine_that_unmaps_the_memory_keeps_its_session_and_hits_what_it_had_cached(
    server: str, lender: LenderProcess, client: Client
) -> None:
    with engine(server, lender.address, lease_seconds=3.0) as sleeper, engine(server, lender.address) as other:
        sleeper("run", "a", PROMPT)
        sleeper("free", "a")
        sleeper("unmap")
        assert sleeper("step") == "UNMAPPED"
        wait_until(
            lambda: len(client.get_pool("m").ranks[0].mapping_processes) == 1, "the lender reports the other process"
        )
        assert other("run", "b", [*PROMPT, 1])["hit"] == len(PROMPT)
        other("free", "b")
        for i in range(20):  # all other blocks are used
            assert not other("run", f"r{i}", [1000 + 50 * i + j for j in range(20)])["wrong"]
            other("free", f"r{i}")
            assert not other("run", f"p{i}", [*PROMPT, 2])["wrong"]
            other("free", f"p{i}")
        other.kill()  # its fence waits for no answer of the sleeper
        wait_for_used(client, 0)
        sleeper("map_again")
        assert sleeper("run", "c", [*PROMPT, 7])["hit"] == len(PROMPT)
        assert sleeper("check", "c", [*PROMPT, 7]) == 0


@pytest.mark.slow
def test_memory_is_not_replaced_under_an_engine_that_may_map_it_again(server: str, lender: LenderProcess) -> None:
    with engine(server, lender.address) as sleeper:
        sleeper("run", "a", PROMPT)
        sleeper("unmap")
        for _ in range(2):
            with pytest.raises(WrongStateError, match=r"num_blocks: 16, the memory that other processes use has 32"):
                connect_lender(lender.address, "m").map(declared_with(16), DEADLINE_SECONDS)
        sleeper("map_again")
        assert sleeper("run", "b", [*PROMPT, 9])["hit"] == len(PROMPT)


@pytest.mark.slow
def test_a_killed_lender_continues_with_its_memory_in_the_same_epoch(
    server: str, lender: LenderProcess, client: Client
) -> None:
    with engine(server, lender.address) as first:
        first("run", "a", PROMPT)
        epoch = client.get_pool("m").epoch
        lender.kill()
        wait_until(lambda: client.get_pool("m").state == PoolState.POOL_STATE_DEGRADED, "the rank is lost")
        lender.restart()
        lender.wait_for(ready(epoch))
        wait_until(lambda: client.get_pool("m").state == PoolState.POOL_STATE_READY, "the rank is back")
        with engine(server, lender.address) as second:
            for each, name in ((first, "b"), (second, "c")):
                assert each("run", name, [*PROMPT, 9])["hit"] == len(PROMPT)
                assert each("check", name, [*PROMPT, 9]) == 0
        first.kill()
        wait_for_used(client, 0)


@pytest.mark.slow
def test_an_engine_that_dies_while_no_lender_runs_is_reported_by_the_next(
    server: str, lender: LenderProcess, client: Client
) -> None:
    with engine(server, lender.address) as first:
        first("run", "a", PROMPT)
        lender.kill()
        first.kill()
    lender.restart()
    wait_for_used(client, 0)
    assert client.get_pool("m").activity.processes_gone == 1


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
def test_a_lender_that_stops_frees_its_memory_unless_told_to_keep_it(
    server: str, client: Client, *, keeps: bool
) -> None:
    with lender_process(server, 0, 1, *["--keep-memory"] * keeps) as lender:
        with engine(server, lender.address) as first:
            first("run", "a", PROMPT)
            epoch = client.get_pool("m").epoch
        assert lender.stop() == 0
        assert [path.name for path in lender.folder.rglob("memory-*")] == ["memory-1"] * keeps
        lender.restart()
        lender.wait_for("lending")
        with engine(server, lender.address) as second:
            hit = second("run", "b", [*PROMPT, 1])["hit"]
            assert (hit, second.started["epoch"] == epoch) == (len(PROMPT) * keeps, keeps)


@pytest.mark.slow
def test_two_ranks_lend_alike(server: str, client: Client) -> None:
    with (
        lender_process(server, 0, 2) as zero,
        lender_process(server, 1, 2) as one,
        engine(server, zero.address, one.address) as first,
        engine(server, zero.address, one.address) as second,
    ):
        first("run", "a", PROMPT)
        assert second("run", "b", [*PROMPT, 3])["hit"] == len(PROMPT)
        assert second("check", "b", [*PROMPT, 3]) == 0
        second.kill()
        wait_for_used(client, 5)
        first.kill()
        wait_for_used(client, 0)


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "lent"])
def test_a_lender_says_at_its_start_if_engines_with_memory_of_their_own_have_its_pool(
    server: str, client: Client, *, is_declared: bool
) -> None:
    if is_declared:
        client.create_pool(pool_config("m"))
    else:
        with lender_process(server) as lender, engine(server, lender.address):
            lender.wait_for(f'rank ready .*bytes="{NUM_BLOCKS * BLOCK_BYTES / 2**10:.1f} KiB"')
    with lender_process(server) as lender:
        (*before, _) = lender.lines
        assert len(before) == is_declared
        assert all("pool cannot be lent" in line and "kvpool remove-pool" in line for line in before)


@pytest.mark.slow
def test_a_second_lender_of_a_rank_is_refused(server: str, lender: LenderProcess) -> None:
    second = LenderProcess(server, lender.folder, waits=False)
    assert second.end() == 1
    assert "another process lends rank 0 of pool 'm' on this machine" in "".join(second.lines)


@pytest.mark.slow
def test_a_lender_without_its_socket_keeps_the_memory_of_an_earlier_one(server: str) -> None:
    with lender_process(server, 0, 1, "--keep-memory") as lender:
        with engine(server, lender.address) as first:
            first("run", "a", PROMPT)
        assert lender.stop() == 0
        path = Path(lender.address.removeprefix("unix:"))
        path.write_text("a file of somebody else")
        second = LenderProcess(server, lender.folder, waits=False)
        assert second.end() != 0
        assert f"--lend: {path} exists, and is not a socket" in "".join(second.lines)
        assert path.read_text() == "a file of somebody else"
        assert [each.name for each in lender.folder.rglob("memory-*")] == ["memory-1"]
