"""The service gives every answer of the reference through every API, over real sockets."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from conformance.client_systems import BlockingAio, ClientSystem, UnarySystem
from conformance.golden import Driver, Schedule
from kvpool.client import Client, aio, connect
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


def test_stream(schedule: Schedule, address: str) -> None:
    with connect(address) as client:
        run(client, schedule, "stream")


def test_unary(schedule: Schedule, address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        Driver(UnarySystem(channel, schedule.pool_config("unary")), schedule).run()


def test_asyncio(schedule: Schedule, aio_client: Client) -> None:
    run(aio_client, schedule, "asyncio")
