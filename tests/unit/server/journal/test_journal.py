"""Tests of journal/journal.py; they cite its rules."""

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvpool.core.ids import PoolName
from kvpool.server.journal.folder import FrameFile, Header
from kvpool.server.journal.frames import DAMAGE
from kvpool.server.journal.journal import Journal
from kvpool.server.journal.pool_list import EPOCH_LEAP
from support.core import config
from support.faults import ArmedFaults
from support.journal import Traffic, assert_alike, assert_recovers, begin, journal_in, kill, recovered, running
from support.open_files import no_free_files
from support.state import DrivenState, driven
from support.waiting import until

CONFIG = config(60)


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that was given up begins again soon."""
    monkeypatch.setattr("kvpool.server.journal.journal.RETRY_SECONDS", 0.01)


@pytest.fixture(name="faults")
def fixture_faults() -> ArmedFaults:
    """The fault points of the test's journal."""
    return ArmedFaults()


def begun(folder: Path, num_changes: int = 0, **settings: Any) -> tuple[Journal, Traffic]:
    journal = journal_in(folder, **settings)
    begin(journal)
    traffic = Traffic(driven(journal), CONFIG, seed=1)
    traffic.changes(num_changes)
    return journal, traffic


def give_up(journal: Journal, traffic: Traffic) -> None:
    """Makes changes until one cannot be recorded."""
    while journal.counts.is_up:
        traffic.change()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def up(journal: Journal) -> None:
    await until(lambda: journal.counts.is_up)


def failing_with(number: int) -> Callable[..., NoReturn]:
    """A call that fails with an error of the system."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


refuse_to_write = failing_with(errno.ENOSPC)


@contextlib.contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No bytes can be written to the journal."""
    with monkeypatch.context() as patched:
        patched.setattr("kvpool.server.journal.folder.write_whole", refuse_to_write)
        yield


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def dies(journal: Journal, folder: Path) -> DrivenState:
    """The state that the next process recovers."""
    kill(journal)
    return driven(recovered(folder))


def test_files_are_readable_by_their_user_only(tmp_path: Path) -> None:
    journal, _ = begun(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}
    kill(journal)


def test_files_of_an_earlier_process_count(tmp_path: Path) -> None:
    journal, _ = begun(tmp_path, num_changes=500, max_bytes=2**20)
    kill(journal)
    before = size_bytes(tmp_path)
    assert before > 2**15
    journal = journal_in(tmp_path, max_bytes=2**20)
    begin(journal)
    assert before < journal.counts.size_bytes <= size_bytes(tmp_path)
    kill(journal)


@pytest.mark.parametrize(
    "point", ["snapshot.begun", "snapshot.slice_written", "snapshot.before_rename", "snapshot.before_delete"]
)
async def test_a_failure_at_any_point_of_a_snapshot_loses_nothing(
    tmp_path: Path, faults: ArmedFaults, point: str
) -> None:
    journal, traffic = begun(tmp_path, num_changes=20, faults=faults)
    faults.arm(f"{point}:error:1")
    with pytest.raises(OSError, match="armed to fail"):
        await journal._snapshot()
    traffic.change()
    state = journal.state
    assert_alike(state, dies(journal, tmp_path))


async def test_changes_during_a_snapshot_are_in_the_next_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.core.snapshots.SLICE_LENGTH", 7)
    journal, traffic = begun(tmp_path, num_changes=20)
    snapshot = asyncio.create_task(journal._snapshot())
    turns = 0
    while not snapshot.done():
        traffic.change()
        turns += 1
        await asyncio.sleep(0)
    assert turns > 20
    assert names(tmp_path) == ["lock", "log-2", "pools", "snapshot-2"]
    assert_alike(journal.state, dies(journal, tmp_path))


async def test_a_long_log_is_followed_by_a_snapshot(tmp_path: Path) -> None:
    journal, traffic = begun(tmp_path, max_bytes=2**20)
    async with running(journal):
        while journal.counts.snapshots < 3:
            traffic.change()
            await asyncio.sleep(0)
        assert journal.counts.is_up
        assert journal.counts.size_bytes < 2**20
    assert_recovers(tmp_path, journal.state)


