"""The gate of a server of a shard, over gRPC: what is refused, and what waits for the standbys."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.core.commands import Command
from kvpool.core.errors import KvpoolError, NotPrimaryError, UnavailableError
from kvpool.core.ids import PoolName
from kvpool.server.cluster.gate import Gate
from kvpool.server.config import ServerConfig
from kvpool.server.guard.guard import Guard
from kvpool.server.guard.primary_check import PrimaryCheck
from kvpool.server.limits.config import Limits
from kvpool.server.metrics.observations import Observations
from kvpool.server.services.admin_service import AdminService
from kvpool.server.services.allocator_service import AllocatorService
from kvpool.server.services.components import Components
from kvpool.server.services.directory_service import DirectoryService
from kvpool.server.services.event_service import EventService
from kvpool.server.services.standard_service import Health
from kvpool.server.services.worker_service import WorkerService
from kvpool.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    allocator_pb2,
    allocator_pb2_grpc,
    directory_pb2,
    directory_pb2_grpc,
    event_pb2,
    event_pb2_grpc,
    step_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from kvpool.wire.errors import from_rpc_error
from kvpool.wire.pools import config_to_proto
from kvpool.wire.protocol_version import PROTOCOL_VERSION
from kvpool.wire.ranks import registration_to_proto
from support.ranks import registration
from support.server import pool_config
from support.waiting import DEADLINE_SECONDS, until

ELSEWHERE = NotPrimaryError(("other:1", "other:2"), 7)


class ReplicatedServer:
    """A primary whose standbys confirm when the test says so.

    Attributes:
        last_position: As of a `Replica`.
        is_confirming: Whether each position is confirmed at once.
        refusal: The error for calls; None while it is the primary.
        seen: Its calls.
    """

    error = ""

    def __init__(self, confirm_seconds: float) -> None:
        self.last_position = 0
        self.confirmed = 0
        self.is_confirming = True
        self.refusal: NotPrimaryError | None = None
        self.gate = Gate(self, self, confirm_seconds)  # type: ignore[arg-type]
        self.parts = Components(ServerConfig(), journal=self)
        self.seen = Observations()
        primary = PrimaryCheck(self.gate, lambda: self.refusal)
        guard = Guard(Limits(stall_seconds=60.0), self.seen, None, primary)
        self._server = grpc.aio.server(interceptors=[guard])
        parts, server = self.parts, self._server
        allocator_pb2_grpc.add_AllocatorServiceServicer_to_server(AllocatorService(parts), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(parts, None), server)
        event_pb2_grpc.add_EventServiceServicer_to_server(EventService(parts), server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerService(parts), server)
        directory = DirectoryService(parts, None, ("me:1",))
        directory_pb2_grpc.add_DirectoryServiceServicer_to_server(directory, server)
        health_pb2_grpc.add_HealthServicer_to_server(Health(), server)

    async def start(self) -> None:
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.allocator: Any = allocator_pb2_grpc.AllocatorServiceStub(self.channel)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.events: Any = event_pb2_grpc.EventServiceStub(self.channel)
        self.ranks: Any = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.directory: Any = directory_pb2_grpc.DirectoryServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close()
        await self._server.stop(0)

    def confirm(self) -> None:
        self.confirmed = self.last_position
        self.gate.release(self.confirmed)

    @property
    def num_waiting(self) -> int:
        return len(self.gate._waiting)

    # Of a recorder

    def record(self, command: Command[Any], now_seconds: float, result: object) -> None:
        del command, now_seconds, result
        self.mark()

    def crash_after_bug(self, _: str) -> None:
        pytest.fail("a command failed halfway")

    def mark(self) -> None:
        self.last_position += 1
        if self.is_confirming:
            self.confirm()


@pytest.fixture(name="confirm_seconds")
def fixture_confirm_seconds() -> float:
    return 60.0


@pytest.fixture(name="server")
async def fixture_server(confirm_seconds: float, caplog: pytest.LogCaptureFixture) -> AsyncIterator[ReplicatedServer]:
    server = ReplicatedServer(confirm_seconds)
    await server.start()
    yield server
    await server.stop()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def create(server: ReplicatedServer, name: str = "m") -> Any:
    config = config_to_proto(pool_config(name, enable_events=True), with_none_hash=False)
    return await server.allocator.CreatePool(allocator_pb2.CreatePoolRequest(config=config), timeout=DEADLINE_SECONDS)


async def open_session(server: ReplicatedServer) -> Any:
    request = allocator_pb2.OpenSessionRequest(pool_name="m", protocol_version=PROTOCOL_VERSION)
    return (await server.allocator.OpenSession(request, timeout=DEADLINE_SECONDS)).session


async def get_pool(server: ReplicatedServer, name: str = "m") -> Any:
    return await server.allocator.GetPool(allocator_pb2.GetPoolRequest(pool_name=name), timeout=DEADLINE_SECONDS)


async def error_of(call: Awaitable[object]) -> KvpoolError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def keep_alive(server: ReplicatedServer, session_id: str) -> Any:
    return await server.allocator.KeepAlive(
        allocator_pb2.KeepAliveRequest(session_id=session_id), timeout=DEADLINE_SECONDS
    )


def schedule(server: ReplicatedServer) -> Any:
    return server.allocator.Schedule(timeout=DEADLINE_SECONDS)


def step(session_id: str, sequence: int) -> step_pb2.Step:
    return step_pb2.Step(session_id=session_id, sequence=sequence, protocol_version=PROTOCOL_VERSION)


# A server that is not the primary

REFUSED: dict[str, Callable[[ReplicatedServer], Awaitable[object]]] = {
    "a change": create,
    "a read": get_pool,
    "a session": open_session,
    "an unknown session": lambda server: keep_alive(server, "unknown"),
    "a view": lambda server: server.admin.ListPools(admin_pb2.ListPoolsRequest(), timeout=DEADLINE_SECONDS),
    "a stream of steps": lambda server: schedule(server).read(),
    "a watch": lambda server: server.events.Watch(
        event_pb2.WatchRequest(pool_name="m"), timeout=DEADLINE_SECONDS
    ).read(),
    "a rank": lambda server: server.ranks.Join(timeout=DEADLINE_SECONDS).read(),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_standby_refuses_calls_with_the_address_of_the_primary(server: ReplicatedServer, name: str) -> None:
    server.refusal = ELSEWHERE
    error = await error_of(REFUSED[name](server))
    assert isinstance(error, NotPrimaryError)
    assert (error.addresses, error.term) == (ELSEWHERE.addresses, 7)
    assert not server.last_position, "nothing was changed"
    await until(server.seen.rpcs.total)
    assert [(code, count) for (_, code), count in server.seen.rpcs.items()] == [("UNAVAILABLE", 1)]


async def test_every_server_answers_its_health_and_where_the_primary_is(server: ReplicatedServer) -> None:
    await create(server)
    server.refusal, server.is_confirming = ELSEWHERE, False
    await server.health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)
    await server.directory.GetShard(directory_pb2.GetShardRequest(), timeout=DEADLINE_SECONDS)
    assert server.last_position == 1, "none needs a mark"


# A primary


async def first_result(server: ReplicatedServer) -> object:
    """The result of the first step of a session."""
    server.is_confirming = True
    session = await open_session(server)
    server.is_confirming = False
    call = schedule(server)
    await call.write(step(session.session_id, 1))
    return await call.read()


async def result_of_a_step_sent_again(server: ReplicatedServer) -> object:
    """The result of a step that was confirmed before."""
    server.is_confirming = True
    session = await open_session(server)
    call = schedule(server)
    await call.write(step(session.session_id, 1))
    await call.read()
    server.is_confirming = False
    await call.write(step(session.session_id, 1))
    return await call.read()


async def first_of_watch(server: ReplicatedServer) -> object:
    request = event_pb2.WatchRequest(pool_name="m", protocol_version=PROTOCOL_VERSION)
    return await server.events.Watch(request, timeout=DEADLINE_SECONDS).read()


WAITING: dict[str, Callable[[ReplicatedServer], Awaitable[object]]] = {
    "a change": lambda server: create(server, "n"),
    "a repeated answer": create,
    "a read": get_pool,
    "an error of a read": lambda server: error_of(get_pool(server, "unknown")),
    "an error of a change": lambda server: error_of(create(server, "")),
    "the result of a step": first_result,
    "the result of a step that is sent again": result_of_a_step_sent_again,
    "a message of a watch": first_of_watch,
    "a message to a rank": lambda server: joined(server, registration_to_proto("ranked", registration(0, 1))),
}


@pytest.mark.parametrize("name", WAITING)
async def test_what_leaves_waits_until_it_is_confirmed(server: ReplicatedServer, name: str) -> None:
    """By a record of its own change, or by a mark after it arrived."""
    await create(server)
    server.is_confirming = False
    answer = asyncio.ensure_future(WAITING[name](server))
    await until(lambda: server.num_waiting == 1)
    assert not answer.done()
    server.confirm()
    await answer


async def test_views_for_people_do_not_wait(server: ReplicatedServer) -> None:
    await create(server)
    server.is_confirming = False
    await server.admin.ListPools(admin_pb2.ListPoolsRequest(), timeout=DEADLINE_SECONDS)
    assert not server.num_waiting


@pytest.mark.parametrize("confirm_seconds", [0.05])
async def test_a_call_that_is_not_confirmed_in_time_is_refused(server: ReplicatedServer) -> None:
    server.is_confirming = False
    error = await error_of(create(server))
    assert isinstance(error, UnavailableError)
    assert (error.reason, error.retry_seconds) == ("NOT_CONFIRMED", 0.1)
    method = "kvpool.v1.AllocatorService/CreatePool"
    await until(lambda: server.seen.rpcs[method, "UNAVAILABLE"] == 1)
    assert server.seen.rpc_seconds[method].total >= 0.05
    server.is_confirming = True
    assert (await create(server)).pool.config.name == "m", "the repetition gets the answer"


# Streams


@pytest.mark.parametrize("confirm_seconds", [0.05])
async def test_a_stream_of_steps_ends_when_a_result_is_not_confirmed_in_time(server: ReplicatedServer) -> None:
    await create(server)
    session = await open_session(server)
    server.is_confirming = False
    call = schedule(server)
    await call.write(step(session.session_id, 1))
    error = await error_of(call.read())
    assert error.reason == "NOT_CONFIRMED"
    server.is_confirming = True
    again = schedule(server)
    await again.write(step(session.session_id, 1))
    assert (await again.read()).sequence == 1
    again.cancel()


async def joined(server: ReplicatedServer, register: worker_pb2.Register) -> Any:
    """The stream of a rank that is registered."""
    call = server.ranks.Join(timeout=DEADLINE_SECONDS)
    await call.write(worker_pb2.JoinRequest(register=register))
    assert (await call.read()).WhichOneof("message") == "registered"
    return call


@pytest.mark.parametrize("confirm_seconds", [0.05])
async def test_a_rank_that_gets_no_message_in_time_leaves_and_joins_again(
    server: ReplicatedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A primary that confirms nothing may have been replaced. If it was not, the pool has served on."""
    server.parts.ranks.is_answering = lambda: server.is_confirming
    register = registration_to_proto("ranked", registration(0, 1))
    call = await joined(server, register)
    assert (await call.read()).WhichOneof("message") == "plan"
    await call.write(worker_pb2.JoinRequest(initialized=worker_pb2.Initialized(epoch=1, num_blocks=100)))
    assert (await call.read()).WhichOneof("message") == "ready"

    server.is_confirming = False
    await call.write(worker_pb2.JoinRequest(heartbeat=worker_pb2.Heartbeat(sequence=1)))
    error = await error_of(call.read())
    assert error.reason == "NOT_CONFIRMED"
    membership = server.parts.pools.memberships[PoolName("ranked")]
    await until(lambda: all(member.is_expected for member in membership.registry))

    server.is_confirming = True
    register.held.epoch, register.held.num_blocks, register.last_epoch = 1, 100, 1
    again = await joined(server, register)
    assert (await again.read()).ready.epoch == 1
    assert not any(member.is_expected for member in membership.registry)
    assert not server.parts.state.pools.get("ranked").is_suspended
    assert not [record for record in caplog.records if record.msg in ("rank lost", "pool degraded")]
    again.cancel()


# A primary that is replaced


async def test_a_replaced_primary_ends_what_waits_with_the_new_address(server: ReplicatedServer) -> None:
    await create(server)
    session = await open_session(server)
    server.is_confirming = False
    steps = schedule(server)
    await steps.write(step(session.session_id, 1))
    calls = [asyncio.create_task(error_of(call)) for call in (get_pool(server), create(server, "n"), steps.read())]
    await until(lambda: server.num_waiting == 3)
    server.refusal = ELSEWHERE
    server.gate.close(ELSEWHERE)
    for error in await asyncio.gather(*calls):
        assert isinstance(error, NotPrimaryError)
        assert (error.addresses, error.term) == (ELSEWHERE.addresses, 7)


async def test_a_call_that_arrived_before_learns_that_the_primary_was_replaced(server: ReplicatedServer) -> None:
    """Its change is executed in a state that no server uses any more."""
    server.parts.turns.hold()
    answer = asyncio.create_task(error_of(create(server)))
    await until(lambda: server.parts.turns.num_waiting == 1)
    server.refusal = ELSEWHERE
    server.gate.close(ELSEWHERE)
    server.parts.turns.resume()
    assert isinstance(await answer, NotPrimaryError)
