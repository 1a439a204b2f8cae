"""AdminService over real sockets, while schedulers are running."""

import re
from collections.abc import Callable, Iterator

import grpc
import pytest

from kvpool.client import (
    AbortedError,
    Client,
    DeadlineError,
    InvalidArgumentError,
    NotFoundError,
    PoolState,
    Request,
    Session,
    SinkFullAttentionSpec,
    UnavailableError,
    WrongStateError,
    connect,
)
from kvpool.client.admin import AdminClient
from kvpool.core.ids import PoolName
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig
from kvpool.v1 import admin_pb2, admin_pb2_grpc
from kvpool.wire.errors import from_rpc_error
from support.ranks import registration
from support.server import pool_config, running_server
from support.waiting import DEADLINE_SECONDS, wait_until
from support.wire_ranks import WireRank

PROMPT = list(range(41))  # ten full blocks and one token


@pytest.fixture(scope="module", name="address")
def fixture_address() -> Iterator[str]:
    timing = {"heartbeat_seconds": 0.2, "heartbeat_timeout_seconds": 60.0, "grace_seconds": 60.0}
    with running_server(rank_timing=timing, quarantine_seconds=0.2) as address:
        yield address


@pytest.fixture(name="client")
def fixture_client(address: str) -> Iterator[Client]:
    with connect(address, deadline_seconds=5.0) as client:
        yield client


@pytest.fixture(name="admin")
def fixture_admin(address: str) -> Iterator[AdminClient]:
    with AdminClient(address) as admin:
        yield admin


@pytest.fixture(name="pool")
def fixture_pool(client: Client, request: pytest.FixtureRequest) -> str:
    name = re.sub(r"\W+", "-", request.node.name)
    client.create_pool(pool_config(name, enable_events=True))
    return str(name)


def run(session: Session, name: str = "r", prompt: list[int] = PROMPT) -> Request:
    """Runs a request and reports its step as executed."""
    request = session.request(name, prompt)
    assert session.admit(request)
    session.mark_executed()
    return request


def seen(client: Client, admin: AdminClient, pool: str) -> object:
    """Everything that AdminService returns about a pool, except times."""
    sessions = [
        (s.session_number, s.client_name, s.sequence, s.executed_sequence, s.requests, list(s.held_blocks))
        for s in admin.sessions(pool)
    ]
    return (client.get_pool(pool), sessions, list(admin.requests(pool)), list(admin.blocks(pool)))


def test_sessions_requests_and_blocks_of_schedulers_at_work(client: Client, admin: AdminClient, pool: str) -> None:
    with client.open_session(pool, client_name="a", lease_seconds=60) as a, client.open_session(pool) as b:
        run(a)
        run(b, "q")
        b.request("not sent yet", PROMPT)
        first, second = admin.sessions(pool)
        assert (first.client_name, first.lease_seconds, first.streaming) == ("a", 60.0, True)
        assert (first.requests, first.running_requests, list(first.held_blocks)) == (1, 1, [11])
        assert first.session_number < second.session_number
        assert 0 <= first.idle_seconds <= first.age_seconds < 60
        told = list(admin.requests(pool))
        assert [(r.session_number, r.request_id, r.num_tokens) for r in told] == [
            (first.session_number, "r", 41),
            (second.session_number, "q", 41),
        ]
        assert list(admin.requests(pool, second.session_number)) == told[1:]
        used = list(admin.blocks(pool, admin_pb2.BLOCK_STATE_USED))
        assert (len(used), sorted(block.ref_cnt for block in used)) == (12, [1, 1, *[2] * 10])
        assert {block.session_number for block in used if block.block_hash} == {first.session_number}
        assert len(list(admin.blocks(pool))) == 99
        overview = admin.overview()
        assert next(info for info in overview.pools if info.config.name == pool) == client.get_pool(pool)
        assert overview.server.uptime_seconds > 0
        assert re.match(r"\d+\.\d+", overview.server.version)
    assert [s for s in admin.sessions() if s.pool_name == pool] == []


def test_paging_returns_ten_thousand_requests_once_each(client: Client, admin: AdminClient, pool: str) -> None:
    with client.open_session(pool) as session:
        for start in range(0, 10_000, 2000):
            with session.step() as step:
                for i in range(start, start + 2000):
                    step.admit(session.request(f"r{i}", [i, i + 1]))
        (info,) = admin.sessions(pool)
        assert info.requests == 10_000
        told = [request.request_id for request in admin.requests(pool)]
        assert (len(told), set(told)) == (10_000, {f"r{i}" for i in range(10_000)})
        assert sum(1 for r in admin.requests(pool) if r.num_computed_tokens) == info.running_requests == 99


