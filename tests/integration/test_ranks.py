"""Ranks on the wire against a real server, message by message, as the ranks and the schedulers receive them."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.client import (
    AbortedError,
    Client,
    DeadlineError,
    InvalidArgumentError,
    NotFoundError,
    PoolState,
    RankState,
    UnavailableError,
    WrongStateError,
    connect,
)
from kvpool.core.ranks.messages import HeldTensors
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, spec_pb2, worker_pb2
from kvpool.wire.ranks import registration_to_proto
from support.ranks import OPTIONS, registration
from support.server import ServerProcess, pool_config, running_server
from support.waiting import DEADLINE_SECONDS, wait_until
from support.wire_ranks import WireRank

TIMING = {"heartbeat_seconds": 0.2, "heartbeat_timeout_seconds": 60.0, "grace_seconds": 60.0}
IMPATIENT = {"heartbeat_seconds": 0.1, "heartbeat_timeout_seconds": 2.0, "grace_seconds": 5.0}


@pytest.fixture
def address() -> Iterator[str]:
    with running_server(rank_timing=TIMING) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with connect(address, deadline_seconds=3.0) as client:
        yield client


def form(address: str, world_size: int = 2, **said: object) -> list[WireRank]:
    base = replace(registration(world_size=world_size), **said)  # type: ignore[arg-type]
    ranks = [
        WireRank(address).register(replace(base, rank=rank, boot_id=f"process-{rank}"))  # type: ignore[arg-type]
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.allocate()
    for rank in ranks:
        rank.wait_for("ready")
    return ranks


def test_a_pool_forms_and_is_ready(address: str, client: Client) -> None:
    first = WireRank(address).register(replace(registration(0), device="cpu", host="here", pid=17))
    told = first.wait_for("registered").registered
    assert (told.heartbeat_seconds, told.heartbeat_timeout_seconds, told.grace_seconds) == (0.2, 60.0, 60.0)
    first.wait_for("status", lambda m: list(m.status.absent_ranks) == [1])
    pool = client.get_pool("m")
    assert (pool.state, pool.config.num_blocks, len(pool.ranks)) == (PoolState.POOL_STATE_FORMING, 0, 2)
    assert (pool.ranks[0].state, pool.ranks[0].device, pool.ranks[0].host, pool.ranks[0].pid) == (
        RankState.RANK_STATE_REGISTERED,
        "cpu",
        "here",
        17,
    )
    assert pool.ranks[1].state == RankState.RANK_STATE_ABSENT
    second = WireRank(address).register(registration(1, blocks=90))
    first.allocate()
    second.allocate(80)
    for rank in (first, second):
        ready = rank.wait_for("ready").ready
        assert (ready.epoch, ready.num_blocks, ready.max_model_len) == (1, 80, 1024)
    pool = client.wait_until_ready("m", timeout_seconds=DEADLINE_SECONDS)
    assert (pool.state, pool.config.num_blocks, pool.epoch) == (PoolState.POOL_STATE_READY, 80, 1)
    assert [rank.num_blocks for rank in pool.ranks] == [90, 80]
    with client.open_session("m") as session:
        request = session.request("r", list(range(100)))
        assert session.admit(request)
        assert session.epoch == 1


def test_waiting_for_a_pool_returns_when_ready_or_reports_its_state(address: str, client: Client) -> None:
    with pytest.raises(NotFoundError):
        client.wait_until_ready("m", timeout_seconds=0.05)
    WireRank(address).register(registration(0)).wait_for("registered")
    with pytest.raises(DeadlineError, match=r"forming after 0.05 s; 1 of 2 ranks are not there: 1"):
        client.wait_until_ready("m", timeout_seconds=0.05)
    with pytest.raises(InvalidArgumentError, match="timeout_seconds"):
        client.wait_until_ready("m", timeout_seconds=-1)
    client.create_pool(pool_config("declared"))
    assert client.wait_until_ready("declared", timeout_seconds=0).state == PoolState.POOL_STATE_READY


def test_a_pool_is_waited_for_over_a_server_that_starts_and_restarts(tmp_path: Path) -> None:
    address, fresh = f"unix:{tmp_path / 's'}", f"unix:{tmp_path / 't'}"  # the second has never been tried in vain
    with connect(address, deadline_seconds=5.0) as client, ThreadPoolExecutor(1) as threads:
        started = time.monotonic()
        with pytest.raises(UnavailableError):
            client.wait_until_ready("m", timeout_seconds=2.0)
        assert time.monotonic() - started > 1.9
        waiting = threads.submit(client.wait_until_ready, "m", timeout_seconds=DEADLINE_SECONDS)
        ServerProcess(address, grace_seconds=1.0).stop()
        assert not waiting.done()
        server = ServerProcess(address, fresh, grace_seconds=1.0)
        with connect(fresh) as other:
            other.create_pool(pool_config("m"))
        assert waiting.result().state == PoolState.POOL_STATE_READY
        server.stop()


def test_schedulers_cannot_use_or_create_a_forming_pool(address: str, client: Client) -> None:
    WireRank(address).register(registration(0)).wait_for("registered")
    with pytest.raises(WrongStateError) as caught:
        client.open_session("m")
    assert (caught.value.reason, caught.value.message) == (
        "POOL_FORMING",
        "1 of 2 ranks are present; wait until the pool is ready",
    )
    with pytest.raises(WrongStateError, match="1 of 2 ranks"):
        client.create_pool(pool_config("m"))
    assert client.get_pool("m").state == PoolState.POOL_STATE_FORMING


def test_ranks_cannot_join_a_pool_that_a_scheduler_created(address: str, client: Client) -> None:
    client.create_pool(pool_config("m"))
    error = WireRank(address).register(registration(0)).wait_ended()
    assert (type(error), error.reason, error.field) == (WrongStateError, "POOL_DIFFERS", "register.pool_name")
    assert not client.get_pool("m").ranks


def test_while_a_rank_is_lost_nothing_is_allocated_and_nothing_is_lost(address: str, client: Client) -> None:
    ranks = form(address)
    with client.open_session("m") as session:
        request = session.request("r", list(range(100)))
        assert session.admit(request)
        before = client.get_pool("m")
        ranks[1].cut()
        wait_until(lambda: client.get_pool("m").state == PoolState.POOL_STATE_DEGRADED, "degraded")
        ranks[0].wait_for("status", lambda m: list(m.status.absent_ranks) == [1])
        with pytest.raises(UnavailableError) as caught:
            session.allocate_slots(request, 16)  # needs a block
        assert caught.value.reason == "RANK_LOST"
        assert caught.value.retry_seconds
        with pytest.raises(UnavailableError):
            client.open_session("m")
        back = WireRank(address).register(registration(1, held=HeldTensors(1, 100)))
        assert back.wait_for("ready").ready.epoch == 1
        session.settle()
        after = session.pool()
        assert (after.epoch, after.free_blocks, after.state) == (1, before.free_blocks - 1, PoolState.POOL_STATE_READY)
        assert after.cached_blocks == before.cached_blocks > 0
        request.append([1, 2, 3])
        assert session.allocate_slots(request, 3)


def test_a_lost_answer_is_repeated_even_while_a_rank_is_lost(address: str, client: Client) -> None:
    ranks = form(address)
    session = client.open_session("m")
    with grpc.insecure_channel(address) as channel:
        stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        update = allocator_pb2.RequestUpdate(request_id="r", num_appended_tokens=20, block_hashes=bytes(32))
        asked = allocator_pb2.AllocateSlotsRequest(
            session_id=session.session_id, sequence=1, request=update, num_new_tokens=20
        )
        answer = stub.AllocateSlots(asked)
        ranks[1].cut()
        wait_until(lambda: client.get_pool("m").state == PoolState.POOL_STATE_DEGRADED, "degraded")
        assert stub.AllocateSlots(asked) == answer


def test_blocks_of_one_epoch_are_refused_in_the_next(address: str, client: Client) -> None:
    ranks = form(address, options=replace(OPTIONS, enable_events=True))
    watch = client.watch("m", from_sequence=1)
    session = client.open_session("m")
    request = session.request("r", list(range(100)))
    assert session.admit(request)
    session.mark_executed()
    promised = session.get_computed_blocks(session.request("again", list(range(100))))
    assert promised.num_tokens == 96
    ranks[1].cut()
    wait_until(lambda: client.get_pool("m").state == PoolState.POOL_STATE_DEGRADED, "degraded")
    successor = WireRank(address).register(
        registration(1, boot_id="successor", options=replace(OPTIONS, enable_events=True))
    )
    assert ranks[0].wait_for("plan", lambda m: m.plan.epoch == 2)
    pool = client.get_pool("m")
    assert (pool.epoch, pool.cached_blocks, pool.sessions, pool.free_blocks) == (2, 0, 0, 99)
    with pytest.raises(AbortedError) as caught:
        session.free(request)
    assert caught.value.reason == "EPOCH_PASSED"
    with pytest.raises(UnavailableError):
        client.open_session("m")
    ranks[0].allocate()
    successor.allocate()
    pool = client.wait_until_ready("m", timeout_seconds=DEADLINE_SECONDS)
    assert (pool.epoch, pool.prefix_cache.requests) == (2, 1), "counters go on"
    with pytest.raises(AbortedError):
        session.mark_executed()
    with client.open_session("m") as fresh:
        assert fresh.epoch == 2
        changed = fresh.allocate_slots(fresh.request("r", list(range(100))), 4, computed=promised)
        assert changed
        assert type(changed).__name__ == "HitChanged"
        assert changed.computed.num_tokens == 0  # type: ignore[union-attr]
    kinds = [type(event).__name__ for _ in range(2) for event in next(watch).events]
    assert kinds[-1] == "AllBlocksCleared"


def test_a_stream_without_messages_ends() -> None:
    with running_server(rank_timing=IMPATIENT) as address:
        error = WireRank(address).wait_ended()
    assert (type(error), error.reason) == (AbortedError, "NOT_REGISTERED")


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        ({"pool_name": "no spaces"}, "INVALID_VALUE", "register.pool_name"),
        ({"layers": [spec_pb2.LayerSpec(layer_name="a")]}, "INVALID_VALUE", "register.layers[0].spec"),
    ],
)
def test_a_registration_that_is_refused_changes_nothing(
    address: str, client: Client, change: dict[str, Any], reason: str, field: str
) -> None:
    WireRank(address).register(registration(0)).wait_for("registered")
    before = client.get_pool("m")
    message = registration_to_proto("m", registration(1))
    for name in change:
        message.ClearField(name)  # type: ignore[arg-type]
    message.MergeFrom(worker_pb2.Register(**change))
    error = WireRank(address).say(register=message).wait_ended()
    assert (error.reason, error.field) == (reason, field)
    assert client.get_pool("m") == before


@pytest.mark.parametrize("message", [{"heartbeat": worker_pb2.Heartbeat(sequence=1)}, {}])
def test_a_stream_begins_with_register(address: str, client: Client, message: dict[str, object]) -> None:
    error = WireRank(address).say(**message).wait_ended()
    assert (type(error), error.field) == (InvalidArgumentError, "message")
    with pytest.raises(NotFoundError):
        client.get_pool("m")


def test_a_second_registration_or_unknown_message_is_refused(address: str) -> None:
    first = WireRank(address).register(registration(0))
    first.register(registration(0))
    assert first.wait_ended().field == "message"
    second = WireRank(address).register(registration(0)).say()
    assert second.wait_ended().field == "message"
