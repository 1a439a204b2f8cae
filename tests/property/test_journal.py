"""What comes back from a journal is what was: in any mix of groups, killed after any change, at any byte."""

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvpool.core.commands import Command
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.server.journal.frames import FrameParser
from property.mixes import configs
from support.journal import Traffic, assert_alike, begin, journal_in, kill, recovered
from support.state import DrivenState, driven


@settings(
    max_examples=settings().max_examples * 3 // 10,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate],
)
@given(
    config=configs(),
    seed=st.integers(0, 2**32),
    count=st.integers(1, 80),
    snapshot_at=st.integers(0, 80),
    cut=st.integers(0, 2**16),
)
def test_it_goes_on_as_if_nothing_had_been(
    config: PoolConfig, seed: int, count: int, snapshot_at: int, cut: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = asyncio.run(_write(folder, config, seed, count, snapshot_at))
        found = recovered(folder)
        assert not found.dropped, found.detail
        twin = _changed(config, seed, count)
        assert_alike(twin.allocator, found.state)
        twin.allocator = driven(found)
        other = _changed(config, seed, count)
        assert [twin.change() for _ in range(50)] == [other.change() for _ in range(50)]

        if len(sizes) > 1:  # the last change was killed while its first record was written: it never was
            before, end = sizes[:2]
            log = max(folder.glob("log-*"), key=lambda path: int(path.name.partition("-")[2]))
            with log.open("r+b") as file:
                file.truncate(before + 1 + cut % (end - before - 1))
            found = recovered(folder)
            assert not found.dropped
            assert found.cut_bytes
            assert_alike(_changed(config, seed, count - 1).allocator, found.state)


@settings(
    max_examples=settings().max_examples * 3 // 10,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate],
)
@given(config=configs(), seed=st.integers(0, 2**32), count=st.integers(0, 120), slice_blocks=st.integers(1, 9))
def test_a_snapshot_is_of_one_moment_whatever_happens_while_it_is_written(
    config: PoolConfig, seed: int, count: int, slice_blocks: int
) -> None:
    with tempfile.TemporaryDirectory() as name, patch("kvpool.core.snapshots.SLICE_LENGTH", slice_blocks):
        folder = Path(name)
        changes, after = asyncio.run(_write_amid_changes(folder, config, seed, count))
        found = recovered(folder)  # the snapshot and the log that began with it
        assert not found.dropped, found.detail
        assert_alike(after, found.state)
        (log,) = folder.glob("log-*")
        with log.open("r+b") as file:  # without changes: what was at the snapshot's moment, and nothing that came then
            header = next(FrameParser().read(file))
            file.truncate(len(header.encoded))
        twin = _changed(config, seed, count)
        assert_alike(twin.allocator, recovered(folder).state)
        for _ in range(count, changes):
            twin.change()
        assert_alike(twin.allocator, found.state)


async def _write_amid_changes(folder: Path, config: PoolConfig, seed: int, count: int) -> tuple[int, DrivenState]:
    """Makes `count` changes, then some at each turn of a snapshot; returns how many it made, and the state."""
    journal = journal_in(folder)
    begin(journal)
    traffic = Traffic(driven(journal), config, seed)
    for _ in range(count):
        traffic.change()
    rng = random.Random(seed)  # noqa: S311 - a workload
    snapshot = asyncio.create_task(journal._snapshot())
    await asyncio.sleep(0)
    while not snapshot.done():
        for _ in range(rng.choice([0, 0, 0, 1, 4])):
            traffic.change()
            count += 1
        await asyncio.sleep(0)
    await snapshot
    for pool in journal.state.pools:
        pool.blocks.take_events()
    kill(journal)
    return count, driven(journal)


async def _write(folder: Path, config: PoolConfig, seed: int, count: int, snapshot_at: int) -> list[int]:
    """Makes changes; returns the log's sizes before each record of the last one, and at the end.

    A step that is sent again is a record of its own, so that one change may have two.
    """
    journal = journal_in(folder)
    begin(journal)
    traffic = Traffic(driven(journal), config, seed)
    sizes: list[int] = []
    record = journal.record

    def note(command: Command[Any], now_seconds: float, result: object) -> None:
        sizes.append(journal._folder.log(journal._number).stat().st_size)
        record(command, now_seconds, result)

    for i in range(count):
        if i == snapshot_at:
            await journal._snapshot()
        if i == count - 1:
            journal.record = note  # type: ignore[method-assign]  # observes the calls
        traffic.change()
    sizes.append(journal._folder.log(journal._number).stat().st_size)
    kill(journal)
    return sizes


def _changed(config: PoolConfig, seed: int, count: int) -> Traffic:
    """Traffic after `count` changes, without a journal."""
    traffic = Traffic(DrivenState(), config, seed)
    for _ in range(count):
        traffic.change()
    for pool in traffic.allocator.pools:
        pool.blocks.take_events()
    return traffic
