"""One server with real sockets: errors, leases, streams, two sessions in one pool, stopping."""

import queue
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from kvpool.client import (
    AbortedError,
    Client,
    ExhaustedError,
    ExtraKeys,
    HitChanged,
    InvalidArgumentError,
    KvpoolError,
    NotFoundError,
    UnavailableError,
    WrongStateError,
    aio,
    connect,
)
from kvpool.server.app import Server
from kvpool.server.config import ServerConfig
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, event_pb2, event_pb2_grpc, pool_pb2, spec_pb2, step_pb2
from kvpool.wire.errors import from_rpc_error
from support import processes
from support.server import ServerProcess, pool_config, running_server
from support.waiting import wait_until

PROMPT = list(range(41))  # ten full blocks and one token


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server(max_message_bytes=128 * 1024) as address:
        yield address


def full_attention(**fields: Any) -> pool_pb2.KvCacheGroup:
    spec = spec_pb2.FullAttentionSpec(attention=spec_pb2.AttentionSpec(**fields))
    return pool_pb2.KvCacheGroup(spec=spec_pb2.KvCacheSpec(full_attention=spec))


def sliding_window(window: int, *names: str) -> pool_pb2.KvCacheGroup:
    spec = spec_pb2.SlidingWindowSpec(attention=spec_pb2.AttentionSpec(block_size=4), sliding_window=window)
    return pool_pb2.KvCacheGroup(spec=spec_pb2.KvCacheSpec(sliding_window=spec), layer_names=names)


def cross_attention() -> pool_pb2.KvCacheGroup:
    spec = spec_pb2.CrossAttentionSpec(attention=spec_pb2.AttentionSpec(block_size=4))
    return pool_pb2.KvCacheGroup(spec=spec_pb2.KvCacheSpec(cross_attention=spec))


def wire_config(**fields: Any) -> pool_pb2.PoolConfig:
    group = full_attention(block_size=4)
    defaults: dict[str, Any] = {
        "name": "bad",
        "num_blocks": 10,
        "max_model_len": 100,
        "reuse_order": pool_pb2.REUSE_ORDER_LRU,
        "groups": [group],
    }
    return pool_pb2.PoolConfig(**{**defaults, **fields})


BAD_POOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero blocks": ("config.num_blocks", {"num_blocks": 0}),
    "only the null block": ("config.num_blocks", {"num_blocks": 1}),
    "2^31 blocks": ("config.num_blocks", {"num_blocks": 2**31}),
    "too few blocks for one request": ("config.num_blocks", {"num_blocks": 25}),
    "more blocks than the server gives": ("config.num_blocks", {"num_blocks": 2**31 - 1}),
    "no length": ("config.max_model_len", {"max_model_len": 0}),
    "no name": ("config.name", {"name": ""}),
    "odd name": ("config.name", {"name": "a b"}),
    "no groups": ("config.groups", {"groups": []}),
    "no spec": ("config.groups[0].spec", {"groups": [pool_pb2.KvCacheGroup()]}),
    "no block size": (
        "config.groups[0].spec.full_attention.attention.block_size",
        {"groups": [full_attention()]},
    ),
    "no window": (
        "config.groups[1].spec.sliding_window.sliding_window",
        {"groups": [full_attention(block_size=4), sliding_window(0)]},
    ),
    "a layer twice": (
        "config.groups[1].layer_names[0]",
        {"groups": [sliding_window(9, "layer.0"), sliding_window(9, "layer.0")]},
    ),
    "cross attention with caching": ("config.disable_caching", {"groups": [cross_attention()]}),
    "257 groups": ("config.groups", {"groups": [full_attention(block_size=4)] * 257}),
    "no order": ("config.reuse_order", {"reuse_order": pool_pb2.REUSE_ORDER_UNSPECIFIED}),
    "odd order": ("config.reuse_order", {"reuse_order": 99}),
    "odd hash size": ("config.hash_scheme.size_bytes", {"hash_scheme": pool_pb2.HashScheme(size_bytes=3)}),
}


