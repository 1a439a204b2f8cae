"""Probes of memory: changes without memory are refused, and change nothing."""

from collections.abc import Callable
from dataclasses import replace
from mmap import mmap
from unittest.mock import Mock

import pytest

from kvpool.core import commands, memory_probe
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import ExhaustedError
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.memory_probe import QUANTUM_BYTES, RESERVE_BYTES, TABLE_BYTES, MemoryProbe
from kvpool.core.steps.columns import Operation
from support.core import World, opened

_TOO_MUCH = 2**62


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the mappings that were tried."""
    lengths = list[int]()

    def record(descriptor: int, length: int, flags: int) -> mmap:
        lengths.append(length)
        return mmap(descriptor, length, flags)

    monkeypatch.setattr(memory_probe, "mmap", record)
    return lengths


def test_a_mapping_is_tried_once_per_quantum(mapped: list[int]) -> None:
    found = MemoryProbe()
    found.reserve(100, cached=[1, 2])
    assert mapped == [100 + QUANTUM_BYTES + RESERVE_BYTES + 2 * TABLE_BYTES]
    found.reserve(QUANTUM_BYTES)
    assert len(mapped) == 1
    found.reserve(1)
    assert len(mapped) == 2


def test_a_small_change_uses_memory_that_was_freed_but_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    most_bytes = RESERVE_BYTES // 2

    def limited(descriptor: int, length: int, flags: int) -> mmap:
        if length > most_bytes:
            raise OSError
        return mmap(descriptor, length, flags)

    monkeypatch.setattr(memory_probe, "mmap", limited)
    found = MemoryProbe()
    found.reserve(QUANTUM_BYTES)
    with pytest.raises(MemoryError):
        found.reserve(QUANTUM_BYTES + 1)
    most_bytes -= 1
    with pytest.raises(MemoryError):
        found.reserve(1)


def test_a_pool_with_memory_for_all_blocks_needs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    world, session = opened(20)
    world.admit(session, 1, "a", 17)
    taken = list[int]()
    monkeypatch.setattr(MemoryProbe, "reserve", lambda _, num_bytes, *__: taken.append(num_bytes))
    world.allocate(session, 1, 4, num_appended_tokens=[1])
    assert taken == []


def test_a_maximum_counts_what_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = 2**30
    monkeypatch.setattr(memory_probe, "resident_bytes", lambda: resident)
    found = MemoryProbe()
    found.max_bytes = resident + RESERVE_BYTES + 2 * QUANTUM_BYTES
    found.reserve(QUANTUM_BYTES)
    resident += 1
    with pytest.raises(MemoryError):
        found.reserve(2 * QUANTUM_BYTES)
    found.reserve(QUANTUM_BYTES)  # a small change, from the reserve
    resident += RESERVE_BYTES
    with pytest.raises(MemoryError):
        found.reserve(1)
    found.max_bytes = 0
    found.reserve(2 * QUANTUM_BYTES)


def test_the_resident_memory_is_that_of_the_kernel() -> None:
    before = memory_probe.resident_bytes()
    grown = b"x" * 2**25
    assert memory_probe.resident_bytes() - before >= len(grown) * 0.9
    assert before < 2**36, "bytes, not pages or KiB"


def test_more_than_the_process_can_map() -> None:
    found = MemoryProbe()
    for _ in range(2):  # the second does not profit from the first
        with pytest.raises(MemoryError):
            found.reserve(_TOO_MUCH)
    found.reserve(1)


CHANGES: dict[str, Callable[[World], object]] = {
    "a step that grows columns": lambda world: world.admit(world.sessions()[0], 2, "xyz", 12),
    "a look-up that declares": lambda world: world.declare(world.sessions()[0], Operation.LOOKUP, 2, "", 3),
    "a pool": lambda world: world.allocator.create_pool(replace(world.pool.config, name=PoolName("other")), b"n"),
    "a session": lambda world: world.open(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch, change: str, world: World) -> None:
    world.admit(world.open(), 1, "ab", 8)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryProbe, "reserve", Mock(side_effect=MemoryError))
        with world.refuses(ExhaustedError, reason="OUT_OF_MEMORY", match="too little memory") as caught:
            CHANGES[change](world)
        assert caught.value.retry_seconds == 1.0
        assert (len(world.allocator.pools), len(world.allocator.sessions)) == (1, 1)
    CHANGES[change](world)


@pytest.mark.parametrize("command", [commands.PassEpoch("m", 2), None])
def test_an_epoch_without_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, command: commands.PassEpoch | None
) -> None:
    world, session = opened(20)
    world.admit(session, 1, "ab", 8)
    with monkeypatch.context() as patched:
        patched.setattr(KVCacheManager, "_create_blocks", Mock(side_effect=MemoryError))
        with world.refuses(ExhaustedError, match="too little memory"):
            world.allocator.execute(command or commands.OpenEpoch(world.pool.config, b"n", 2), 0.0)
    assert world.allocator.sessions.get(SessionId("s1"))
    (end,) = world.allocator.execute(commands.PassEpoch("m", 2), 0.0)
    assert (end.epoch, world.pool.epoch, len(world.allocator.sessions)) == (1, 2, 0)
