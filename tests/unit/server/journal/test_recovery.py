"""Tests of journal/recovery.py; they cite its rules."""

import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.core.errors import AbortedError, out_of_memory
from kvpool.core.ids import PoolName
from kvpool.server.codec import dumps
from kvpool.server.journal import recovery
from kvpool.server.journal.folder import FORMAT, Folder, Header, Writer, format_of
from kvpool.server.journal.frames import FrameKind, FrameParser, encode_frame
from kvpool.server.journal.journal import Journal
from kvpool.server.journal.pool_list import EPOCH_LEAP
from kvpool.server.journal.recovery import Recovery
from kvpool.wire.backoff import Backoff
from kvpool.wire.file_ids import file_id
from support.core import World, config
from support.journal import (
    WRITER,
    assert_alike,
    assert_recovers,
    begin,
    begin_and_die,
    files_of,
    is_alike,
    journal_in,
    kill,
    leave_journal,
    recovered,
    states_of,
)
from support.state import DrivenState, driven

COUNT = 8
SEED = 4
CONFIG = config(12)


@pytest.fixture(scope="module")
def states() -> list[DrivenState]:
    return states_of(CONFIG, SEED, COUNT)


@pytest.fixture
def restarted() -> DrivenState:
    """The last state, after another process has started: at time 0 the waits of quarantines restart."""
    state = states_of(CONFIG, SEED, COUNT)[-1]
    state.renew_leases(0.0)
    return state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A journal with a few changes, as a killed process leaves it."""
    folder = tmp_path / "journal"
    leave_journal(folder, CONFIG, SEED, COUNT)
    return folder


def test_the_whole_state_is_recovered(folder: Path, states: list[DrivenState]) -> None:
    assert assert_recovers(folder, states[-1]).num_records


def test_a_snapshot_keeps_the_memory_of_a_pool(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    world = World(allocator=driven(journal))
    for memory_id in ("a", "b"):
        session = world.open(memory_id=memory_id)
        world.allocator.close_session(session.session_id, 0.0)
    begin(journal)  # writes a snapshot of the current state
    kill(journal)
    found = recovered(tmp_path)
    assert (found.num_records, found.dropped) == (1, "")  # the renewal of the leases
    pool = found.state.pools.get("m")
    assert (pool.epoch, pool.memory_id) == (2, "b")
    assert_alike(world.allocator, found.state)


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.complete)])
def test_a_truncated_log_gives_an_earlier_state(folder: Path, states: list[DrivenState], stride: int) -> None:
    log = folder / "log-1"
    content = log.read_bytes()
    seen = []
    for size in range(len(_header("log-1", file_id(log))), len(content), stride):
        log.write_bytes(content[:size])
        found = recovered(folder)
        assert not found.dropped
        if not found.cut_bytes:
            seen.append(next(i for i, state in enumerate(states) if is_alike(state, found.state)))
    assert seen == sorted(seen)
    assert set(seen) <= set(range(len(states)))


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.complete)])
def test_a_changed_byte_drops_the_journal_or_changes_nothing(
    folder: Path, states: list[DrivenState], stride: int
) -> None:
    for path in files_of(folder):
        content = path.read_bytes()
        for i in range(0, len(content), stride):
            changed = bytearray(content)
            changed[i] ^= 1 << i % 8
            path.write_bytes(changed)
            if path.name == "pools":  # read only if the journal is dropped
                assert_recovers(folder, states[-1])
            else:
                assert_dropped(folder, "DAMAGED")
        path.write_bytes(content)


HEADER = Header("snapshot-1", FORMAT, WRITER, "1-1")


def _header(name: str, file_id: str = "") -> bytes:
    return replace(HEADER, name=name, format=format_of(name), file_id=file_id).encode()


def assert_dropped(folder: Path, reason: str, detail: str = "", writer: Writer = WRITER) -> None:
    """A new process recovers nothing but the pools, in later epochs."""
    found = recovered(folder, writer)
    assert found.dropped == reason
    assert detail in found.detail
    assert_has_pools_only(found)


def assert_has_pools_only(found: Recovery) -> None:
    pools = list(found.state.pools)
    assert [pool.epoch for pool in pools] == [1 + EPOCH_LEAP]
    assert not pools[0].config.difference(CONFIG)
    assert pools[0].config.hash_scheme.none_hash == b"n" * 32
    assert not pools[0].sessions
    assert not len(pools[0].blocks.prefix_map)
    with pytest.raises(AbortedError) as caught:
        found.state.sessions.find("session-1", 0.0)
    assert caught.value.reason == "JOURNAL_DROPPED"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _cut_middle(folder: Path) -> None:
    begin_and_die(folder)
    _cut(folder / "log-1")


def _end_log(folder: Path, count: int = 1) -> None:
    with (folder / "log-1").open("ab") as file:
        file.write(encode_frame(FrameKind.END, b"") * count)


def _end_log_before_an_empty_one(folder: Path) -> None:
    _end_log(folder)
    (folder / "log-2").touch()


WAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no snapshot": (lambda folder: (folder / "snapshot-1").rename(folder / "gone"), "NOT_WHOLE"),
    "no log nor snapshot": (lambda folder: [path.rename(folder / "gone") for path in folder.glob("*-1")], "NOT_WHOLE"),
    "a snapshot alone": (lambda folder: (folder / "log-1").unlink(), "NOT_WHOLE"),
    "a snapshot whose log has no header": (lambda folder: (folder / "log-1").write_bytes(b""), "DAMAGED"),
    "a log is missing": (lambda folder: (folder / "log-1").rename(folder / "log-2"), "NOT_WHOLE"),
    "a log under another name": (lambda folder: shutil.copy(folder / "log-1", folder / "log-2"), "DAMAGED"),
    "a snapshot cut short": (lambda folder: _cut(folder / "snapshot-1"), "DAMAGED"),
    "a log cut short that is not the last": (_cut_middle, "DAMAGED"),
    "an ended log without a next one": (_end_log, "NOT_WHOLE"),
    "a frame after the end of a log": (lambda folder: _end_log(folder, count=2), "DAMAGED"),
    "an ended log before one without a header": (_end_log_before_an_empty_one, "DAMAGED"),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_incomplete_journal_is_dropped(folder: Path, way: str) -> None:
    spoil, reason = WAYS[way]
    spoil(folder)
    assert_dropped(folder, reason)


MALFORMED = [
    *(None, 7, "abc", [], [1, 2, 3], [[], [], ["t"]], [7, "b", b"\1", b"", b""]),
    *([["m", "1", b""]], [[["m"], 1, b""]], [["m", 1, 7]], {"m": 1}),
]


OF_0_1 = b"kvpool1\n" + encode_frame(FrameKind.HEADER, dumps(["snapshot-1", 2, "0.1.0 CPython", "boot"]))
POOL_LISTS = [
    *(_header("pools") + encode_frame(FrameKind.POOLS, dumps(node)) for node in MALFORMED),
    OF_0_1,
    None,
]
"""Contents of the file, None for no file."""


@pytest.mark.parametrize("content", POOL_LISTS)
def test_an_unreadable_list_of_pools_does_not_prevent_the_start(folder: Path, content: bytes | None) -> None:
    (folder / "snapshot-1").unlink()
    (folder / "pools").unlink()
    if content is not None:
        (folder / "pools").write_bytes(content)
    found = recovered(folder, past_epoch=7000)
    assert found.dropped == "NOT_WHOLE"
    assert not list(found.state.pools)
    assert found.state.pools.past_epoch == 7000 + EPOCH_LEAP, "there may have been pools"
    with pytest.raises(AbortedError):
        found.state.sessions.find("session-1", 0.0)


@pytest.mark.parametrize("node", [None, [], ["snapshot-1", 1], ["snapshot-1", 1, "1 Python", 7]])
def test_a_malformed_header_is_damage(folder: Path, node: object) -> None:
    (folder / "snapshot-1").write_bytes(encode_frame(FrameKind.HEADER, dumps(node)))
    assert_dropped(folder, "DAMAGED")


def test_another_boot_of_the_machine_drops_the_journal(folder: Path) -> None:
    assert_dropped(folder, "MACHINE_RESTARTED", writer=replace(WRITER, boot_id="another"))


def _copy_over(older: Path, folder: Path) -> None:
    """Replaces each file, as `rsync --delete` does: a new file gets the name of the old one."""
    for path in older.iterdir():
        shutil.copy2(path, folder / "new")
        (folder / "new").rename(folder / path.name)
    for path in folder.iterdir():
        if not (older / path.name).exists():
            path.unlink()


def _copy_anew(older: Path, folder: Path) -> None:
    """The inode numbers of the deleted files may be used again."""
    shutil.rmtree(folder)
    shutil.copytree(older, folder)


def _links(folder: Path, older: Path) -> Path:
    """Makes hard links, as `cp -al` does."""
    return Path(shutil.copytree(folder, older, copy_function=os.link))


def _move_over(older: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    older.rename(folder)


@pytest.mark.parametrize("end", [kill, Journal.close])
@pytest.mark.parametrize(
    ("ways", "reason"),
    [
        ((shutil.copytree, _copy_over), "COPIED"),
        ((shutil.copytree, _copy_anew), "COPIED"),
        ((_links, _copy_over), "COPIED"),
        ((_links, _move_over), "NOT_WHOLE"),
    ],
)
def test_an_older_copy_is_not_accepted(
    folder: Path,
    tmp_path: Path,
    ways: tuple[Callable[[Path, Path], Path], Callable[[Path, Path], None]],
    reason: str,
    end: Callable[[Journal], None],
) -> None:
    copy, bring_back = ways
    older = copy(folder, tmp_path / "older")
    journal = journal_in(folder)
    begin(journal)
    driven(journal).create_pool(replace(CONFIG, name=PoolName("later")), b"n" * 32)
    end(journal)
    bring_back(older, folder)
    assert_dropped(folder, reason)


async def test_links_made_under_a_running_server_are_not_accepted(folder: Path, tmp_path: Path) -> None:
    """Not before the next snapshot is complete, nor after it, when the linked files have no other name."""
    journal = journal_in(folder)
    begin(journal)
    await journal._snapshot()
    older = _links(folder, tmp_path / "older")
    newer = _links(folder, tmp_path / "newer")
    journal._rotate()
    driven(journal).renew_leases(1.0)
    kill(journal)
    _move_over(older, folder)
    assert recovered(folder).dropped == "NOT_WHOLE"
    journal = journal_in(folder)
    begin(journal)
    journal.close()
    _move_over(newer, folder)
    assert recovered(folder).dropped == "NOT_WHOLE"


def test_links_do_not_invalidate_a_journal(folder: Path, tmp_path: Path, states: list[DrivenState]) -> None:
    _links(folder, tmp_path / "older")
    assert_recovers(folder, states[-1])


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in files_of(folder)}


def _system_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


READERS = [  # a call that reads the folder, and an error that it may raise
    (Folder, "_files", _system_error(errno.EIO)),
    (Path, "open", _system_error(errno.EMFILE)),
    (Path, "open", _system_error(errno.EACCES)),
    (FrameParser, "feed", _system_error(errno.EIO)),
    (recovery, "file_id", _system_error(errno.EIO)),
]
SHORTAGES = [  # a call that needs memory, and how it fails without
    (recovery, "load_snapshot", MemoryError()),
    (DrivenState, "restore", MemoryError()),
    (DrivenState, "restore", out_of_memory()),
    (recovery, "execute_record", MemoryError()),
    (recovery, "execute_record", out_of_memory()),
]


@pytest.fixture
def repeats_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery that fails is tried a second time, at once."""
    monkeypatch.setattr(recovery, "NUM_REPETITIONS", 1)
    monkeypatch.setattr(recovery, "Backoff", lambda *_, **__: Backoff(0.0, 0.0))


