"""Pools of a server: their epochs."""

from kvpool.server.config import ServerConfig
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
