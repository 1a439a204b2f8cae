"""Tests of lending/memory_folder.py."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.core.errors import ExhaustedError, InvalidArgumentError, WrongStateError
from kvpool.core.ranks.messages import HeldTensors
from kvpool.lending import memory_folder
from kvpool.lending.memory_file import close_all
from kvpool.lending.memory_folder import MemoryFolder, PastBorrower
from support.ranks import registration

PAST = PastBorrower(5, 100, "id", "engine", ((7, 1), (7, 2)))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[MemoryFolder]:
    with MemoryFolder("m", 0, tmp_path) as folder:
        yield folder


def test_memory_is_found_again_unless_another_file_has_its_name(
    folder: MemoryFolder, caplog: pytest.LogCaptureFixture
) -> None:
    os.close(*folder.create(4096))
    folder.write_rank("m", replace(registration(), held=HeldTensors(7, 100)))
    found = folder.read_rank()
    assert found
    assert found.held == HeldTensors(7, 100)
    file, other = folder.path / "memory-1", folder.path / "copy"
    shutil.copy2(file, other)
    other.rename(file)
    assert folder.read_rank() is None
    assert "holds other memory" in vars(caplog.records[0])["error"]


@pytest.mark.parametrize("change", ["replaced", "deleted", "added"])
def test_neither_memory_is_found_again_if_the_host_memory_has_changed(folder: MemoryFolder, change: str) -> None:
    close_all(folder.create(4096, 0 if change == "added" else 8192))
    folder.write_rank("m", replace(registration(), held=HeldTensors(7, 100)))
    assert folder.read_rank()
    file, other = folder.path / "host-1", folder.path / "copy"
    other.write_bytes(bytes(8192))
    if change == "deleted":
        file.unlink()
    else:
        other.rename(file)
    assert folder.read_rank() is None


def test_host_memory_is_another_file_of_each_allocation(tmp_path: Path) -> None:
    with MemoryFolder("m", 0, tmp_path) as folder:
        first = folder.create(4096, 8192)
        assert [os.fstat(number).st_size for number in first] == [4096, 8192]
        assert [path.name for path in sorted(folder.path.glob("*-*"))] == ["host-1", "memory-1"]
        memory_id = folder.memory_id(first)
        close_all(first)
    with MemoryFolder("m", 0, tmp_path) as successor:
        found = successor.open()
        assert successor.memory_id(found) == memory_id
        successor.delete()
        assert not list(folder.path.glob("*-*"))
        second = successor.create(4096, 4096)
        assert not set(successor.memory_id(second).split()) & set(memory_id.split()), "as both are open"
        close_all((*found, *second))


def test_memory_without_a_file_is_not_found_again(folder: MemoryFolder) -> None:
    os.close(*folder.create(4096))
    shutil.rmtree(folder.path)
    folder.write_rank("m", replace(registration(), held=HeldTensors(7, 100)))
    assert folder.read_rank() is None


@pytest.mark.parametrize("name", ["kvpool-{}", "kvpool-{}/m", "kvpool-{}/m/0"])
def test_a_file_in_place_of_a_folder_is_an_error_that_names_the_option(tmp_path: Path, name: str) -> None:
    path = tmp_path / name.format(os.getuid())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a file of somebody")
    with pytest.raises(
        InvalidArgumentError, match=f"cannot use {re.escape(str(path))}.*: it is not a folder"
    ) as caught:
        MemoryFolder("m", 0, tmp_path)
    assert caught.value.field == "lend_folder"
    assert path.read_text() == "a file of somebody"


def test_processes_are_read_as_they_were_written(folder: MemoryFolder) -> None:
    assert folder.read_borrowers() == []
    folder.write_borrowers([PAST])
    assert folder.read_borrowers() == [PAST]


ADDED = replace(PAST, sessions=((7, 8), (7, 9)))


def with_added(*added: PastBorrower) -> PastBorrower:
    return replace(PAST, sessions=sum((each.sessions for each in added), PAST.sessions))


def test_sessions_are_added_to_the_list_of_processes(folder: MemoryFolder) -> None:
    other = replace(PAST, client_id="other", sessions=())
    folder.write_borrowers([other, PAST])
    folder.add_sessions(ADDED)
    folder.add_sessions(replace(other, sessions=((7, 10),)))
    folder.add_sessions(ADDED)
    assert folder.read_borrowers() == [replace(other, sessions=((7, 10),)), with_added(ADDED, ADDED)]
    folder.write_borrowers([PAST])
    assert folder.read_borrowers() == [PAST]


def test_an_addition_that_was_cut_off_counts_for_nothing_and_nothing_follows_it(folder: MemoryFolder) -> None:
    file = folder.path / "borrowers"
    folder.write_borrowers([PAST])
    num_bytes = file.stat().st_size
    folder.add_sessions(ADDED)
    whole = file.read_bytes()
    for size_bytes in range(num_bytes, len(whole)):
        file.write_bytes(whole[:size_bytes])
        assert folder.read_borrowers() == [PAST]
        if size_bytes > num_bytes:
            with pytest.raises(OSError, match="has no end"):
                folder.add_sessions(ADDED)
            assert file.read_bytes() == whole[:size_bytes]


@pytest.mark.parametrize("content", [None, b""], ids=["no list", "an empty one"])
def test_sessions_are_added_to_no_list_that_is_not_there(folder: MemoryFolder, content: bytes | None) -> None:
    file = folder.path / "borrowers"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OSError, match=r"No such file|Invalid argument"):
        folder.add_sessions(ADDED)
    assert not file.exists() or file.read_bytes() == content


def test_a_damaged_addition_is_refused(folder: MemoryFolder) -> None:
    folder.write_borrowers([PAST])
    folder.add_sessions(ADDED)
    file = folder.path / "borrowers"
    file.write_bytes(file.read_bytes() + b"{}\n")
    with pytest.raises(InvalidArgumentError, match="is damaged"):
        folder.read_borrowers()


def test_processes_of_another_namespace_of_process_ids_are_not_mistaken_for_others(folder: MemoryFolder) -> None:
    file = folder.path / "borrowers"
    folder.write_borrowers([PAST])
    content = json.loads(file.read_bytes())
    file.write_text(json.dumps({**content, "pid_namespace": content["pid_namespace"] + 1}))
    with pytest.raises(WrongStateError) as caught:
        folder.read_borrowers()
    assert caught.value.reason == "OTHER_PID_NAMESPACE"
    file.write_text(json.dumps({**content, "pid_namespace": 1, "processes": []}))
    assert folder.read_borrowers() == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pid_namespace": 1, "processes": [{"pid": 1}]}'])
def test_a_damaged_list_of_processes_is_refused(folder: MemoryFolder, content: str) -> None:
    (folder.path / "borrowers").write_text(content)
    with pytest.raises(InvalidArgumentError, match="is damaged"):
        folder.read_borrowers()


def test_memory_that_does_not_fit_leaves_no_file(folder: MemoryFolder) -> None:
    with pytest.raises(MemoryError, match="bytes do not fit"):
        folder.create(2**62)
    assert not list(folder.path.glob("memory-*"))


@pytest.mark.parametrize(("left_bytes", "error"), [(4095, MemoryError), (8191, ExhaustedError)])
def test_no_file_is_written_without_room_for_both(
    folder: MemoryFolder, monkeypatch: pytest.MonkeyPatch, left_bytes: int, error: type[Exception]
) -> None:
    monkeypatch.setattr(memory_folder, "free_bytes", lambda _: left_bytes)
    monkeypatch.setattr(memory_folder, "allocate_pages", lambda *_: pytest.fail("a file was written"))
    with pytest.raises(
        error, match=f"4096 bytes do not fit {folder.path}: its file system has {left_bytes} bytes"
    ) as caught:
        folder.create(4096, 4096)
    assert getattr(caught.value, "field", "") == ("host_memory" if error is ExhaustedError else "")
    assert not list(folder.path.glob("*-*"))


def test_host_memory_that_does_not_fit_after_all_leaves_no_file(
    folder: MemoryFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_host(_: int, size_bytes: int) -> None:
        if size_bytes == 8192:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory_folder, "allocate_pages", fail_at_host)
    with pytest.raises(ExhaustedError, match=r"8192 bytes do not fit .*: No space left") as caught:
        folder.create(4096, 8192)
    assert (caught.value.reason, caught.value.field) == ("OUT_OF_MEMORY", "host_memory")
    assert not list(folder.path.glob("*-*"))


def test_one_process_holds_the_folder_of_a_rank(folder: MemoryFolder, tmp_path: Path) -> None:
    assert (folder.path / "lock").exists()
    with pytest.raises(WrongStateError, match="another process lends rank 0 of pool 'm'") as caught:
        MemoryFolder("m", 0, tmp_path)
    assert caught.value.reason == "RANK_TAKEN"
    MemoryFolder("m", 1, tmp_path).close()


def test_a_folder_that_somebody_deleted_is_made_and_locked_again(
    folder: MemoryFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.close(*folder.create(4096))
    shutil.rmtree(folder.path.parents[1])
    folder.write_borrowers([PAST])
    assert folder.read_borrowers() == [PAST]
    with pytest.raises(WrongStateError):
        MemoryFolder("m", 0, tmp_path)
    assert [record.message for record in caplog.records] == ["memory folder deleted"]
    shutil.rmtree(folder.path.parents[1])
    os.close(*folder.create(4096))
    assert [path.name for path in folder.path.glob("memory-*")] == ["memory-2"]
    (folder.path / "lock").unlink()
    folder.delete()
    assert not list(folder.path.glob("memory-*"))


def test_a_folder_that_another_process_has_taken_meanwhile_is_left_to_it(folder: MemoryFolder, tmp_path: Path) -> None:
    shutil.rmtree(folder.path)
    with MemoryFolder("m", 0, tmp_path) as taken:
        with pytest.raises(OSError, match="another process lends this rank"):
            folder.write_borrowers([PAST])
        with pytest.raises(MemoryError, match="another process lends this rank"):
            folder.create(4096)
        assert taken.read_borrowers() == []
        os.close(*taken.create(4096))
        folder.delete()
        assert [path.name for path in taken.path.glob("memory-*")] == ["memory-1"]
