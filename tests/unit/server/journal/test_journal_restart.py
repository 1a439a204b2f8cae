"""A journal begins again when its state is replaced, as at a standby that loaded a snapshot."""

import asyncio
import errno
import os
from pathlib import Path

import pytest

from kvpool.core.commands import Drain
from kvpool.server.journal.folder import Folder
from kvpool.server.journal.journal import Journal
from kvpool.server.journal.records import encode_record
from support.core import config
from support.journal import Traffic, assert_recovers, begin, journal_in, recovered, running
from support.state import DrivenState, driven
from support.waiting import DEADLINE_SECONDS, until

CONFIG = config(60)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def replace_state(journal: Journal, seed: int) -> Traffic:
    """Replaces the state by that of another server. Returns its traffic, which goes on in the journal's state."""
    other = DrivenState()
    traffic = Traffic(other, CONFIG, seed)
    traffic.changes(40)
    journal.state.replace(other)
    journal.restart()
    traffic.allocator = driven(journal)
    return traffic


async def test_a_journal_that_has_begun_forgets_its_former_state(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    begin(journal)
    async with running(journal):
        Traffic(driven(journal), CONFIG, seed=1).changes(30)
        traffic = replace_state(journal, seed=2)
        assert files(tmp_path) == {"lock", "pools"}, "a restart would recover the former state"
        await until(lambda: journal.counts.is_up)
        traffic.change()
    assert_recovers(tmp_path, journal.state)


async def test_a_state_that_is_replaced_during_a_snapshot_is_not_written(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    begin(journal)
    Traffic(driven(journal), CONFIG, seed=1).changes(30)
    journal._due.set()
    async with running(journal):
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not any(name.endswith(".part") for name in files(tmp_path)):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0)
        traffic = replace_state(journal, seed=2)
        await until(lambda: journal.counts.is_up)
        traffic.changes(30)
        await until(lambda: not journal.snapshot_lock.locked())
    assert_recovers(tmp_path, journal.state)


async def test_several_restarts_leave_the_last_state(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    async with running(journal):
        for seed in (1, 2, 3):
            replace_state(journal, seed)
            await asyncio.sleep(0)
        await until(lambda: journal.counts.is_up and not journal.snapshot_lock.locked())
    assert_recovers(tmp_path, journal.state)


async def test_a_snapshot_waits_for_others_that_read_the_state(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    async with running(journal):
        async with journal.snapshot_lock:
            replace_state(journal, seed=2)
            with journal.state.snapshot():
                for _ in range(20):
                    await asyncio.sleep(0)
            assert not journal.counts.is_up
            assert journal.is_behind
        await until(lambda: journal.counts.is_up)
        assert not journal.is_behind
    assert not journal.error


async def test_a_journal_that_cannot_be_written_is_not_behind(tmp_path: Path) -> None:
    """A standby with a broken disk is better than none: it is in sync, and reports that its journal is down."""
    journal = journal_in(tmp_path)
    async with running(journal):
        replace_state(journal, seed=2)
        assert journal.is_behind
        (tmp_path / "snapshot-2.part").mkdir()
        await until(lambda: not journal.is_behind)
        assert not journal.counts.is_up
        assert journal.counts.failures
        assert journal.error.startswith("SNAPSHOT_FAILED: ")


async def test_a_journal_whose_folder_cannot_be_used_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alert tells it from a journal that has not begun by the number of failures."""
    journal = journal_in(tmp_path)
    assert (journal.counts.is_up, journal.counts.failures) == (False, 0)

    def fail(_: Folder) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with running(journal):
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "empty", fail)
            replace_state(journal, seed=2)
            assert (journal.counts.is_up, journal.counts.failures) == (False, 0)
            await until(lambda: not journal.is_behind)
            assert (journal.counts.is_up, journal.counts.failures) == (False, 1)
            assert journal.error == "SNAPSHOT_FAILED: No space left on device"


async def test_a_journal_that_is_given_up_during_its_first_snapshot_is_not_behind(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    async with running(journal):
        replace_state(journal, seed=2)
        while not journal.is_recording:  # noqa: ASYNC110 - its first snapshot may soon be whole
            await asyncio.sleep(0)
        assert journal.is_behind
        journal.crash_after_bug("method")
        assert not journal.is_behind


async def test_a_restarted_journal_is_not_begun_again(tmp_path: Path) -> None:
    """The standby takes over: its journal goes on."""
    journal = journal_in(tmp_path)
    async with running(journal):
        replace_state(journal, seed=2)
        await until(lambda: journal.counts.is_up)
        before = files(tmp_path)
        journal.begin()
        assert files(tmp_path) == before
        assert journal.is_recording


async def test_nothing_is_written_before_a_journal_has_begun(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    async with running(journal):
        journal.write(encode_record(Drain(None), 0.0, None), Drain(None))
        for _ in range(5):
            await asyncio.sleep(0)
        assert files(tmp_path) == {"lock"}


async def test_an_encoded_record_is_written_as_its_command_is(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    begin(journal)
    driven(journal).journal = None
    async with running(journal):
        result = journal.state.execute(Drain(None), 0.0)
        journal.write(encode_record(Drain(None), 0.0, result), Drain(None))
        assert journal.counts.records == 2
    assert None in recovered(tmp_path).state.pools.drained
