"""What comes back from a journal is what was: in any mix of groups, killed after any change, at any byte."""

import asyncio
import tempfile
from pathlib import Path

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
