"""Descriptors that are kept for files that must be opened."""

import os

import pytest

from kvpool.wire.descriptor_reserve import DescriptorReserve, has_free_files
from support.open_files import no_free_files


def opened(num_files: int) -> list[int]:
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(num_files)]


def test_as_many_files_can_be_opened_as_are_reserved() -> None:
    reserve = DescriptorReserve(3)
    with no_free_files():
        assert not has_free_files(1)
        with pytest.raises(OSError, match="Too many open files"):
            opened(1)
        for _ in range(3):
            with reserve.released():
                files = opened(3)
                for file in files:
                    os.close(file)
        assert reserve.fill()
    reserve.close()


def test_a_reserve_that_lost_descriptors_takes_them_when_they_are_free() -> None:
    reserve = DescriptorReserve(2)
    with no_free_files():
        with reserve.released():
            (file,) = opened(1)
        assert not reserve.fill()
        os.close(file)
        assert reserve.fill()
    reserve.close()


def test_a_reserve_that_is_closed_or_forgotten_holds_nothing() -> None:
    reserve, other = DescriptorReserve(2), DescriptorReserve(2)
    with no_free_files():
        reserve.close()
        assert has_free_files(2)
        del other
        assert has_free_files(4)
        assert not has_free_files(5)
