"""AdminService over real sockets, while schedulers are running."""

import re
from collections.abc import Iterator

import grpc
import pytest

from kvpool.client import (
    AbortedError,
    Client,
    NotFoundError,
    PoolState,
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
from support.wire_ranks import WireRank

PROMPT = list(range(41))  # ten full blocks and one token


@pytest.fixture(scope="module", name="address")
def fixture_address() -> Iterator[str]:
    timing = {"heartbeat_seconds": 0.2, "heartbeat_timeout_seconds": 60.0, "grace_seconds": 60.0}
    with running_server(rank_timing=timing, quarantine_seconds=0.2) as address:
        yield address


@pytest.fixture(name="admin")
def fixture_admin(address: str) -> Iterator[AdminClient]:
    with AdminClient(address) as admin:
        yield admin


def run(session: Session, name: str = "r") -> None:
    """Runs a request and reports its step as executed."""
    assert session.admit(session.request(name, PROMPT))
    session.mark_executed()


def test_sessions_requests_and_blocks_of_schedulers_at_work(client: Client, admin: AdminClient, pool: str) -> None:
    with client.open_session(pool, client_name="a", lease_seconds=60) as a, client.open_session(pool) as b:
        run(a)
        run(b, "q")
        b.request("not sent yet", PROMPT)
        first, second = admin.sessions(pool)
        assert (first.client_name, first.lease_seconds, first.streaming) == ("a", 60.0, False)
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


def test_lists_are_read_page_by_page(client: Client, admin: AdminClient, pool_name: str) -> None:
    client.create_pool(pool_config(pool_name, 1200))
    assert [block.block_id for block in admin.blocks(pool_name)] == list(range(1, 1200))


def test_an_unknown_state_is_refused(address: str, pool: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as raised:
        admin_pb2_grpc.AdminServiceStub(channel).ListBlocks(admin_pb2.ListBlocksRequest(pool_name=pool, state=9))  # type: ignore[arg-type]
    assert from_rpc_error(raised.value).field == "state"


def test_a_pool_with_sinks_is_never_reset(client: Client, admin: AdminClient) -> None:
    groups = (KVCacheGroup(SinkFullAttentionSpec(4, sink_len=4), ("layer.0",)),)
    client.create_pool(PoolConfig(PoolName("sinks"), 20, 64, groups))
    with pytest.raises(WrongStateError, match="sink blocks") as refused:
        admin.reset_prefix_cache("sinks")
    assert refused.value.reason == "POOL_HAS_SINKS"


def test_a_removed_pool_ends_its_watches(client: Client, admin: AdminClient, pool_name: str) -> None:
    client.create_pool(pool_config(pool_name, enable_events=True))
    with client.open_session(pool_name) as session:
        run(session)
    watch = client.watch(pool_name, from_sequence=1)
    assert next(watch).events
    admin.remove_pool(pool_name)
    with pytest.raises(AbortedError) as told:
        next(watch)
    assert told.value.reason == "POOL_REMOVED"


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
    with connect(address, deadline_seconds=0.5) as hasty, pytest.raises(UnavailableError, match="drained"):
        hasty.open_session("ranked")
    before = client.get_pool("ranked")
    with pytest.raises(WrongStateError, match="ranks are present or awaited: 0, 1"):
        admin.remove_pool("ranked")
    assert client.get_pool("ranked") == before
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
