"""Engines that own the tensors, over real sockets: engines share the cache only if they use the same memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.client import (
    Client,
    KvpoolError,
    PoolInfo,
    Session,
    UnavailableError,
    connect,
)
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc
from support.answers import until_answered
from support.server import ServerProcess, pool_config, running_server
from support.waiting import DEADLINE_SECONDS

PROMPT = list(range(41))  # ten full blocks and one token
LEASE_SECONDS = 5.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server(quarantine_seconds=0.5) as address:
        yield address


def fill(session: Session) -> None:
    admission = session.admit(session.request("r", PROMPT))
    assert admission
    session.mark_executed()


def num_hit_tokens(session: Session) -> int:
    return session.get_computed_blocks(session.request("again", PROMPT)).num_tokens


def open_and_die(address: str, pool: str, memory_id: str) -> None:
    """Opens a session, caches ten blocks, and abandons the session like a killed process."""
    with grpc.insecure_channel(address) as channel:
        stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        opened = stub.OpenSession(
            allocator_pb2.OpenSessionRequest(pool_name=pool, lease_seconds=LEASE_SECONDS, memory_id=memory_id)
        )
        update = allocator_pb2.RequestUpdate(
            request_id="r", num_appended_tokens=len(PROMPT), block_hashes=bytes(range(32)) * 10
        )
        stub.AllocateSlots(
            allocator_pb2.AllocateSlotsRequest(
                session_id=opened.session.session_id, sequence=1, request=update, num_new_tokens=len(PROMPT)
            )
        )


def refusal(client: Client, pool: str, memory_id: str) -> tuple[KvpoolError, PoolInfo, PoolInfo]:
    before = until_answered(lambda: client.get_pool(pool))
    with pytest.raises(KvpoolError) as caught:
        until_answered(lambda: client.open_session(pool, memory_id=memory_id))
    return caught.value, before, until_answered(lambda: client.get_pool(pool))


def test_engines_in_one_memory_share_the_cache(client: Client, pool: str) -> None:
    with client.open_session(pool, memory_id="a") as one, client.open_session(pool, memory_id="a") as other:
        fill(one)
        assert num_hit_tokens(other) == 40
        assert (one.epoch, other.epoch, client.get_pool(pool).memory_id) == (1, 1, "a")


def test_another_memory_is_refused_while_one_is_in_use(address: str, client: Client, pool: str) -> None:
    with client.open_session(pool, memory_id="a") as session, connect(address, deadline_seconds=0.5) as hasty:
        fill(session)
        error, before, after = refusal(hasty, pool, "b")
        assert isinstance(error, UnavailableError)
        assert (error.reason, error.field, error.retry_seconds) == ("OTHER_MEMORY", "memory_id", 1.0)
        assert "memory 'a', in use by 1 open sessions" in str(error)
        assert after == before
        assert num_hit_tokens(session) == 40


def test_the_memory_of_a_killed_engine_is_replaced_within_the_deadline(address: str, client: Client, pool: str) -> None:
    open_and_die(address, pool, "a")
    assert (client.get_pool(pool).sessions, client.get_pool(pool).cached_blocks) == (1, 10)
    with client.open_session(pool, memory_id="b") as session:
        info = client.get_pool(pool)
        assert (info.epoch, info.memory_id, info.cached_blocks, session.epoch) == (2, "b", 0, 2)
        assert (info.activity.leases_expired, info.quarantined_sessions) == (1, 0)
        assert num_hit_tokens(session) == 0
        fill(session)


@pytest.mark.slow  # a lease passes
def test_a_pool_is_replaced_when_the_lease_of_a_killed_engine_has_expired(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    settings: dict[str, Any] = {"journal": {"folder": str(tmp_path / "journal")}, "quarantine_seconds": 0.5}
    with ServerProcess(address, **settings) as server, connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(pool_config(), memory_id="a")
        open_and_die(address, "m", "a")
        other = client.create_pool(pool_config(num_blocks=50), memory_id="b")
        assert (other.epoch, other.activity.leases_expired) == (2, 1)
        server.wait_for("pool replaced")
        server.restart()
        assert client.get_pool("m").config.num_blocks == 50
