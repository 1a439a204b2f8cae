"""Ranks that declare their memory, against a real server."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner

from kvpool.cli.pools import pools
from kvpool.client import AbortedError, Client, InvalidArgumentError, PoolState, WrongStateError, connect
from kvpool.core.ranks.messages import DeclaredMemory, Registration
from kvpool.core.specs.pool_config import HashScheme
from kvpool.v1 import worker_pb2
from support.ranks import BLOCK_BYTES, declared, declaring, registration
from support.server import pool_config, running_server
from support.waiting import wait_until
from support.wire_ranks import WireRank, keep

CONFIG = pool_config(enable_events=True, max_in_flight_tokens=64, hash_scheme=HashScheme(none_hash=b"n" * 32))
MEMORY = DeclaredMemory(CONFIG, 100 * BLOCK_BYTES, (("model", "llama"), ("revision", "7")))


@pytest.fixture
def address() -> Iterator[str]:
    with running_server(quarantine_seconds=600.0) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with connect(address) as client:
        yield client


def form(address: str, *memories: DeclaredMemory) -> list[WireRank]:
    """Forms a pool with one rank for each declaration; all answer fences."""
    ranks = [
        WireRank(address).register(declaring(rank, len(memories), memory, fences=True))
        for rank, memory in enumerate(memories)
    ]
    for rank in ranks:
        rank.allocate()
    for rank in ranks:
        rank.wait_for("ready")
    return ranks


def test_a_pool_forms_as_its_ranks_declare(address: str, client: Client) -> None:
    ranks = form(address, MEMORY, replace(MEMORY, config=replace(CONFIG, num_blocks=80), size_bytes=80 * 999))
    for rank, size_bytes in zip(ranks, (80 * BLOCK_BYTES, 80 * 999), strict=True):
        plan = rank.wait_for("plan").plan
        assert (plan.num_blocks, plan.max_model_len) == (80, 1024)
        (tensor,) = plan.tensors
        assert (tensor.size_bytes, [*tensor.shared_by]) == (size_bytes, ["layer.0"])
    with client.open_session("m") as session:
        assert not session.config.difference(replace(CONFIG, num_blocks=80))
        assert session.config.hash_scheme.none_hash == b"n" * 32
        assert session.admit(session.request("r", list(range(100))))
    info = client.get_pool("m")
    assert (info.state, dict(info.fingerprint)) == (PoolState.POOL_STATE_READY, dict(MEMORY.fingerprint))
    listed = CliRunner().invoke(pools, ["--address", address, "--json"], catch_exceptions=False)
    assert json.loads(listed.stdout)["pools"][0]["fingerprint"] == dict(MEMORY.fingerprint)


def test_a_scheduler_that_declares_another_pool_is_refused(address: str, client: Client) -> None:
    form(address, MEMORY)
    with pytest.raises(WrongStateError) as caught:
        client.create_pool(replace(CONFIG, num_blocks=99))
    assert (caught.value.reason, caught.value.field) == ("POOL_DIFFERS", "config.num_blocks")
    assert client.create_pool(replace(CONFIG, hash_scheme=HashScheme())).config.num_blocks == 100


@pytest.mark.parametrize(
    ("memory", "reason", "field"),
    [
        (declared(name="other"), "INVALID_VALUE", "register.declared.config.name"),
        (
            replace(MEMORY, fingerprint=(("model", "llama"), ("revision", "8"))),
            "RANKS_DISAGREE",
            'register.declared.fingerprint["revision"]',
        ),
    ],
)
def test_a_declaration_that_is_refused_names_its_field(
    address: str, client: Client, memory: DeclaredMemory, reason: str, field: str
) -> None:
    WireRank(address).register(declaring(0, memory=MEMORY)).wait_for("registered")
    before = client.get_pool("m")
    error = WireRank(address).register(declaring(1, memory=memory, blocks=200)).wait_ended()
    assert (error.reason, error.field) == (reason, field)
    assert client.get_pool("m") == before


PROMPT = list(range(100))
HELD_BLOCKS = 25


def gone(rank: WireRank, *numbers: int) -> None:
    rank.say(sessions_gone=worker_pb2.SessionsGone(session_numbers=numbers))


def next_fence(rank: WireRank, number: int) -> worker_pb2.Fence:
    """Waits for the fence that names a session as ended."""
    return rank.wait_for(
        "fence",
        lambda m: number <= m.fence.last_session_number and number not in m.fence.live_session_numbers,
    ).fence


def test_blocks_of_a_dead_process_are_free_as_soon_as_all_ranks_answer(address: str, client: Client) -> None:
    ranks = form(address, MEMORY, MEMORY)
    free = client.get_pool("m").free_blocks
    dead, alive = (client.open_session("m", client_name=name, lease_seconds=60.0) for name in ("dead", "alive"))
    request = dead.request("r", PROMPT)
    assert dead.admit(request)
    gone(ranks[1], dead.session_number, 4711)
    fences = [next_fence(rank, dead.session_number) for rank in ranks]
    assert [list(fence.live_session_numbers) for fence in fences] == [[alive.session_number]] * 2
    with pytest.raises(AbortedError) as caught:
        dead.free(request)
    assert caught.value.reason == "PROCESS_GONE"
    keep(ranks[0], fences[0])
    ranks[0].beat(77).wait_for("status", lambda m: m.status.heartbeat_sequence == 77)
    info = client.get_pool("m")
    assert (info.quarantined_sessions, info.quarantined_blocks) == (1, HELD_BLOCKS)
    assert (info.free_blocks, info.activity.processes_gone) == (free - HELD_BLOCKS, 1)
    keep(ranks[1], fences[1])
    wait_until(lambda: client.get_pool("m").free_blocks == free, "all ranks have answered")
    assert alive.admit(alive.request("r", PROMPT))
    gone(ranks[0], dead.session_number)
    ranks[0].beat(78).wait_for("status", lambda m: m.status.heartbeat_sequence == 78)
    assert client.get_pool("m").sessions == 1, "a number that has ended is ignored"
    alive.close()


@pytest.mark.parametrize(
    ("registered", "count", "field"),
    [
        (registration(0, 1), 1, "sessions_gone"),
        (declaring(0, 1, MEMORY), 4097, "sessions_gone.session_numbers"),
    ],
)
def test_a_report_that_is_refused_ends_the_stream_alone(
    address: str, client: Client, registered: Registration, count: int, field: str
) -> None:
    rank = WireRank(address).register(registered).allocate()
    rank.wait_for("ready")
    session = client.open_session("m")
    gone(rank, *[session.session_number] * count)
    error = rank.wait_ended()
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field
    assert client.get_pool("m").sessions == 1