@pytest.mark.parametrize("case", BAD_POOLS)
def test_invalid_pools_are_refused_and_not_created(case: str, stub: allocator_pb2_grpc.AllocatorServiceStub) -> None:
    field, change = BAD_POOLS[case]
    with pytest.raises(grpc.RpcError) as caught:
        stub.CreatePool(allocator_pb2.CreatePoolRequest(config=wire_config(**change)))
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetPool(allocator_pb2.GetPoolRequest(pool_name="bad"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_errors_carry_status_details(stub: allocator_pb2_grpc.AllocatorServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.CreatePool(allocator_pb2.CreatePoolRequest(config=wire_config(num_blocks=0)))
    status = rpc_status.from_call(caught.value)
    assert status is not None
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.reason, info.domain, info.metadata["field"]) == ("INVALID_VALUE", "kvpool", "config.num_blocks")
    assert bad.field_violations[0].field == "config.num_blocks"


def test_a_pool_with_too_few_blocks_for_one_request_is_refused_unless_allowed(
    stub: allocator_pb2_grpc.AllocatorServiceStub,
) -> None:
    declared = wire_config(name="few", num_blocks=25)
    with pytest.raises(grpc.RpcError) as caught:
        stub.CreatePool(allocator_pb2.CreatePoolRequest(config=declared))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(caught.value)
    assert (error.reason, error.field) == ("ONE_REQUEST_DOES_NOT_FIT", "config.num_blocks")
    for number in ("100 tokens", "25 blocks", "24 are available", "has 96 tokens"):
        assert number in error.message
    declared.allow_too_few_blocks = True
    created = stub.CreatePool(allocator_pb2.CreatePoolRequest(config=declared)).pool
    assert created.config.allow_too_few_blocks
    declared.allow_too_few_blocks = False
    assert stub.CreatePool(allocator_pb2.CreatePoolRequest(config=declared)).pool == created


def test_a_second_declaration_of_a_pool_must_be_equal(client: Client) -> None:
    first = client.create_pool(pool_config("again"))
    assert client.create_pool(pool_config("again")).config == first.config
    with pytest.raises(WrongStateError, match="num_blocks") as caught:
        client.create_pool(pool_config("again", 101))
    assert caught.value.reason == "POOL_DIFFERS"


def test_only_sessions_receive_the_none_hash(client: Client, pool: str) -> None:
    assert client.get_pool(pool).config.hash_scheme.none_hash == b""
    with client.open_session(pool) as one, client.open_session(pool) as other:
        assert len(one.config.hash_scheme.none_hash) == 32
        assert one.config == other.config


def test_unknown_pool_session_and_request(client: Client, stub: allocator_pb2_grpc.AllocatorServiceStub) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        client.open_session("nowhere")
    calls: tuple[Callable[[], object], ...] = (
        lambda: stub.KeepAlive(allocator_pb2.KeepAliveRequest(session_id="x")),
        lambda: stub.CloseSession(allocator_pb2.CloseSessionRequest(session_id="x")),
        lambda: stub.Free(allocator_pb2.FreeRequest(session_id="x", sequence=1)),
        lambda: list(stub.Schedule(iter([step_pb2.Step(session_id="x", sequence=1)]))),
    )
    for unknown in calls:
        with pytest.raises(grpc.RpcError) as caught:
            unknown()
        assert from_rpc_error(caught.value).reason == "SESSION_NOT_FOUND"


@pytest.fixture
def session_id(stub: allocator_pb2_grpc.AllocatorServiceStub, pool: str) -> str:
    session = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name=pool)).session
    return session.session_id


def update(**fields: Any) -> allocator_pb2.RequestUpdate:
    return allocator_pb2.RequestUpdate(**{"request_id": "r", **fields})


