"""What tests of a server have in common; each file has its own `address`, and may have its own of all else."""

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvpool.client import Client, connect
from kvpool.v1 import allocator_pb2_grpc
from support.server import pool_config
from support.workers import Workers, worker_processes


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with connect(address, deadline_seconds=10.0) as client:
        yield client


@pytest.fixture
def pool_name(request: pytest.FixtureRequest) -> str:
    """A name of the test's own."""
    return re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def pool(client: Client, pool_name: str) -> str:
    """The name of a pool of the test's own."""
    client.create_pool(pool_config(pool_name))
    return pool_name


@pytest.fixture
def stub(address: str) -> Iterator[allocator_pb2_grpc.AllocatorServiceStub]:
    with grpc.insecure_channel(address) as channel:
        yield allocator_pb2_grpc.AllocatorServiceStub(channel)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """Workers of the test's own, which must have no bug."""
    with worker_processes(tmp_path) as workers:
        yield workers
    for worker in workers.started:
        assert "Traceback" not in worker.log
