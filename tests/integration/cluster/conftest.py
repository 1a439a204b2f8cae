"""What tests of etcd have in common."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from kvpool.server.cluster.etcd_config import EtcdConfig
from kvpool.server.cluster.etcd_directory import EtcdDirectory
from support.etcd import EtcdCluster, etcd_cluster

OpenDirectory = Callable[..., EtcdDirectory]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    """One node for all tests of a file."""
    with etcd_cluster() as cluster:
        yield cluster


@pytest.fixture
async def open_directory() -> AsyncIterator[OpenDirectory]:
    """Opens directories with generous time limits, and closes them."""
    opened = []

    def open_one(
        endpoints: tuple[str, ...],
        cluster: str = "default",
        *,
        call_timeout_seconds: float = 60.0,
        attempt_timeout_seconds: float = 20.0,
        **settings: Any,
    ) -> EtcdDirectory:
        directory = EtcdDirectory(
            EtcdConfig(endpoints, cluster, **settings),
            call_timeout_seconds=call_timeout_seconds,
            attempt_timeout_seconds=attempt_timeout_seconds,
        )
        opened.append(directory)
        return directory

    yield open_one
    for directory in opened:
        await directory.close()