@pytest.mark.usefixtures("repeats_once")
@pytest.mark.parametrize(("failure", "is_valid"), [*product(READERS, [True, False]), *product(SHORTAGES, [True])])
def test_an_error_that_passes_costs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: tuple[object, str, Exception], *, is_valid: bool
) -> None:
    """Each call fails once, the first and each later one."""
    owner, name, error = failure
    if not is_valid:
        _cut(folder / "snapshot-1")
    expected = recovered(folder)
    before, original = _snapshot(folder), getattr(owner, name)
    failing = num_calls = 1

    def fails_once(*arguments: Any, **options: Any) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == failing:
            raise error
        return original(*arguments, **options)

    while num_calls >= failing:
        num_calls = 0
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails_once)
            found = recovered(folder)
        assert (found.dropped, found.last_number) == (expected.dropped, expected.last_number)
        assert _snapshot(folder) == before
        assert_alike(found.state, expected.state)
        failing += 1
    assert failing > 2


@pytest.mark.parametrize("name", ["snapshot-1", "log-1"])
def test_a_journal_that_cannot_be_read_stays_and_no_server_starts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    pauses: list[float] = []
    # Of this module alone: threads of other tests may sleep meanwhile.
    monkeypatch.setattr(recovery, "time", SimpleNamespace(sleep=pauses.append, perf_counter=perf_counter))
    before = _snapshot(folder)
    path = folder / name
    path.rename(tmp_path / "aside")
    path.mkdir()  # to read it fails with EISDIR
    with pytest.raises(OSError, match=f"^journal: {folder} cannot be read, and stays as it is: .* Is a directory"):
        journal_in(folder)
    assert {record.message for record in caplog.records} == {"journal read repeated"}
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6]
    path.rmdir()
    (tmp_path / "aside").rename(path)
    assert _snapshot(folder) == before
    assert not recovered(folder).dropped