BAD_CALLS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "hash of a wrong length": (
        "GetComputedBlocks",
        "InvalidArgumentError",
        "request.block_hashes",
        {"request": update(num_appended_tokens=4, block_hashes=b"short")},
    ),
    "too many hashes": (
        "GetComputedBlocks",
        "InvalidArgumentError",
        "request.block_hashes",
        {"request": update(num_appended_tokens=4, block_hashes=b"h" * 64)},
    ),
    "huge request": (
        "GetComputedBlocks",
        "InvalidArgumentError",
        "request.num_appended_tokens",
        {"request": update(num_appended_tokens=2**32 - 1)},
    ),
    "no request id": (
        "GetComputedBlocks",
        "InvalidArgumentError",
        "request.request_id",
        {"request": update(request_id="")},
    ),
    "long request id": (
        "GetComputedBlocks",
        "InvalidArgumentError",
        "request.request_id",
        {"request": update(request_id="r" * 257)},
    ),
    "nothing to allocate": (
        "AllocateSlots",
        "InvalidArgumentError",
        "num_new_tokens",
        {"request": update(), "num_new_tokens": 0},
    ),
    "huge allocation": (
        "AllocateSlots",
        "InvalidArgumentError",
        "num_new_tokens",
        {"request": update(), "num_new_tokens": 2**32 - 1},
    ),
    "huge look-ahead": (
        "AllocateSlots",
        "InvalidArgumentError",
        "num_lookahead_tokens",
        {"request": update(), "num_new_tokens": 1, "num_lookahead_tokens": 2**31},
    ),
    "more rejected than computed": (
        "AllocateSlots",
        "InvalidArgumentError",
        "num_rejected_tokens",
        {"request": update(), "num_new_tokens": 1, "num_rejected_tokens": 1},
    ),
    "a promise that no look-up made": (
        "AllocateSlots",
        "InvalidArgumentError",
        "computed.num_tokens",
        {
            "request": update(num_appended_tokens=3),
            "num_new_tokens": 1,
            "computed": allocator_pb2.ComputedBlocks(num_tokens=4, groups=[allocator_pb2.GroupBlocks()]),
        },
    ),
    "a promised block that does not exist": (
        "AllocateSlots",
        "InvalidArgumentError",
        "computed",
        {
            "request": update(num_appended_tokens=5, block_hashes=b"h" * 32),
            "num_new_tokens": 1,
            "computed": allocator_pb2.ComputedBlocks(num_tokens=4, groups=[allocator_pb2.GroupBlocks(block_ids=[100])]),
        },
    ),
    "free of an unknown request": ("Free", "NotFoundError", "request.request_id", {"request": update()}),
    "cache of an unknown request": ("CacheBlocks", "NotFoundError", "request.request_id", {"request": update()}),
    "eviction of the null block": ("EvictBlocks", "InvalidArgumentError", "block_ids", {"block_ids": [0]}),
    "eviction of more than the pool has": (
        "EvictBlocks",
        "InvalidArgumentError",
        "block_ids",
        {"block_ids": [1] * 5000},
    ),
    "eviction beyond the pool": ("EvictBlocks", "InvalidArgumentError", "block_ids", {"block_ids": [2**31]}),
    "a gap in the sequence": ("ResetPrefixCache", "WrongStateError", "sequence", {"sequence": 3}),
    "no sequence": ("ResetPrefixCache", "InvalidArgumentError", "sequence", {"sequence": 0}),
    "execution of what was not sent": (
        "MarkExecuted",
        "InvalidArgumentError",
        "executed_sequence",
        {"executed_sequence": 1},
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_refused_call_names_the_field_and_changes_nothing(
    case: str, session_id: str, pool: str, client: Client, stub: allocator_pb2_grpc.AllocatorServiceStub
) -> None:
    method, kind, field, fields = BAD_CALLS[case]
    before = client.get_pool(pool)
    request_type = getattr(allocator_pb2, f"{method}Request")
    numbered = {} if method == "MarkExecuted" else {"sequence": 1}
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method)(request_type(**{"session_id": session_id, **numbered, **fields}))
    error = from_rpc_error(caught.value)
    assert (type(error).__name__, error.field) == (kind, field)
    assert client.get_pool(pool) == before
    good = allocator_pb2.AllocateSlotsRequest(
        session_id=session_id, sequence=1, request=update(num_appended_tokens=3), num_new_tokens=3
    )
    assert list(stub.AllocateSlots(good).new_blocks[0].block_ids) == [1]


def test_a_request_id_is_declared_once(client: Client, pool: str) -> None:
    with client.open_session(pool) as session:
        session.get_computed_blocks(session.request("r", PROMPT))
        before = client.get_pool(pool)
        with pytest.raises(InvalidArgumentError, match="in use"):
            session.get_computed_blocks(session.request("r", PROMPT))
        assert client.get_pool(pool) == before
        assert session.admit(session.request("other", PROMPT)) is not None


