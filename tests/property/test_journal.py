"""What comes back from a journal is what was: in any mix of groups, killed after any change, at any byte."""

import asyncio
import random
import tempfile
from pathlib import Path
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvpool.server.core.allocator import Allocator
from kvpool.server.core.config import PoolConfig
from property.mixes import configs
from support_journal import Traffic, assert_alike, journal_in, kill, recovered


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
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
        asyncio.run(_write(folder, config, seed, count, snapshot_at))
        log = max(folder.glob("log-*"), key=lambda path: int(path.name.partition("-")[2]))
        whole = log.stat().st_size
        last = folder / "size-before-the-last-change"
        before = int(last.read_text())
        last.unlink()

        found = recovered(folder)
        assert not found.dropped, found.detail
        twin, expected = _twin(config, seed, count)
        assert_alike(twin.allocator, found.allocator)
        twin.allocator = found.allocator
        assert [twin.change() for _ in range(50)] == expected

        if whole > before:  # the last change was killed while it was written: it never was
            with log.open("r+b") as file:
                file.truncate(before + 1 + cut % (whole - before - 1))
            found = recovered(folder)
            assert not found.dropped
            assert found.cut_bytes
            assert_alike(_twin(config, seed, count - 1)[0].allocator, found.allocator)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(config=configs(), seed=st.integers(0, 2**32), count=st.integers(0, 120), slice_blocks=st.integers(1, 9))
def test_a_snapshot_is_of_one_moment_whatever_happens_while_it_is_written(
    config: PoolConfig, seed: int, count: int, slice_blocks: int
) -> None:
    with tempfile.TemporaryDirectory() as name, patch("kvpool.server.journal.guarded.SLICE_BLOCKS", slice_blocks):
        folder = Path(name)
        changes, after = asyncio.run(_write_amid_changes(folder, config, seed, count))
        twin, _ = _twin(config, seed, changes)
        found = recovered(folder)  # the snapshot and the log that began with it
        assert not found.dropped, found.detail
        assert_alike(twin.allocator, found.allocator)
        assert_alike(after, found.allocator)
        (log,) = folder.glob("log-*")
        with log.open("r+b") as file:
            file.truncate(0)  # the snapshot alone: what was at its moment, and nothing of what came in between
        assert_alike(_twin(config, seed, count)[0].allocator, recovered(folder).allocator)


async def _write_amid_changes(folder: Path, config: PoolConfig, seed: int, count: int) -> tuple[int, Allocator]:
    """Makes `count` changes, then some at each turn of a snapshot; returns how many it made, and the state."""
    journal = journal_in(folder)
    journal.begin(0.0)
    traffic = Traffic(journal.allocator, config, seed)
    for _ in range(count):
        traffic.change()
    rng = random.Random(seed)  # noqa: S311 - a workload
    snapshot = asyncio.create_task(journal._snapshot())
    await asyncio.sleep(0)
    while not snapshot.done():
        for _ in range(rng.choice([0, 0, 1, 2, 10])):
            traffic.change()
            count += 1
        await asyncio.sleep(0)
    await snapshot
    for pool in journal.allocator.pools():
        assert type(pool.blocks._ref_cnt) is list
        pool.blocks.take_events()
    kill(journal)
    return count, journal.allocator


async def _write(folder: Path, config: PoolConfig, seed: int, count: int, snapshot_at: int) -> None:
    journal = journal_in(folder)
    journal.begin(0.0)
    traffic = Traffic(journal.allocator, config, seed)
    size = 0
    for i in range(count):
        if i == snapshot_at:
            await journal._snapshot()
        size = journal._folder.log(journal._number).stat().st_size
        traffic.change()
    kill(journal)
    (folder / "size-before-the-last-change").write_text(str(size))


def _twin(config: PoolConfig, seed: int, count: int) -> tuple[Traffic, list[object]]:
    """Traffic after so many changes that no journal ever saw, and what another is answered for the 50 after them."""
    twins = [Traffic(Allocator(), config, seed) for _ in range(2)]
    for twin in twins:
        for _ in range(count):
            twin.change()
        for pool in twin.allocator.pools():
            pool.blocks.take_events()
    return twins[0], [twins[1].change() for _ in range(50)]
