"""Limits of a real server: a refused call changes nothing and does not affect other clients."""

import queue
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from kvpool.client import Client, KvpoolError, Outcome, Session, connect
from kvpool.client.results import Allocation
from kvpool.core.ids import PoolName
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, event_pb2, event_pb2_grpc, step_pb2
from kvpool.wire.errors import from_rpc_error
from support.answers import until_answered
from support.server import pool_config, running_server
from support.waiting import DEADLINE_SECONDS

LIMITS = {
    "max_step_operations": 20,
    "max_sessions": 5,
    "max_pool_sessions": 3,
    "max_session_requests": 4,
    "max_session_tokens": 100,
    "max_session_blocks": 50,
    "max_watches": 2,
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server(limits=LIMITS) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        yield client


@pytest.fixture
def hasty(address: str) -> Iterator[Client]:
    """A client for calls that are refused, which it repeats until its deadline."""
    with connect(address, deadline_seconds=2.0) as client:
        yield client


@pytest.fixture
def session(client: Client, pool_name: str) -> Iterator[Session]:
    client.create_pool(pool_config(pool_name, enable_events=True))
    with client.open_session(pool_name) as session:
        yield session


def too_many_operations(session: Session) -> None:
    with session.step() as step:
        for _ in range(21):
            step.reset_prefix_cache()


def too_many_requests(session: Session) -> None:
    with session.step() as step:
        for i in range(5):
            step.admit(session.request(f"r{i}", [i]))


def too_many_tokens(session: Session) -> None:
    with session.step() as step:
        step.admit(session.request("a", range(60)))
        step.admit(session.request("b", range(60)))


STEPS: dict[str, tuple[Callable[[Session], None], str]] = {
    "operations": (too_many_operations, "STEP_TOO_LARGE"),
    "requests": (too_many_requests, "TOO_MANY_REQUESTS"),
    "tokens": (too_many_tokens, "TOO_MANY_TOKENS"),
}


@pytest.mark.parametrize(("ask", "reason"), STEPS.values(), ids=STEPS)
def test_a_step_over_a_limit_changes_nothing(session: Session, ask: Callable[[Session], None], reason: str) -> None:
    before = session.pool()
    with pytest.raises(KvpoolError) as caught:
        ask(session)
    assert caught.value.reason == reason
    assert session.pool() == before
    assert session.sequence == 0
    assert session.admit(session.request("r", [1, 2, 3]))


def test_too_many_sessions_of_a_pool_and_of_the_server(client: Client, hasty: Client, session: Session) -> None:
    name = session.config.name
    others = [client.open_session(name) for _ in range(2)]
    with pytest.raises(KvpoolError, match="the pool has 3 sessions") as caught:
        until_answered(lambda: hasty.open_session(name))
    assert caught.value.reason == "TOO_MANY_SESSIONS"
    client.create_pool(pool_config("beside"))
    others += [client.open_session("beside") for _ in range(2)]
    with pytest.raises(KvpoolError, match="the server has 5 sessions"):
        until_answered(lambda: hasty.open_session("beside"))
    for other in others:
        other.close()
    client.open_session(name).close()


def test_an_open_key_finds_its_session_at_the_limit(address: str, session: Session) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        asked = allocator_pb2.OpenSessionRequest(pool_name=session.config.name, open_key="k", max_blocks=7)
        opened = [stub.OpenSession(asked).session for _ in range(2)]
        more = allocator_pb2.OpenSessionRequest(pool_name=session.config.name)
        third = stub.OpenSession(more).session
        assert stub.OpenSession(asked).session == opened[0] == opened[1]
        assert (opened[0].max_blocks, third.max_blocks) == (7, 50)
        with pytest.raises(grpc.RpcError, match="the maximum"):
            stub.OpenSession(more)
        for each in (opened[0], third):
            stub.CloseSession(allocator_pb2.CloseSessionRequest(session_id=each.session_id))


def test_quotas_over_the_wire(client: Client, session: Session) -> None:
    name = session.config.name
    with client.open_session(name, min_blocks=30, max_blocks=31) as kept:
        assert session.pool().reserved_blocks == 30
        assert isinstance(kept.allocate_slots(kept.request("a", range(80)), 80), Allocation)
        other = kept.request("b", range(1000, 1020))
        with kept.step() as step:
            refused = step.allocate_slots(other, 20, num_lookahead_tokens=40)
        assert refused.outcome is Outcome.OVER_QUOTA
        assert kept.allocate_slots(other, 1, num_lookahead_tokens=48) is None
        assert kept.admit(other)
        with pytest.raises(KvpoolError) as caught:
            client.open_session(name, min_blocks=51)
        assert caught.value.reason == "TOO_MANY_BLOCKS"
        client.open_session(name, min_blocks=50).close()
        client.open_session(name, min_blocks=20).close()
    assert session.pool().reserved_blocks == 0


def test_too_many_watches(address: str, session: Session) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = event_pb2_grpc.EventServiceStub(channel)
        request = event_pb2.WatchRequest(pool_name=session.config.name)
        watches = [stub.Watch(request) for _ in range(2)]
        for watch in watches:
            next(watch)
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(request))
        assert from_rpc_error(caught.value).reason == "TOO_MANY_WATCHES"
        for watch in watches:
            watch.cancel()