def test_a_cache_in_use_is_not_reset_and_its_holders_are_named(client: Client, admin: AdminClient, pool: str) -> None:
    with client.open_session(pool, client_name="busy") as busy, client.open_session(pool, client_name="idle"):
        request = run(busy)
        before = seen(client, admin, pool)
        (holder,) = admin.reset_prefix_cache(pool)
        assert (holder.client_name, list(holder.held_blocks)) == ("busy", [11])
        assert seen(client, admin, pool) == before
        watch = client.watch(pool, from_sequence=1)
        busy.free(request)
        wait_until(lambda: client.get_pool(pool).free_blocks == 99, "it is freed")
        assert not admin.reset_prefix_cache(pool)
        info = client.get_pool(pool)
        assert (info.cached_blocks, info.prefix_cache.resets) == (0, 1)
        assert [type(event).__name__ for _, batch in zip(range(2), watch, strict=False) for event in batch.events] == [
            "BlockStored",
            "AllBlocksCleared",
        ]


def test_a_pool_with_sinks_is_never_reset(client: Client, admin: AdminClient) -> None:
    groups = (KVCacheGroup(SinkFullAttentionSpec(4, sink_len=4), ("layer.0",)),)
    client.create_pool(PoolConfig(PoolName("sinks"), 20, 64, groups))
    with pytest.raises(WrongStateError, match="sink blocks") as refused:
        admin.reset_prefix_cache("sinks")
    assert refused.value.reason == "POOL_HAS_SINKS"


def test_an_evicted_session_ends_and_its_blocks_are_free(client: Client, admin: AdminClient, pool: str) -> None:
    with client.open_session(pool, client_name="other") as other:
        run(other, "o", [7] * 10)
        evicted = client.open_session(pool, client_name="hangs", lease_seconds=3600)
        run(evicted)
        number = next(s.session_number for s in admin.sessions(pool) if s.client_name == "hangs")
        was = admin.evict_session(pool, number)
        assert (was.client_name, was.requests, list(was.held_blocks)) == ("hangs", 1, [11])
        wait_until(lambda: client.get_pool(pool).free_blocks == 96, "its blocks leave the quarantine")
        info = client.get_pool(pool)
        assert (info.sessions, info.quarantined_blocks, info.activity.evicted_sessions) == (1, 0, 1)
        calls: list[Callable[[], object]] = [lambda: run(evicted, "again"), evicted.mark_executed, evicted.close]
        for call in calls:
            with pytest.raises(AbortedError, match="operator ended") as told:
                call()
            assert told.value.reason == "SESSION_EVICTED"
        run(other, "next", [8] * 10)
        with client.open_session(pool) as successor:
            hit = successor.admit(successor.request("r", PROMPT))
            assert hit
            assert hit.num_hit_tokens == 40


def test_unknown_names_are_refused_and_nothing_changes(client: Client, admin: AdminClient, pool: str) -> None:
    with client.open_session(pool) as session:
        run(session)
        (info,) = admin.sessions(pool)
        before = seen(client, admin, pool)
        for call in (
            lambda: admin.evict_session(pool, info.session_number + 1000),
            lambda: admin.evict_session("nowhere", info.session_number),
            lambda: list(admin.sessions("nowhere")),
            lambda: list(admin.requests("nowhere")),
            lambda: list(admin.requests("")),
            lambda: list(admin.requests(pool, info.session_number + 1000)),
            lambda: list(admin.blocks("nowhere")),
            lambda: admin.reset_prefix_cache("nowhere"),
            lambda: admin.drain("nowhere"),
            lambda: admin.undrain("nowhere"),
            lambda: admin.remove_pool("nowhere"),
        ):
            with pytest.raises(NotFoundError):
                call()
        with pytest.raises(WrongStateError, match=f"sessions are open: {info.session_number}") as refused:
            admin.remove_pool(pool)
        assert refused.value.reason == "POOL_IN_USE"
        assert seen(client, admin, pool) == before


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("page_size", {"page_size": 501}),
        ("page_token", {"page_token": "mine"}),
        ("state", {"state": 9}),
    ],
)
def test_an_invalid_page_is_refused_by_name(address: str, pool: str, field: str, request_: dict[str, object]) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.ListBlocks(admin_pb2.ListBlocksRequest(pool_name=pool, **request_))  # type: ignore[arg-type]
    error = from_rpc_error(raised.value)
    assert (type(error), error.field) == (InvalidArgumentError, field)


