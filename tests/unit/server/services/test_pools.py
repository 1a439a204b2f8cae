"""Pools of a server: their epochs."""

from contextvars import copy_context
from dataclasses import replace

import pytest

from kvpool.core.errors import ExhaustedError, InvalidArgumentError
from kvpool.core.ids import PoolName
from kvpool.core.ranks.messages import Allocated
from kvpool.server.auth.caller import CALLER, Caller
from kvpool.server.auth.tokens import Grant, Role
from kvpool.server.config import ServerConfig
from kvpool.server.journal.config import JournalConfig
from kvpool.server.limits.config import Limits
from kvpool.server.services.calls import OpenCall
from kvpool.server.services.components import Components
from kvpool.v1 import pool_pb2
from support.ranks import BLOCK_BYTES, declared, declaring, registration
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


def create_as(parts: Components, owner: str, name: str, num_blocks: int) -> None:
    """Creates a pool with the token of a name."""

    def create() -> None:
        CALLER.set(Caller(Grant(owner, Role.SCHEDULER, ("*",), ()), lambda _: None))
        parts.pools.create(pool_config(name, num_blocks))

    copy_context().run(create)


def test_pools_beyond_the_blocks_of_a_server_are_refused() -> None:
    parts = Components(ServerConfig(limits=Limits(max_total_blocks=250)))
    parts.pools.create(pool_config("a", 100))
    parts.pools.create(pool_config("b", 100))
    message = r"51 blocks requested, other pools have 200; the maximum together is 250 \(--max-total-blocks\)"
    with pytest.raises(ExhaustedError, match=message) as caught:
        parts.pools.create(pool_config("c", 51))
    assert (caught.value.reason, caught.value.field) == ("TOO_MANY_BLOCKS", "config.num_blocks")
    assert parts.pools.names() == ["a", "b"]
    parts.pools.create(pool_config("c", 50))
    parts.pools.create(pool_config("a", 100))  # exists
    parts.pools.remove("b")
    parts.pools.create(pool_config("d", 100))


def test_pools_beyond_the_blocks_of_a_token_are_refused() -> None:
    parts = Components(ServerConfig(limits=Limits(max_token_blocks=150)))
    create_as(parts, "x", "a", 100)
    message = r"51 blocks requested, other pools of the token 'x' have 100; the maximum .* 150 \(--max-token-blocks\)"
    with pytest.raises(ExhaustedError, match=message) as caught:
        create_as(parts, "x", "b", 51)
    assert (caught.value.reason, caught.value.field) == ("TOO_MANY_TOKEN_BLOCKS", "config.num_blocks")
    assert parts.pools.names() == ["a"]
    create_as(parts, "y", "b", 150)
    create_as(parts, "x", "c", 50)
    parts.pools.create(pool_config("d", 1000))  # no token


async def test_ranks_whose_pool_exceeds_the_blocks_of_a_server_are_refused() -> None:
    parts = Components(ServerConfig(limits=Limits(max_total_blocks=250)))
    parts.pools.create(pool_config("a", 100))
    call = OpenCall()
    link = parts.ranks.register(call, "r", registration(0, 1, blocks=151))
    assert isinstance(call.ended_by, ExhaustedError)
    assert (call.ended_by.reason, call.ended_by.field) == ("TOO_MANY_BLOCKS", "options.num_blocks_override")
    assert "151 blocks requested, other pools have 100" in str(call.ended_by)
    parts.ranks.close_link(link)
    assert parts.pools.names() == ["a"]
    parts.ranks.register(OpenCall(), "r", registration(0, 1, blocks=150))
    with pytest.raises(ExhaustedError, match="other pools have 250"):  # those that the rank is about to allocate
        parts.pools.create(pool_config("b", 2))


async def test_limits_count_the_blocks_of_ranks_in_host_memory() -> None:
    parts = Components(ServerConfig(limits=Limits(max_total_blocks=250)))
    call, ranks = OpenCall(), [replace(declaring(0, 1), num_host_blocks=count) for count in (151, 150)]
    name = declared().config.name
    parts.ranks.close_link(parts.ranks.register(call, name, ranks[0]))
    assert isinstance(call.ended_by, ExhaustedError)
    assert "251 blocks requested" in str(call.ended_by)
    assert parts.pools.names() == []
    parts.ranks.register(OpenCall(), name, ranks[1])
    with pytest.raises(ExhaustedError, match="other pools have 250"):
        parts.pools.create(pool_config("b", 2))


async def test_a_rank_with_more_blocks_than_the_server_has_begins_no_epoch() -> None:
    parts = Components(ServerConfig(limits=Limits(max_total_blocks=250)))
    parts.pools.create(pool_config("a", 100))
    link = parts.ranks.register(OpenCall(), "r", registration(0, 1, blocks=100))
    parts.ranks.initialized(link, Allocated(link.membership.epoch, 100, 100 * BLOCK_BYTES))
    parts.ranks.leave(link)
    epoch = parts.state.pools.get(PoolName("r")).epoch
    call = OpenCall()
    parts.ranks.register(call, "r", registration(0, 1, boot_id="process-new", blocks=151))
    assert call.ended_by
    assert call.ended_by.reason == "TOO_MANY_BLOCKS"
    pool = parts.state.pools.get(PoolName("r"))
    assert (pool.epoch, pool.config.num_blocks, pool.is_suspended) == (epoch, 100, True)
    link = parts.ranks.register(OpenCall(), "r", registration(0, 1, boot_id="process-newer", blocks=150))
    parts.ranks.initialized(link, Allocated(link.membership.epoch, 150, 150 * BLOCK_BYTES))
    assert parts.pools.describe("r").state == pool_pb2.POOL_STATE_READY