async def test_a_failed_write_deletes_the_journal_and_a_new_one_begins(tmp_path: Path, faults: ArmedFaults) -> None:
    journal, traffic = begun(tmp_path, num_changes=20, faults=faults)
    faults.arm("journal.before_write:error:1,snapshot.slice_written:error:1")
    give_up(journal, traffic)
    assert names(tmp_path) == ["lock", "pools"]
    assert not journal.is_recording
    traffic.change()  # the server continues to work
    async with running(journal):
        while not journal.counts.is_up:
            traffic.change()
            await asyncio.sleep(0.005)
        assert journal.counts.failures == 2  # the first snapshot of the new journal failed, too
        traffic.change()
    assert_recovers(tmp_path, journal.state)


async def test_a_new_journal_lists_the_pools_created_without_one(tmp_path: Path, faults: ArmedFaults) -> None:
    journal, traffic = begun(tmp_path, faults=faults)
    faults.arm("journal.before_write:error:1")
    give_up(journal, traffic)
    driven(journal).create_pool(replace(CONFIG, name=PoolName("later")), b"n" * 32, 7)
    async with running(journal):
        await up(journal)
    (tmp_path / f"snapshot-{journal._number}").unlink()
    found = recovered(tmp_path)
    assert found.dropped
    assert [(pool.config.name, pool.epoch) for pool in found.state.pools] == [
        ("m", 1 + EPOCH_LEAP),
        ("later", 7 + EPOCH_LEAP),
    ]


async def test_a_bug_in_a_snapshot_ends_the_journal_and_a_new_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal, traffic = begun(tmp_path, num_changes=1)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr("kvpool.server.journal.journal.snapshot_frames", broken)
        task = asyncio.create_task(journal.run())
        journal._due.set()
        while journal.counts.is_up:
            assert not task.done()
            await asyncio.sleep(0)
        assert names(tmp_path) == ["lock", "pools"]
        assert [each.message for each in caplog.records if each.levelname == "ERROR"] == ["bug", "journal given up"]
    await up(journal)
    task.cancel()
    traffic.change()
    assert_alike(journal.state, dies(journal, tmp_path))


async def test_a_server_starts_without_a_journal_that_cannot_be_written(tmp_path: Path, faults: ArmedFaults) -> None:
    journal, _ = begun(tmp_path, num_changes=1)
    kill(journal)
    (tmp_path / "snapshot-1").unlink()
    journal = journal_in(tmp_path, faults=faults)
    faults.arm("snapshot.before_rename:error:1")
    begin(journal)
    assert (journal.counts.is_up, journal.counts.failures) == (False, 1)
    assert journal.error == "WRITE_FAILED: a fault point was armed to fail"
    assert names(tmp_path) == ["lock", "pools"]
    async with running(journal):
        await up(journal)
        assert not journal.error
    assert_recovers(tmp_path, journal.state)


def test_a_full_disk_at_the_start_ends_a_recovered_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of this process cannot be recorded, so the files must not be trusted later."""
    journal, _ = begun(tmp_path, num_changes=1)
    kill(journal)
    journal = journal_in(tmp_path)
    with full_disk(monkeypatch):
        begin(journal)
    assert not journal.recovery.dropped
    assert journal.error == "WRITE_FAILED: No space left on device"
    kill(journal)
    assert recovered(tmp_path).dropped == "NOT_WHOLE"


def test_a_disk_that_is_full_from_the_first_start_leaves_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of its sessions may run when the next server starts."""
    with full_disk(monkeypatch):
        journal, traffic = begun(tmp_path)
        traffic.change()
        assert journal.error == "WRITE_FAILED: No space left on device"
        kill(journal)
        assert names(tmp_path) == ["lock", "pools"]
        assert size_bytes(tmp_path) == 0
        for past_epoch in (100, 200):
            journal = journal_in(tmp_path, past_epoch=past_epoch)
            assert (journal.recovery.dropped, journal.recovery.last_number) == ("NOT_WHOLE", 0)
            assert journal.state.pools.past_epoch == past_epoch + EPOCH_LEAP
            assert journal.state.lost_may_run
            kill(journal)
    journal = journal_in(tmp_path)
    begin(journal)
    kill(journal)
    assert not recovered(tmp_path).dropped


