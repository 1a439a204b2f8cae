"""The shares of a server's limits that are in use."""

import pytest

from kvpool.core.memory_probe import process_memory, reserve_bytes
from kvpool.server import limit_usage as module
from kvpool.server.config import ServerConfig
from kvpool.server.journal.config import JournalConfig
from kvpool.server.limit_usage import limit_usage
from kvpool.server.limits.config import Limits
from kvpool.server.metrics.observations import JournalCounts
from kvpool.server.services.components import Components
from support.core import World
from support.exported_metrics import LIMITS, info_of
from support.server import pool_config

GIB = 2**30


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Components:
    """A server of 1 GiB in a container of 4 GiB, with a pool of 12 blocks and a session with two requests."""
    monkeypatch.setattr(process_memory, "max_bytes", GIB)
    monkeypatch.setattr(module, "resident_bytes", lambda: GIB // 2)
    monkeypatch.setattr(module, "memory_limits_bytes", lambda: iter((8 * GIB, 4 * GIB)))
    world = World(12)
    session = world.open()
    world.admit(session, 1, "ab", 8)
    world.admit(session, 2, "xyz", 12)
    limits = Limits(max_total_blocks=48, max_sessions=10, max_total_requests=4, max_total_tokens=200)
    journal = JournalConfig("unused", max_bytes=2**20)
    parts = Components(ServerConfig(max_pools=4, limits=limits, journal=journal), world.allocator)
    parts.executor.open_log(world.pool)
    return parts


def usage(parts: Components, *, serves: bool = True) -> dict[str, float]:
    infos = [parts.pools.describe(name) for name in parts.pools.names()] if serves else []
    return limit_usage(parts, infos, JournalCounts(size_bytes=2**18), serves=serves)


def test_each_limit_has_its_share(parts: Components) -> None:
    info = parts.pools.describe("m")
    assert info.cached_blocks == 5
    found = usage(parts)
    assert found == {
        "max_memory_bytes": 0.5 + reserve_bytes(5) / GIB,
        "container_memory": 0.125,
        "journal_max_bytes": 0.25,
        "max_pools": 0.25,
        "max_total_blocks": 0.25,
        "max_sessions": 0.1,
        "max_total_requests": 0.5,
        "max_total_tokens": 0.1,
    }
    assert set(found) == set(LIMITS)


def test_blocks_of_all_pools_count(parts: Components) -> None:
    parts.pools.create(pool_config("other", 36))
    assert usage(parts)["max_total_blocks"] == 1


def test_a_standby_has_no_shares_of_limits_on_clients(parts: Components) -> None:
    assert set(usage(parts, serves=False)) == {"max_memory_bytes", "container_memory", "journal_max_bytes"}


def test_limits_that_are_not_set_are_left_out(parts: Components, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "max_bytes", 0)
    monkeypatch.setattr(module, "memory_limits_bytes", lambda: iter(()))
    found = limit_usage(parts, [info_of(World())], None, serves=True)
    assert set(LIMITS) - set(found) == {"max_memory_bytes", "container_memory", "journal_max_bytes"}