def test_a_message_over_the_limit_is_refused_and_the_session_continues(client: Client, pool: str) -> None:
    with client.open_session(pool) as session:
        with pytest.raises(ExhaustedError):
            session.evict_blocks([1] * 200_000)
        assert session.admit(session.request("r", PROMPT)) is not None


def test_garbage_on_the_socket_has_no_effect(address: str, client: Client, pool: str) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(address.removeprefix("unix:"))
        raw.sendall(b"\x00\xff not http/2 \r\n\r\n" * 100)
    with grpc.insecure_channel(address) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/kvpool.v1.AllocatorService/GetPool")
        with pytest.raises(grpc.RpcError):
            call(b"\xff\xff\xff\xff")
    assert client.get_pool(pool).free_blocks == 99


def test_an_evicted_hit_has_the_outcome_changed(client: Client, pool: str) -> None:
    with client.open_session(pool) as one, client.open_session(pool) as other:
        first = one.request("a", PROMPT)
        one.admit(first)
        one.mark_executed()
        one.free(first)
        late = other.request("b", PROMPT)
        hit = other.get_computed_blocks(late)
        assert hit.num_tokens == 40
        one.evict_blocks([hit.block_ids[0][3]])
        before = client.get_pool(pool)
        answer = other.allocate_slots(late, 1, computed=hit)
        assert isinstance(answer, HitChanged)
        assert answer.computed.num_tokens == 12
        after = client.get_pool(pool)
        assert (after.activity.steps, after.activity.allocations) == (before.activity.steps + 1, 1)
        after.activity.CopyFrom(before.activity)
        assert after == before
        assert late.block_ids == [[]]
        again = other.allocate_slots(late, 41 - 12, computed=answer.computed)
        assert again is not None
        assert late.num_computed_tokens == 41


def test_a_block_is_hidden_from_others_until_its_step_has_run(client: Client, pool: str) -> None:
    with client.open_session(pool) as one, client.open_session(pool) as other:
        one.admit(one.request("a", PROMPT))
        assert one.get_computed_blocks(one.request("own", PROMPT)).num_tokens == 40
        assert other.get_computed_blocks(other.request("b", PROMPT)).num_tokens == 0
        one.mark_executed()
        assert other.get_computed_blocks(other.request("c", PROMPT)).num_tokens == 40


def test_execution_is_reported_with_the_next_step(client: Client, pool: str) -> None:
    with client.open_session(pool) as one, client.open_session(pool) as other:
        one.admit(one.request("a", PROMPT))
        with one.step(executed_sequence=one.sequence):
            pass
        assert other.get_computed_blocks(other.request("b", PROMPT)).num_tokens == 40


def test_sessions_share_only_blocks_with_equal_salt(client: Client, pool: str) -> None:
    with client.open_session(pool) as one, client.open_session(pool) as other:
        one.admit(one.request("a", PROMPT, extra_keys=ExtraKeys(cache_salt="x")))
        one.mark_executed()
        for salt, hit in (("y", 0), (None, 0), ("x", 40)):
            request = other.request(f"b{salt}", PROMPT, extra_keys=ExtraKeys(cache_salt=salt))
            assert other.get_computed_blocks(request).num_tokens == hit


def test_a_session_cannot_use_requests_of_another(client: Client, pool: str) -> None:
    with client.open_session(pool) as one, client.open_session(pool) as other:
        mine = one.request("a", PROMPT)
        one.admit(mine)
        theirs = other.request("a", PROMPT)  # the same id and number in another session
        other.admit(theirs)
        other.free(theirs)
        assert client.get_pool(pool).free_blocks == 99 - 11
        one.free(mine)
        assert client.get_pool(pool).free_blocks == 99


def wait_for_free_blocks(client: Client, pool: str, count: int) -> None:
    wait_until(lambda: client.get_pool(pool).free_blocks == count, f"{count} blocks are free")