class Deaf:
    """A client that sends steps and reads nothing."""

    def __init__(self, address: str, pool: str, hashes: bytes, num_tokens: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]  # its own connection
        self.channel = grpc.insecure_channel(address, options=options)
        self._stub = allocator_pb2_grpc.AllocatorServiceStub(self.channel)
        opened = self._stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name=pool, lease_seconds=3.0))
        self._outgoing: queue.SimpleQueue[step_pb2.Step | None] = queue.SimpleQueue()
        self.call: Any = self._stub.Schedule(iter(self._outgoing.get, None))
        count = 128
        for sequence in range(1, 200):
            step = step_pb2.Step(session_id=opened.session.session_id, sequence=sequence)
            step.operations.extend([step_pb2.OPERATION_LOOKUP_UNCOUNTED] * count)
            step.request_numbers.extend(range(1, count + 1))
            if sequence == 1:
                step.declares.extend([True] * count)
                step.num_appended_tokens.extend([num_tokens] * count)
                step.block_hashes = hashes * count
                step.request_ids.extend(map(str, range(count)))
            self._outgoing.put(step)

    def close(self) -> None:
        self._outgoing.put(None)
        self.channel.close()


@pytest.mark.slow
def test_a_client_that_does_not_read_is_disconnected_and_its_lease_runs() -> None:
    with running_server(limits={"stall_seconds": 2.0}) as address, connect(address) as client:
        client.create_pool(pool_config("m", num_blocks=2000))
        with client.open_session("m") as session:
            request = session.request("r", range(1020))
            session.admit(request)
            session.mark_executed()
            deaf = Deaf(address, "m", b"".join(request.hashes), 1020)
            while client.get_pool("m").sessions == 2:
                session.get_common_prefix_blocks(request)  # other sessions are served meanwhile
            with pytest.raises(grpc.RpcError) as caught:
                for _ in deaf.call:
                    pass
            assert from_rpc_error(caught.value).reason == "NOT_READING"
            deaf.close()


def test_too_many_pools() -> None:
    with running_server(max_pools=1) as address, connect(address) as client:
        client.create_pool(pool_config("one"))
        with pytest.raises(KvpoolError) as caught:
            client.create_pool(pool_config("two"))
        assert caught.value.reason == "TOO_MANY_POOLS"
        client.create_pool(pool_config("one"))  # it exists


def test_a_stream_that_sends_nothing_is_ended() -> None:
    with running_server(limits={"stall_seconds": 0.2}) as address, grpc.insecure_channel(address) as channel:
        outgoing: queue.SimpleQueue[None] = queue.SimpleQueue()
        call = allocator_pb2_grpc.AllocatorServiceStub(channel).Schedule(iter(outgoing.get, None))
        with pytest.raises(grpc.RpcError, match=r"sent nothing for 0\.2 s") as caught:
            next(call)
        assert from_rpc_error(caught.value).reason == "NOTHING_SENT"
        outgoing.put(None)


def test_too_many_calls() -> None:
    with running_server(limits={"max_calls": 3}) as address, connect(address) as client:
        client.create_pool(pool_config(PoolName("m"), enable_events=True))
        with grpc.insecure_channel(address) as channel:
            stub = event_pb2_grpc.EventServiceStub(channel)
            watches = [stub.Watch(event_pb2.WatchRequest(pool_name="m")) for _ in range(3)]
            for watch in watches:
                next(watch)
            with pytest.raises(grpc.RpcError) as caught:
                next(stub.Watch(event_pb2.WatchRequest(pool_name="m")))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            for watch in watches:
                watch.cancel()