def test_a_drained_pool_lets_its_sessions_end_and_takes_no_new_ones(
    client: Client, admin: AdminClient, pool: str
) -> None:
    with client.open_session(pool) as session:
        run(session)
        assert (admin.drain(pool), admin.drain(pool)) == (1, 1)
        before = seen(client, admin, pool)
        assert client.get_pool(pool).state == PoolState.POOL_STATE_DRAINING
        with pytest.raises(UnavailableError, match=f"pool '{pool}' is drained") as refused:
            client.open_session(pool)
        assert (refused.value.reason, refused.value.retry_seconds) == ("DRAINED", 5.0)
        assert seen(client, admin, pool) == before
        with pytest.raises(DeadlineError, match="draining"):
            client.wait_until_ready(pool, timeout_seconds=0.1)
        run(session, "more", [5] * 10)
    assert (admin.drain(pool), client.get_pool(pool).sessions) == (0, 0)
    assert admin.undrain(pool) == ()
    assert client.wait_until_ready(pool, timeout_seconds=DEADLINE_SECONDS).state == PoolState.POOL_STATE_READY
    with client.open_session(pool):
        pass


def test_a_drained_server_takes_no_sessions_in_any_pool(client: Client, admin: AdminClient, pool: str) -> None:
    client.create_pool(pool_config(f"{pool}.other"))
    try:
        admin.drain()
        admin.drain(f"{pool}.other")
        overview = admin.overview()
        assert overview.server.draining
        assert {info.state for info in overview.pools} == {PoolState.POOL_STATE_DRAINING}
        assert admin.undrain(pool) == (pool,)
        for name in (pool, f"{pool}.other"):
            with pytest.raises(UnavailableError, match="the server is drained"):
                client.open_session(name)
    finally:
        assert admin.undrain() == (f"{pool}.other",)
    assert not admin.overview().server.draining
    with client.open_session(pool):
        pass
    assert admin.undrain(f"{pool}.other") == ()


def test_a_removed_pool_frees_its_name_and_ends_its_watches(client: Client, admin: AdminClient, pool: str) -> None:
    with client.open_session(pool) as session:
        run(session)
    watch = client.watch(pool, from_sequence=1)
    assert next(watch).events
    admin.remove_pool(pool)
    with pytest.raises(AbortedError) as told:
        next(watch)
    assert told.value.reason == "POOL_REMOVED"
    with pytest.raises(NotFoundError):
        client.get_pool(pool)
    assert client.create_pool(pool_config(pool, num_blocks=50)).free_blocks == 49


def test_a_pool_is_listed_while_it_forms_and_removed_once_its_ranks_are_gone(
    address: str, client: Client, admin: AdminClient
) -> None:
    ranks = [WireRank(address).register(registration(0), "ranked")]
    ranks[0].wait_for("registered")
    (info,) = [info for info in admin.overview().pools if info.config.name == "ranked"]
    assert (info.state, len(info.ranks)) == (PoolState.POOL_STATE_FORMING, 2)
    assert (list(admin.sessions("ranked")), list(admin.requests("ranked"))) == ([], [])
    for call in (lambda: list(admin.blocks("ranked")), lambda: admin.reset_prefix_cache("ranked")):
        with pytest.raises(WrongStateError) as forming:
            call()
        assert forming.value.reason == "POOL_FORMING"
    admin.drain("ranked")
    ranks.append(WireRank(address).register(registration(1), "ranked"))
    for rank in ranks:
        rank.allocate()
    for rank in ranks:
        rank.wait_for("ready")
    with pytest.raises(UnavailableError, match="drained"):
        client.open_session("ranked")
    before = seen(client, admin, "ranked")
    with pytest.raises(WrongStateError, match="ranks are present or awaited: 0, 1"):
        admin.remove_pool("ranked")
    assert seen(client, admin, "ranked") == before
    for rank in ranks:
        rank.say(leave={})
        rank.wait_ended()
    admin.remove_pool("ranked")
    with pytest.raises(NotFoundError):
        client.get_pool("ranked")
    client.create_pool(pool_config("ranked"))
    with client.open_session("ranked"):
        pass


def test_a_drain_ends_with_the_pool_that_never_formed(address: str, admin: AdminClient) -> None:
    rank = WireRank(address).register(registration(0), "early")
    rank.wait_for("registered")
    admin.drain("early")
    rank.say(leave={}).wait_ended()
    with pytest.raises(NotFoundError):
        admin.undrain("early")
    WireRank(address).register(registration(0), "early").wait_for("registered")
    (info,) = [info for info in admin.overview().pools if info.config.name == "early"]
    assert info.state == PoolState.POOL_STATE_FORMING
