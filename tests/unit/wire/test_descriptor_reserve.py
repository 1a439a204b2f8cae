"""Descriptors that are kept for files that must be opened."""

import contextlib
import os

from kvpool.wire.descriptor_reserve import DescriptorReserve
from support.open_files import no_free_files


def num_free_files() -> int:
    files: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    for file in files:
        os.close(file)
    return len(files)


def test_as_many_files_can_be_opened_as_are_reserved() -> None:
    reserve = DescriptorReserve(3)
    with no_free_files():
        for _ in range(3):
            assert num_free_files() == 0
            with reserve.released():
                assert num_free_files() == 3
        assert num_free_files() == 0
    reserve.close()


def test_a_reserve_that_lost_descriptors_takes_them_when_they_are_free() -> None:
    reserve = DescriptorReserve(2)
    with no_free_files():
        with reserve.released():
            file = os.open(os.devnull, os.O_RDONLY)
        os.close(file)
        assert num_free_files() == 1
        reserve.fill()
        assert num_free_files() == 0
        with reserve.released():
            assert num_free_files() == 2
    reserve.close()


def test_a_reserve_that_is_closed_or_forgotten_holds_nothing() -> None:
    reserve, other = DescriptorReserve(2), DescriptorReserve(2)
    with no_free_files():
        reserve.close()
        assert num_free_files() == 2
        del other
        assert num_free_files() == 4