def test_a_first_server_that_could_leave_no_trace_does_not_start(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    (tmp_path / "pools").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        begin(journal)
    kill(journal)


async def test_a_disk_that_is_full_when_the_folder_is_made_again_leaves_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "journal"
    journal, _ = begun(folder, num_changes=1)
    with monkeypatch.context() as full:
        async with running(journal):
            full.setattr(FrameFile, "append", refuse_to_write)  # the old log can be marked
            full.setattr(Header, "encode", refuse_to_write)
            shutil.rmtree(folder)
            await until((folder / "pools").exists)
    assert recovered(folder).dropped == "NOT_WHOLE"


async def test_a_file_that_cannot_be_checked_for_a_while_costs_no_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvpool.server.journal.journal.CHECK_SECONDS", 0.01)
    journal, traffic = begun(tmp_path)
    async with running(journal):
        with monkeypatch.context() as failing:
            failing.setattr("kvpool.server.journal.folder.file_id", failing_with(errno.EIO))
            await until(lambda: caplog.messages.count("journal read repeated") > 1)
            journal._check_files()
        assert journal.counts.is_up
        assert not journal.error
        traffic.change()
    assert_recovers(tmp_path, journal.state)


def test_servers_that_cannot_write_begin_different_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server passes the time as an epoch that earlier servers may have used."""
    journal, _ = begun(tmp_path, num_changes=1)
    kill(journal)
    (tmp_path / "snapshot-1").unlink()
    epochs = []
    for time_seconds in (100, 105, 110):
        journal = journal_in(tmp_path, past_epoch=time_seconds)
        with full_disk(monkeypatch):
            begin(journal)
        epochs += [pool.epoch for pool in journal.state.pools]
        kill(journal)
    assert epochs == [100 + EPOCH_LEAP, 105 + EPOCH_LEAP, 110 + EPOCH_LEAP]


def _replace_folder(folder: Path) -> None:
    """An older copy is brought back."""
    folder.rename(folder.with_name("moved"))
    shutil.copytree(folder.with_name("older"), folder)


def _replace(name: str, folder: Path) -> None:
    shutil.copy(folder / name, folder / "copy")
    (folder / "copy").rename(folder / name)


LOSSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder deleted": (shutil.rmtree, "the folder"),
    "folder moved": (lambda folder: folder.rename(folder.with_name("moved")), "the folder"),
    "folder replaced": (_replace_folder, "the folder"),
    "lock deleted": (lambda folder: (folder / "lock").unlink(), "the folder"),
    "log deleted": (lambda folder: (folder / "log-1").unlink(), "log-1"),
    "log moved": (lambda folder: (folder / "log-1").rename(folder / "elsewhere"), "log-1"),
    "log replaced": (partial(_replace, "log-1"), "log-1"),
    "log cut": (lambda folder: os.truncate(folder / "log-1", 100), "log-1"),
    "snapshot deleted": (lambda folder: (folder / "snapshot-1").unlink(), "snapshot-1"),
    "snapshot replaced": (partial(_replace, "snapshot-1"), "snapshot-1"),
    "snapshot cut": (lambda folder: os.truncate(folder / "snapshot-1", 100), "snapshot-1"),
}


async def test_a_folder_that_is_deleted_when_a_snapshot_is_due_ends_the_journal(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    before, _ = begun(folder, num_changes=1)
    before.close()
    journal = journal_in(folder)
    begin(journal)  # recovered, so that a snapshot is due at once
    shutil.rmtree(folder)
    async with running(journal):
        await until(lambda: journal.counts.failures)
        await up(journal)
        assert folder.exists()


@pytest.mark.parametrize("loss", LOSSES)
async def test_files_that_are_lost_under_a_running_server_end_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, loss: str
) -> None:
    """A new journal begins in the folder's place. The lost one is never accepted again."""
    monkeypatch.setattr("kvpool.server.journal.journal.CHECK_SECONDS", 0.01)
    lose, what = LOSSES[loss]
    folder = tmp_path / "journal"
    journal, traffic = begun(folder, num_changes=10)
    shutil.copytree(folder, tmp_path / "older")
    traffic.change()
    async with running(journal):
        await asyncio.sleep(0)
        lose(folder)
        await until(lambda: journal.counts.failures)
        await up(journal)
        traffic.change()
        with pytest.raises(OSError, match="another server uses the journal"):
            journal_in(folder)
    (given_up,) = (each for each in caplog.records if each.message == "journal given up")
    assert vars(given_up)["reason"] == "FILES_LOST"
    assert vars(given_up)["error"] == f"{what} was deleted, moved, replaced or cut"
    assert_recovers(folder, journal.state)
    moved = tmp_path / "moved"
    assert not moved.exists() or recovered(moved).dropped == "DAMAGED"
    moved_log = folder / "elsewhere"
    assert not moved_log.exists() or moved_log.read_bytes().endswith(DAMAGE)


def test_no_last_snapshot_is_written_to_a_folder_of_another_server(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal, _ = begun(folder)
    folder.rename(tmp_path / "moved")
    other, _ = begun(folder, num_changes=1)
    journal.close()
    assert recovered(tmp_path / "moved").dropped == "DAMAGED"
    assert_alike(other.state, dies(other, folder))


async def test_no_journal_begins_in_a_folder_that_another_server_has_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvpool.server.journal.journal.CHECK_SECONDS", 0.01)
    folder = tmp_path / "journal"
    journal, _ = begun(folder)
    folder.rename(tmp_path / "moved")
    other, _ = begun(folder, num_changes=1)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    async with running(journal):
        await until(lambda: not journal.is_recording)
        await until(lambda: "journal snapshot failed" in caplog.messages)
        assert not journal.counts.is_up
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
        kill(other)
        await up(journal)
    assert_recovers(folder, journal.state)


async def test_a_process_without_descriptors_keeps_its_journal(tmp_path: Path) -> None:
    journal, traffic = begun(tmp_path)
    with no_free_files():
        for number in range(40):
            name = PoolName(f"pool-{number}")
            driven(journal).create_pool(replace(CONFIG, name=name), b"n" * 32, 7)
            traffic.change()
            await journal._snapshot()
    assert (journal.counts.is_up, journal.counts.failures, journal.counts.snapshots) == (True, 0, 41)
    assert_alike(journal.state, dies(journal, tmp_path))


class DeathError(BaseException):
    """The death of the process."""


@pytest.mark.parametrize("num_deleted", range(5))
@pytest.mark.parametrize("flipped_bits", [0, 1])
async def test_a_death_during_the_deletion_leaves_no_outdated_state(
    tmp_path: Path, faults: ArmedFaults, monkeypatch: pytest.MonkeyPatch, num_deleted: int, flipped_bits: int
) -> None:
    """The next process recovers the newest state or nothing, and nothing from a damaged journal."""
    journal, traffic = begun(tmp_path, num_changes=20, faults=faults)
    faults.arm("snapshot.before_delete:error:1")
    with pytest.raises(OSError, match="armed to fail"):
        await journal._snapshot()
    traffic.changes(20)
    assert names(tmp_path) == ["lock", "log-1", "log-2", "pools", "snapshot-1", "snapshot-2"]
    content = bytearray((tmp_path / "log-2").read_bytes())
    content[-1] ^= flipped_bits
    (tmp_path / "log-2").write_bytes(content)
    unlink, left = Path.unlink, [num_deleted]

    def die_after(path: Path, *, missing_ok: bool) -> None:
        if not left[0]:
            raise DeathError
        left[0] -= 1
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", die_after)
    with contextlib.suppress(DeathError):
        journal._folder.invalidate()
    monkeypatch.undo()
    kill(journal)
    found = recovered(tmp_path)
    if num_deleted > 1 or flipped_bits:
        assert found.dropped
    else:
        assert not found.dropped
        assert_alike(journal.state, found.state)


def fail_once(monkeypatch: pytest.MonkeyPatch, number: int, num_written: int) -> list[int]:
    """Lets one write to a log fail after a few bytes. Returns a list that is empty once it has failed."""
    left, write = [1], os.write

    def failing(descriptor: int, content: bytes) -> int:
        if left and len(content) > num_written and "/log-" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            left.pop()
            write(descriptor, content[:num_written])
            raise OSError(number, os.strerror(number))
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", failing)
    return left


@pytest.mark.parametrize("num_written", [0, 5, 20])
def test_a_write_that_fails_once_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int) -> None:
    journal, traffic = begun(tmp_path, num_changes=1)
    left = fail_once(monkeypatch, errno.EIO, num_written)
    while left:
        traffic.change()
    traffic.change()
    journal._check_files()
    assert (journal.counts.is_up, journal.counts.failures) == (True, 0)
    assert_alike(journal.state, dies(journal, tmp_path))


def test_a_write_to_a_full_disk_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, traffic = begun(tmp_path)
    fail_once(monkeypatch, errno.ENOSPC, 5)
    give_up(journal, traffic)
    assert journal.error == "WRITE_FAILED: No space left on device"
    kill(journal)


def test_a_write_that_fails_twice_ends_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, traffic = begun(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("kvpool.server.journal.folder.write_whole", failing_with(errno.EIO))
        give_up(journal, traffic)
    assert journal.error == "WRITE_FAILED: Input/output error"
    kill(journal)
    assert recovered(tmp_path).dropped == "NOT_WHOLE"


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_list_of_pools_that_cannot_be_written_twice_ends_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    journal, _ = begun(tmp_path)
    opened, left = os.open, [1] * num_failures

    def refuse(path: Any, *arguments: Any) -> int:
        if left and str(path).endswith("pools.part"):
            left.pop()
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return opened(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    driven(journal).create_pool(replace(CONFIG, name=PoolName("later")), b"n" * 32, 7)
    assert not left
    assert journal.error == ("WRITE_FAILED: Too many open files in system" if num_failures == 2 else "")
    kill(journal)


def test_a_journal_given_up_before_its_first_pool_is_reported(tmp_path: Path, faults: ArmedFaults) -> None:
    journal = journal_in(tmp_path, faults=faults)
    begin(journal)
    faults.arm("journal.before_write:error:1")
    Traffic(driven(journal), CONFIG, seed=1)
    assert not journal.counts.is_up
    kill(journal)
    assert recovered(tmp_path).dropped == "NOT_WHOLE"


def test_a_journal_above_its_maximum_size_is_given_up(tmp_path: Path) -> None:
    journal, traffic = begun(tmp_path, max_bytes=2**20)
    while journal.counts.is_up:  # no snapshot is written
        traffic.change()
        assert journal.counts.size_bytes <= 2**20
    assert journal.counts.failures == 1
    kill(journal)


def test_a_journal_that_cannot_be_deleted_is_overwritten(
    tmp_path: Path, faults: ArmedFaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, traffic = begun(tmp_path, num_changes=1, faults=faults)
    faults.arm("journal.before_write:error:1")
    monkeypatch.setattr(Path, "unlink", failing_with(errno.EACCES))
    give_up(journal, traffic)
    monkeypatch.undo()
    kill(journal)
    assert recovered(tmp_path).dropped == "DAMAGED"


def test_a_journal_that_cannot_be_invalidated_ends_the_process(
    tmp_path: Path, faults: ArmedFaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = begun(tmp_path, num_changes=1, faults=faults)

    class EndError(BaseException):
        pass

    def end(status: int) -> None:
        raise EndError(status)

    monkeypatch.setattr(journal._folder, "invalidate", failing_with(errno.EACCES))
    monkeypatch.setattr(os, "_exit", end)
    faults.arm("journal.before_write:error:1")
    with pytest.raises(EndError, match="70"):
        driven(journal).drain(None)
    kill(journal)


def test_a_change_that_fails_halfway_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = begun(tmp_path)
    pool = next(iter(journal.state.pools))

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    monkeypatch.setattr(type(pool), "reset_prefix_cache", broken)
    with pytest.raises(ZeroDivisionError):
        driven(journal).reset_prefix_cache(pool)
    assert ended == [70]
    kill(journal)
