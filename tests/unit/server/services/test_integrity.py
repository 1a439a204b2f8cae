"""The check of idle pools finds damage, and ends the epoch of the pool."""

import asyncio
from collections.abc import Callable

import pytest

from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.free_list import Chunk
from kvpool.core.commands import ApplyStep, OpenSession
from kvpool.core.ids import SessionId
from kvpool.core.steps.columns import Operation, Step
from kvpool.server.config import ServerConfig
from kvpool.server.services import deadlines
from kvpool.server.services.components import Components
from support.core import block_hashes
from support.server import pool_config
from support.waiting import DEADLINE_SECONDS


def _lose_free_blocks(blocks: BlockPool) -> None:
    _, chunk = blocks.free_list._chunks.popitem()
    assert isinstance(chunk, Chunk)


def _swap_hashes(blocks: BlockPool) -> None:
    hashes = blocks.prefix_map._block_hashes
    hashes[1], hashes[2] = hashes[2], hashes[1]


def _forget_hash(blocks: BlockPool) -> None:
    blocks.prefix_map._by_hash[0].popitem()


DAMAGES: dict[str, Callable[[BlockPool], object]] = {
    "a block counts one table more": lambda blocks: blocks.free_list._column.__setitem__(1, 2),
    "a used block counts as free": lambda blocks: blocks.free_list._column.__setitem__(1, 0),
    "a free block counts as used": lambda blocks: blocks.free_list._column.__setitem__(50, 1),
    "a free block is in no chunk": lambda blocks: blocks.free_list._column.__setitem__(50, -77),
    "the free blocks are miscounted": lambda blocks: setattr(blocks.free_list, "num_free", 3),
    "the used blocks are miscounted": lambda blocks: setattr(blocks.group_counters[0], "used_blocks", 9),
    "the shared blocks are miscounted": lambda blocks: setattr(blocks.free_list, "num_shared", 1),
    "free blocks are lost": _lose_free_blocks,
    "two blocks have each other's hash": _swap_hashes,
    "a hash leads nowhere": _forget_hash,
    "the check itself fails": lambda blocks: setattr(blocks.prefix_map, "_map_ids", None),
}


@pytest.fixture(name="parts")
def fixture_parts(monkeypatch: pytest.MonkeyPatch) -> Components:
    """A server with a pool of 100 blocks, in which a request holds blocks 1 to 5, and a check that does not wait."""
    monkeypatch.setattr(deadlines, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(deadlines, "_CHECKED_BLOCKS", 7)
    parts = Components(ServerConfig())
    parts.pools.create(pool_config())
    parts.sessions.open(OpenSession("m", SessionId("s"), "", 60.0))
    step = Step(1, operations=[Operation.ADMIT], request_numbers=[1], request_ids=["r"], declares=[True])
    step.num_appended_tokens, step.block_hashes = [20], block_hashes("abcde", 5)
    parts.executor.execute(ApplyStep("s", step, b"1"))
    return parts


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_ends_the_epoch_of_the_pool(
    damage: str, parts: Components, caplog: pytest.LogCaptureFixture
) -> None:
    pool = parts.state.pools.get("m")
    parts.pools.create(pool_config("other"))
    before = pool.epoch
    DAMAGES[damage](pool.blocks)
    watch = asyncio.create_task(deadlines.watch_integrity(parts))
    async with asyncio.timeout(DEADLINE_SECONDS):
        while pool.epoch == before:  # noqa: ASYNC110 - the task wakes in each iteration
            await asyncio.sleep(0)
    watch.cancel()
    assert (len(pool.sessions), pool.blocks.num_free_blocks) == (0, 99)
    assert parts.state.pools.get("other").epoch == before
    assert "pool damaged" in [record.msg for record in caplog.records if record.levelname == "CRITICAL"]
    pool.check_integrity()


async def test_every_block_of_a_sound_pool_is_checked_again_and_again(
    parts: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, checked = parts.state.pools.get("m"), list[int]()
    check = type(pool).check_integrity

    def note(pool: object, blocks: range) -> None:
        checked.extend(blocks)
        check(pool, blocks)  # type: ignore[arg-type]

    monkeypatch.setattr(type(pool), "check_integrity", note)
    watch = asyncio.create_task(deadlines.watch_integrity(parts))
    async with asyncio.timeout(DEADLINE_SECONDS):
        while len(checked) < 198:  # noqa: ASYNC110 - the task wakes in each iteration
            await asyncio.sleep(0)
    watch.cancel()
    assert checked[:198] == [*range(1, 100)] * 2
    assert pool.epoch == 1


async def test_a_pool_that_works_is_not_checked(parts: Components, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = parts.state.pools.get("m")

    def fail(*_: object) -> None:
        pytest.fail("checked")

    monkeypatch.setattr(type(pool), "check_integrity", fail)
    watch = asyncio.create_task(deadlines.watch_integrity(parts))
    for _ in range(20):
        pool.activity.steps += 1
        await asyncio.sleep(0)
    watch.cancel()