@pytest.mark.usefixtures("repeats_once")
@pytest.mark.parametrize("shortage", SHORTAGES)
def test_a_lack_of_memory_is_a_read_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shortage: tuple[object, str, Exception]
) -> None:
    """It shows nothing about the files, which a server with more memory can read."""
    owner, name, error = shortage
    before = _snapshot(folder)

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(OSError, match=r"cannot be read, and stays as it is: .* Cannot allocate memory"):
        journal_in(folder)
    assert _snapshot(folder) == before


def test_a_creation_time_that_cannot_be_read_is_not_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(statx=fails))
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        file_id(tmp_path)
    number = errno.ENOSYS
    assert file_id(tmp_path) == f"{tmp_path.stat().st_ino}-0"


@pytest.mark.parametrize("kept_bytes", range(len(encode_frame(FrameKind.END, b"")) + 1))
def test_a_death_while_the_end_of_a_log_is_written_loses_nothing(
    folder: Path, restarted: DrivenState, kept_bytes: int
) -> None:
    size_bytes = (folder / "log-1").stat().st_size
    journal = journal_in(folder)
    journal.begin()
    kill(journal)
    os.truncate(folder / "log-1", size_bytes + kept_bytes)
    begin_and_die(folder)
    assert (folder / "log-1").read_bytes().endswith(encode_frame(FrameKind.END, b""))
    assert_recovers(folder, restarted)


