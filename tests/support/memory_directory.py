"""A directory in memory, for several servers in one event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from enum import Enum
from functools import partial
from typing import TypeVar

from kvpool.server.cluster.directory import DirectoryError, ShardRecord, SwapResult, VersionedRecord

_T = TypeVar("_T")


class Fate(Enum):
    """What becomes of a write whose outcome is unknown to its sender."""

    APPLIED = "it took effect"
    DROPPED = "it did not"


class Store:
    """The record of a shard.

    Args:
        written: Called with each record that is written, and the one that it replaces.

    Attributes:
        entry: The entry, after a deletion with its revision, as a watch yields it.
        history: Every record that was written.
    """

    def __init__(self, written: Callable[[ShardRecord | None, ShardRecord], None] = lambda *_: None) -> None:
        self.entry = VersionedRecord(0, None)
        self.history: list[ShardRecord] = []
        self.changed = asyncio.Event()
        """Set, and replaced, with each change."""
        self._written = written

    def get(self) -> VersionedRecord:
        """The entry; without a record it has no revision."""
        return self.entry if self.entry.record else VersionedRecord(0, None)

    def put(self, record: ShardRecord) -> None:
        """Writes a record, as an operator could."""
        before, self.entry = self.entry, VersionedRecord(self.entry.revision + 1, record)
        self.history.append(record)
        self._written(before.record, record)
        self.notify()

    def notify(self) -> None:
        """Wakes the watches."""
        self.changed.set()
        self.changed = asyncio.Event()

    def swap(self, revision: int, record: ShardRecord) -> SwapResult:
        """Writes a record if the entry has this revision."""
        if revision != self.get().revision:
            return SwapResult(won=False, entry=self.get())
        self.put(record)
        return SwapResult(won=True, entry=self.get())

    def delete(self) -> None:
        """Deletes a record, as an operator could."""
        self.entry = VersionedRecord(self.entry.revision + 1, None)
        self.notify()


class MemoryDirectory:
    """One server's connection to a store; see `Directory`.

    Args:
        store: The records.

    Attributes:
        fates: What becomes of the next swaps, all with unknown outcome; those after them have known ones.
    """

    def __init__(self, store: Store) -> None:
        self.fates: deque[Fate] = deque()
        self._store = store
        self._is_up = True

    @property
    def is_up(self) -> bool:
        """Whether calls are answered. A watch waits while they are not."""
        return self._is_up

    @is_up.setter
    def is_up(self, is_up: bool) -> None:
        self._is_up = is_up
        self._store.notify()

    async def get(self) -> VersionedRecord:
        """See `Directory`."""
        return await self._request(self._store.get)

    async def compare_and_swap(self, revision: int, record: ShardRecord) -> SwapResult:
        """See `Directory`."""
        fate = self.fates.popleft() if self.fates else None
        if fate is Fate.DROPPED:
            raise DirectoryError(f"no answer: {fate.value}")
        result = await self._request(partial(self._store.swap, revision, record))
        if fate:
            raise DirectoryError(f"no answer: {fate.value}")
        return result

    async def watch(self) -> AsyncIterator[VersionedRecord]:
        """See `Directory`."""
        seen = -1
        while True:
            changed = self._store.changed
            if self._is_up:
                entry = await self._request(lambda: self._store.entry)
                if entry.revision > seen:
                    seen = entry.revision
                    yield entry
            await changed.wait()

    async def close(self) -> None:
        """See `Directory`."""
        self._is_up = False

    async def _request(self, request: Callable[[], _T]) -> _T:
        """Executes a request at the store."""
        if not self._is_up:
            raise DirectoryError("down")
        return request()
