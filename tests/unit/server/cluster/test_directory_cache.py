"""What a server knows of its cluster from the changes of the directory."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvpool.core.errors import NotFoundError, UnavailableError
from kvpool.core.ids import PoolName
from kvpool.server.cluster.directory import Changes, DirectoryError, ShardName, VersionedRecord
from kvpool.server.cluster.directory_cache import DirectoryCache
from support.directory import record_of

A, B = ShardName("a"), ShardName("b")
P, Q = PoolName("p"), PoolName("q")
ONE, TWO = record_of(1, "m"), record_of(2, "n")


def view_of(*changes: Changes) -> DirectoryCache:
    view = DirectoryCache()
    for each in changes:
        view.take(each)
    return view


WHOLE = Changes(is_whole=True, shards={A: VersionedRecord(1, ONE), B: VersionedRecord(2, ONE)}, pools={P: A, Q: A})


def test_nothing_is_known_before_the_directory_was_read() -> None:
    with pytest.raises(UnavailableError) as caught:
        view_of().shard_of(P)
    assert caught.value.reason == "DIRECTORY_UNKNOWN"


def test_the_whole_directory() -> None:
    view = view_of(WHOLE)
    assert view.shards == {A: ONE, B: ONE}
    assert (view.shard_of(P), view.num_pools[A], view.num_pools[B]) == (A, 2, 0)
    with pytest.raises(NotFoundError) as caught:
        view.shard_of("r")
    assert (caught.value.reason, caught.value.field) == ("POOL_NOT_FOUND", "pool_name")


def test_changes_are_taken_one_by_one() -> None:
    changes = Changes(
        is_whole=False, shards={A: VersionedRecord(3, TWO), B: VersionedRecord(4, None)}, pools={P: None, Q: B}
    )
    view = view_of(WHOLE, changes, changes)
    assert view.shards == {A: TWO}
    assert view.pools == {Q: B}
    assert (view.num_pools[A], view.num_pools[B]) == (0, 1)


def test_a_whole_directory_replaces_what_was_known() -> None:
    view = view_of(WHOLE, Changes(is_whole=True, shards={B: VersionedRecord(5, TWO)}, pools={}))
    assert (view.shards, view.pools, view.num_pools[A]) == ({B: TWO}, {}, 0)


class _FailingDirectory:
    """A directory that fails once, then shows `WHOLE`."""

    def __init__(self) -> None:
        self.errors = [DirectoryError("down")]
        self.shown = asyncio.Event()

    async def watch_all(self) -> AsyncIterator[Changes]:
        if self.errors:
            raise self.errors.pop()
        yield WHOLE
        self.shown.set()


async def test_an_error_of_the_directory_is_known_until_it_is_read() -> None:
    view, directory = DirectoryCache(), _FailingDirectory()
    following = asyncio.create_task(view.follow(directory))  # type: ignore[arg-type]  # of which it uses one method
    async with asyncio.timeout(60):
        while not view.error:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
        assert view.error == "down"
        await directory.shown.wait()
    assert not view.error
    following.cancel()