def test_a_journal_that_was_moved_or_given_to_another_user_is_recovered(
    folder: Path, tmp_path: Path, states: list[DrivenState]
) -> None:
    for path in folder.iterdir():
        os.chown(path, os.getuid(), os.getgid())
        path.chmod(0o640)
    folder.rename(tmp_path / "moved")
    assert_recovers(tmp_path / "moved", states[-1])


def test_a_file_system_without_creation_times_identifies_files_by_inode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.wire.file_ids._birth_nanoseconds", lambda _: 0)
    folder = tmp_path / "journal"
    leave_journal(folder, CONFIG, SEED, COUNT)
    assert not recovered(folder).dropped
    _copy_over(Path(shutil.copytree(folder, tmp_path / "older")), folder)
    assert recovered(folder).dropped == "COPIED"


def test_a_log_that_lost_its_end_before_the_next_log_began_is_damage(folder: Path) -> None:
    """A cut between two frames of the first of two logs, at every place."""
    begin_and_die(folder)
    assert not recovered(folder).dropped
    content = (folder / "log-1").read_bytes()
    with (folder / "log-1").open("rb") as file:
        parser = FrameParser()
        ends = [parser.end for _ in parser.read(file)]
    assert ends[-1] == len(content)
    for end in ends[:-1]:
        (folder / "log-1").write_bytes(content[:end])
        assert_dropped(folder, "DAMAGED", "the end of the log before log-2 is missing")


