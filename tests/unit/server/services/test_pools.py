"""Pools of a server: their epochs."""

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.server.config import JournalConfig, ServerConfig
from kvpool.server.services.components import Components
from support.server import pool_config


def test_a_pool_starts_above_the_epochs_of_all_removed_pools() -> None:
    server_pools = Components(ServerConfig(past_epoch=10)).pools
    kept, _ = server_pools.create(pool_config("kept"))
    epochs = []
    for name in ("a", "a", "b", "a"):
        pool, _ = server_pools.create(pool_config(name))
        epochs.append(pool.epoch)
        server_pools.remove(name)
    assert (kept.epoch, epochs) == (11, [11, 12, 13, 14])


def test_pools_whose_snapshot_does_not_fit_in_the_journal_are_refused() -> None:
    parts = Components(ServerConfig(journal=JournalConfig("unused", max_bytes=2**20)))
    parts.pools.create(pool_config("first", 15_000))
    for num_blocks in (6_000, 30_000):
        with pytest.raises(InvalidArgumentError) as caught:
            parts.pools.create(pool_config("second", num_blocks))
        assert (caught.value.field, caught.value.reason) == ("config.num_blocks", "TOO_MANY_BLOCKS")
        needed = (15_000 + num_blocks) * 50
        assert f"with 1 other pools, takes {needed} bytes, journal_max_bytes is 1048576" in str(caught.value)
        assert parts.pools.names() == ["first"]
    parts.pools.create(pool_config("second", 5_000))
    parts.pools.create(pool_config("first", 15_000))  # exists
