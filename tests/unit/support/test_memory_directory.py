"""The directory in memory keeps the promises of `Directory`."""

import asyncio

import pytest

from kvpool.server.cluster.directory import Directory, DirectoryError, VersionedRecord
from support.directory import record_of as record
from support.memory_directory import Fate, MemoryDirectory, Store


async def test_a_record_changes_at_the_revision_that_was_read() -> None:
    directory: Directory = MemoryDirectory(Store())
    assert await directory.get() == VersionedRecord(0, None)
    first = await directory.compare_and_swap(0, record(1))
    assert (first.won, first.entry) == (True, VersionedRecord(1, record(1)))
    lost = await directory.compare_and_swap(0, record(2))
    assert (lost.won, lost.entry) == (False, VersionedRecord(1, record(1)))


@pytest.mark.parametrize("fate", Fate)
async def test_a_swap_of_unknown_outcome_took_effect_or_not(fate: Fate) -> None:
    directory = MemoryDirectory(Store())
    directory.fates.append(fate)
    with pytest.raises(DirectoryError):
        await directory.compare_and_swap(0, record(1))
    assert (await directory.get()).revision == (1 if fate is Fate.APPLIED else 0)


async def test_a_directory_that_is_down_answers_nothing_and_its_watch_waits() -> None:
    store = Store()
    directory, other = MemoryDirectory(store), MemoryDirectory(store)
    watch = directory.watch()
    assert await anext(watch) == VersionedRecord(0, None)
    directory.is_up = False
    with pytest.raises(DirectoryError):
        await directory.get()
    with pytest.raises(DirectoryError):
        await directory.compare_and_swap(0, record(1))
    await other.compare_and_swap(0, record(1))
    await other.compare_and_swap(1, record(2))
    change = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    assert not change.done()
    directory.is_up = True
    assert await change == VersionedRecord(2, record(2))


async def test_a_deletion_has_a_revision() -> None:
    store = Store()
    directory = MemoryDirectory(store)
    await directory.compare_and_swap(0, record(1))
    watch = directory.watch()
    assert await anext(watch) == VersionedRecord(1, record(1))
    store.delete()
    assert await directory.get() == VersionedRecord(0, None)
    assert await anext(watch) == VersionedRecord(2, None)
    assert (await directory.compare_and_swap(0, record(1))).entry == VersionedRecord(3, record(1))
    assert await anext(watch) == VersionedRecord(3, record(1))