def test_a_silent_session_ends_with_its_lease(
    client: Client, pool: str, stub: allocator_pb2_grpc.AllocatorServiceStub
) -> None:
    opened = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name=pool, lease_seconds=3.0))
    session_id = opened.session.session_id
    stub.AllocateSlots(
        allocator_pb2.AllocateSlotsRequest(
            session_id=session_id, sequence=1, request=update(num_appended_tokens=3), num_new_tokens=3
        )
    )
    assert client.get_pool(pool).free_blocks == 98
    wait_for_free_blocks(client, pool, 99)
    with pytest.raises(grpc.RpcError) as caught:
        stub.KeepAlive(allocator_pb2.KeepAliveRequest(session_id=session_id))
    error = from_rpc_error(caught.value)
    assert isinstance(error, AbortedError)
    assert error.reason == "LEASE_EXPIRED"


def test_a_stream_or_keep_alive_renews_the_lease(client: Client, pool: str) -> None:
    """Three lease times pass without a step: the client's keep-alive renews the lease."""
    with client.open_session(pool, lease_seconds=1.0) as session:
        request = session.request("r", PROMPT)
        session.admit(request)
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            assert client.get_pool(pool).sessions == 1
            time.sleep(0.1)
        request.append([1])
        assert session.allocate_slots(request, 1) is not None


def test_an_open_stream_alone_keeps_a_session(
    client: Client, pool: str, stub: allocator_pb2_grpc.AllocatorServiceStub
) -> None:
    opened = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name=pool, lease_seconds=2.0))
    outgoing: queue.SimpleQueue[step_pb2.Step | None] = queue.SimpleQueue()
    call = stub.Schedule(iter(outgoing.get, None))
    outgoing.put(step_pb2.Step(session_id=opened.session.session_id, sequence=1))
    assert next(call).sequence == 1
    end = time.monotonic() + 4.5
    while time.monotonic() < end:
        assert client.get_pool(pool).sessions == 1
        time.sleep(0.1)
    outgoing.put(None)
    wait_until(lambda: not client.get_pool(pool).sessions, "its lease is over")


def test_a_new_stream_replaces_the_old_one_and_retries_get_the_same_answer(
    client: Client, pool: str, session_id: str, stub: allocator_pb2_grpc.AllocatorServiceStub
) -> None:
    step = step_pb2.Step(
        session_id=session_id,
        sequence=1,
        operations=[step_pb2.OPERATION_ADMIT],
        request_numbers=[1],
        declares=[True],
        num_appended_tokens=[3],
        request_ids=["r"],
    )
    outgoing: queue.SimpleQueue[step_pb2.Step | None] = queue.SimpleQueue()
    older = stub.Schedule(iter(outgoing.get, None))
    outgoing.put(step)
    first = next(older)
    newer = stub.Schedule(iter([step]))
    assert next(newer) == first
    with pytest.raises(grpc.RpcError) as caught:
        next(older)
    outgoing.put(None)
    assert from_rpc_error(caught.value).reason == "STREAM_SUPERSEDED"
    assert client.get_pool(pool).free_blocks == 98


def test_a_sequence_number_reused_for_another_change_is_refused(client: Client, pool: str) -> None:
    with client.open_session(pool) as session:
        session.get_computed_blocks(session.request("r", PROMPT))
        session._protocol.sequence = 0
        before = client.get_pool(pool)
        with pytest.raises(InvalidArgumentError, match="something else"):
            session.get_computed_blocks(session.request("s", PROMPT))
        assert client.get_pool(pool) == before


def test_closing_a_session_frees_its_requests(client: Client, pool: str) -> None:
    session = client.open_session(pool)
    session.admit(session.request("a", PROMPT))
    session.close()
    assert client.get_pool(pool).free_blocks == 99


async def test_asyncio_sessions_run_concurrently(address: str, pool: str) -> None:
    async with aio.connect(address) as client:
        async with await client.open_session(pool) as one, await client.open_session(pool) as other:
            request = one.request("a", PROMPT)
            assert await one.admit(request) is not None
            await one.mark_executed()
            async with other.step(admission_budget_tokens=100) as step:
                answers = [step.admit(other.request(f"b{i}", PROMPT)) for i in range(3)]
            assert [answer.num_hit_tokens for answer in answers] == [40, 40, 40]
            with pytest.raises(NotFoundError):
                await other.cache_blocks(other.request("z", PROMPT), 4)
        assert (await client.get_pool(pool)).free_blocks == 99


