"""Tests of lending/memory_file.py."""

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpool.lending import memory_file
from kvpool.lending.memory_file import allocate_pages, close_all, free_bytes, open_all
from support.small_file_system import small_file_system

SIZE_BYTES = 3 * 2**20 + 100


@pytest.fixture
def descriptor() -> Iterator[int]:
    number = os.memfd_create("memory")
    yield number
    os.close(number)


def has_all_pages(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return status.st_size == SIZE_BYTES <= status.st_blocks * 512


def test_each_thread_allocates_some_ranges(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_file, "_RANGE_BYTES", 2**20)
    allocate_pages(descriptor, SIZE_BYTES)
    assert has_all_pages(descriptor)
    assert os.pread(descriptor, SIZE_BYTES, 0) == bytes(SIZE_BYTES)


def test_an_older_kernel_allocates_them_too(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_file, "_MADV_POPULATE_WRITE", 1234)
    allocate_pages(descriptor, SIZE_BYTES)
    assert has_all_pages(descriptor)


@pytest.mark.parametrize(
    ("number", "reported"), [(errno.EFAULT, errno.ENOSPC), (errno.ENOMEM, errno.ENOMEM)], ids=["full", "no memory"]
)
def test_pages_that_do_not_fit_are_an_error(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, number: int, reported: int
) -> None:
    def fail(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(memory_file, "_madvise", fail)
    with pytest.raises(OSError, match=os.strerror(reported)) as caught:
        allocate_pages(descriptor, SIZE_BYTES)
    assert caught.value.errno == reported


def test_a_full_file_system_ends_no_process() -> None:
    with small_file_system(2**20) as folder, (folder / "memory").open("w+b") as file:
        assert free_bytes(folder) == 2**20
        with pytest.raises(OSError, match="No space left on device"):
            allocate_pages(file.fileno(), SIZE_BYTES)


def test_a_file_system_without_a_limit_has_no_number_of_free_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096))
    assert free_bytes(Path("/")) is None


def test_files_are_opened_all_or_none(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    paths[0].touch()
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(FileNotFoundError):
        open_all(paths)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    paths[1].touch()
    descriptors = open_all(paths)
    assert [os.path.realpath(f"/proc/self/fd/{number}") for number in descriptors] == [*map(str, paths)]
    close_all(descriptors)
