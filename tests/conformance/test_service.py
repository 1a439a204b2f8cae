"""The service gives every answer of the reference through every API, over real sockets."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from conformance.client_systems import ClientSystem, UnarySystem
from conformance.golden import Driver, Schedule
from conformance.streams import needs_node, node_stream, streaming_client, stub_stream
from kvpool.client import Client, aio, connect
from support.blocking_aio import BlockingAio
from support.server import running_server


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server() as address:
        yield address


@pytest.fixture(scope="module")
def aio_client(address: str) -> Iterator[BlockingAio]:
    async def open_client() -> aio.AsyncClient:
        return aio.connect(address)

    with asyncio.Runner() as runner:
        client = BlockingAio(runner.run(open_client()), runner)
        yield client
        client.close()


def run(client: Client, schedule: Schedule, prefix: str) -> None:
    system = ClientSystem(client, schedule.pool_config(prefix))
    Driver(system, schedule).run()
    system.close()


def test_embedded(schedule: Schedule) -> None:
    with connect("embedded:") as client:
        run(client, schedule, "embedded")


def test_link(schedule: Schedule, address: str, caplog: pytest.LogCaptureFixture) -> None:
    with connect(address) as client:
        run(client, schedule, "link")
    assert "using gRPC" not in caplog.text


def test_schedule(schedule: Schedule, address: str) -> None:
    with stub_stream(address) as exchange, streaming_client(address, exchange) as client:
        run(client, schedule, "schedule")


@needs_node
def test_node(schedule: Schedule, address: str) -> None:
    with node_stream(address) as exchange, streaming_client(address, exchange) as client:
        run(client, schedule, "node")


def test_unary(schedule: Schedule, address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        Driver(UnarySystem(channel, schedule.pool_config("unary")), schedule).run()


def test_asyncio(schedule: Schedule, aio_client: Client) -> None:
    run(aio_client, schedule, "asyncio")