def test_events_replay_and_refusals(client: Client, address: str) -> None:
    client.create_pool(pool_config("events", enable_events=True))
    client.create_pool(pool_config("no-events"))
    with client.open_session("events") as session:
        session.admit(session.request("a", PROMPT))
        batch = next(client.watch("events", from_sequence=1))
        assert batch.sequence == 1
        assert len(batch.events[0].block_hashes) == 10  # type: ignore[union-attr]
    for pool, sequence, kind in (
        ("events", 9, InvalidArgumentError),
        ("no-events", 0, WrongStateError),
        ("nowhere", 0, NotFoundError),
    ):
        with pytest.raises(kind):
            client.watch(pool, from_sequence=sequence)
    with grpc.insecure_channel(address) as channel:
        request = event_pb2.WatchRequest(pool_name="events")
        call = event_pb2_grpc.EventServiceStub(channel).Watch(request)
        # Closing the session removed the blocks that it had never reported as executed.
        assert next(call).sequence == 2
        call.cancel()


def test_health_and_reflection(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvpool.v1.AllocatorService", "kvpool.v1.EventService"):
            status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(stub.ServerReflectionInfo(iter([request])))
        names = {service.name for service in answer.list_services_response.service}
        assert {"kvpool.v1.AllocatorService", "kvpool.v1.EventService", "grpc.health.v1.Health"} <= names


def test_sigterm_ends_open_streams_with_a_retry_time_and_exits_0(tmp_path: Path) -> None:
    server = ServerProcess(f"unix:{tmp_path / 's'}", "127.0.0.1:0")
    with connect(server.addresses[1], deadline_seconds=5.0) as client:
        client.create_pool(pool_config())
        session = client.open_session("m")
        assert session.admit(session.request("r", PROMPT)) is not None
        server.stop_cleanly()
        with pytest.raises(UnavailableError):
            session.admit(session.request("s", PROMPT))


async def test_a_server_does_not_remove_the_socket_of_a_later_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    config = ServerConfig(addresses=(f"unix:{path}",))
    first, second = Server(config), Server(config)
    await first.start()
    path.unlink()
    await second.start()
    await first.stop()
    async with aio.connect(f"unix:{path}") as client:
        await client.create_pool(pool_config())
    await second.stop()


def test_a_second_server_on_a_live_socket_is_refused(address: str) -> None:
    with pytest.raises(AssertionError, match="another server listens"):
        ServerProcess(address)


def test_every_error_the_client_raises_is_a_kvpool_error(tmp_path: Path) -> None:
    with connect(f"unix:{tmp_path / 'missing'}", deadline_seconds=1.0) as client, pytest.raises(KvpoolError):
        client.get_pool("m")


STOPPED_SCHEDULER = """
import signal, sys
from kvpool.client import connect
client = connect(sys.argv[1])
session = client.open_session("m", lease_seconds=3.0)
session.admit(session.request("r", range(20)))
print("holds blocks", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("kind", [pytest.param("unix", marks=pytest.mark.slow), "tcp"])
def test_an_open_stream_of_a_stopped_process_does_not_hold_its_blocks(kind: str, tmp_path: Path) -> None:
    """The connections of the process stay open, but it does not respond."""
    server = ServerProcess(f"unix:{tmp_path / 's'}" if kind == "unix" else "127.0.0.1:0", dead_peer_seconds=2.0)
    with connect(server.addresses[0]) as client:
        client.create_pool(pool_config())
        command = [sys.executable, "-c", STOPPED_SCHEDULER, server.addresses[0]]
        scheduler = processes.start(command, stdout=processes.PIPE)
        try:
            assert scheduler.stdout
            assert scheduler.stdout.readline() == b"holds blocks\n"
            assert client.get_pool("m").free_blocks == 94
            scheduler.send_signal(signal.SIGSTOP)
            wait_for_free_blocks(client, "m", 99)
        finally:
            scheduler.kill()
            scheduler.communicate()
    server.stop_cleanly()