def test_a_log_that_was_cut_is_ended_after_the_cut(folder: Path, restarted: DrivenState) -> None:
    with (folder / "log-1").open("ab") as file:
        file.write(b"half a frame"[:5])
    assert begin_and_die(folder).recovery.cut_bytes == 5
    assert_recovers(folder, restarted)


def test_another_version_reads_a_snapshot_but_replays_no_changes(folder: Path, restarted: DrivenState) -> None:
    newer = replace(WRITER, version="2")
    assert recovered(folder, newer).dropped == "OTHER_VERSION"
    journal = journal_in(folder)
    begin(journal)
    journal.close()
    found = recovered(folder, newer)
    assert not found.dropped
    assert_alike(restarted, found.state)


def test_pools_begin_above_the_epochs_of_removed_pools_of_a_dropped_journal(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    begin(journal)
    for name, epoch in ("high", 7), ("low", 3):
        driven(journal).create_pool(replace(CONFIG, name=PoolName(name)), b"n" * 32, epoch)
        driven(journal).remove_pool(name)
    kill(journal)
    (tmp_path / "snapshot-1").unlink()
    found = recovered(tmp_path)
    assert found.dropped
    assert not list(found.state.pools)
    assert found.state.pools.past_epoch == 7 + EPOCH_LEAP


def test_a_dropped_journal_restarts_above_its_epochs(folder: Path) -> None:
    (folder / "snapshot-1").unlink()
    assert_has_pools_only(assert_recovers(folder, begin_and_die(folder).state))


@pytest.mark.parametrize("size", [0, 3, 17, None])
def test_a_death_while_a_log_is_created_leaves_no_gap(folder: Path, restarted: DrivenState, size: int | None) -> None:
    (folder / "log-2").write_bytes(_header("log-2", "1-1")[:size])
    begin_and_die(folder)
    assert_recovers(folder, restarted)


OTHER_FORMATS = {
    "older format of kvpool 0.1": OF_0_1,
    f"older format {FORMAT - 1}": encode_frame(FrameKind.HEADER, dumps({"format": FORMAT - 1})),
    f"newer format {FORMAT + 1}": replace(HEADER, format=FORMAT + 1).encode(),
}
"""What the error calls a file that begins with a header, which may have other fields."""


@pytest.mark.parametrize("name", ["snapshot-1", "log-1"])
@pytest.mark.parametrize("called", OTHER_FORMATS)
def test_a_file_of_another_format_is_not_called_damaged(folder: Path, name: str, called: str) -> None:
    (folder / name).write_bytes(OTHER_FORMATS[called] + b"content")
    assert_dropped(folder, "OTHER_FORMAT", f"{name} has the {called}, and this version reads format {FORMAT}")


def test_the_list_of_pools_is_read_by_releases_with_another_log_format(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.server.journal.folder.FORMAT", FORMAT + 1)
    found = recovered(folder)
    assert found.dropped == "OTHER_FORMAT"
    assert [(pool.config.name, pool.epoch) for pool in found.state.pools] == [(CONFIG.name, 1 + EPOCH_LEAP)]
