"""The newest block events of a pool, numbered, for any number of watchers at their own pace.

1. Batches are numbered without gaps, from 1, or where the pool was removed and made anew from above those before; one
   batch holds the events of one change.
2. The newest batches are kept, bounded by number and by memory. A watcher reads from the log itself, so a slow one
   costs nothing; if what it wants next is no longer kept, it is told.
3. A log that is closed is read to its end; then its watchers are told why.
4. What comes after a closed log of its name has higher numbers, so that no watcher of that one takes it for the same.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.server.core.config import PoolConfig
from kvpool.server.core.errors import InvalidArgumentError, KvpoolError, WrongStateError
from kvpool.server.core.events import BlockEvent, BlockStored
from kvpool.server.core.pool import Pool
from kvpool.server.core.types import PoolName

KEPT_BATCHES: Final = 10_000
KEPT_BYTES: Final = 256 * 1024 * 1024
KEPT_NAMES: Final = 4096
_HASH_BYTES: Final = 72
_EVENT_BYTES: Final = 400


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """The events of one change of a pool.

    Attributes:
        sequence: Its number.
        events: The events, in order; at least one.
        time_seconds: When, in seconds since 1970.
        epoch: The pool's epoch after the change.
        config: The pool's configuration likewise.
    """

    sequence: int
    events: Sequence[BlockEvent]
    time_seconds: float
    epoch: int
    config: PoolConfig


class EventLog:
    """The events of one pool. Belongs to one event loop.

    Args:
        kept_batches: Most batches that are kept.
        kept_bytes: Most memory that they take, about; the newest is kept in any case.
        past_sequence: A number that no watcher of the pool can have asked for yet, if there were others of its name.
    """

    def __init__(self, kept_batches: int = KEPT_BATCHES, kept_bytes: int = KEPT_BYTES, past_sequence: int = 0) -> None:
        self._batches: deque[LoggedBatch] = deque()
        self._max_batches, self._max_bytes = kept_batches, kept_bytes
        self._size_bytes = 0
        self._last = past_sequence
        self._news = asyncio.Event()
        self._closed_by: KvpoolError | None = None

    @property
    def last_sequence(self) -> int:
        """Number of the newest batch; of none if there was none yet."""
        return self._last

    def take_from(self, pool: Pool) -> None:
        """Adds the events that a pool made with its last change, if there are any, and wakes the watchers."""
        events = pool.blocks.take_events()
        if not events:
            return
        self._last += 1
        self._batches.append(LoggedBatch(self._last, events, time.time(), pool.epoch, pool.config))
        self._size_bytes += _size_bytes(events)
        while len(self._batches) > self._max_batches or (self._size_bytes > self._max_bytes and len(self._batches) > 1):
            self._size_bytes -= _size_bytes(self._batches.popleft().events)
        self._tell()

    def close(self, error: KvpoolError) -> None:
        """Ends the watches with `error` once they have read what there is; nothing is added any more."""
        self._closed_by = error
        self._tell()

    def check_start(self, sequence: int) -> None:
        """Checks that a watch can start with batch `sequence`.

        Raises:
            InvalidArgumentError: It is further ahead than the next batch.
            WrongStateError: It is no longer kept.
        """
        if sequence > self._last + 1:
            raise InvalidArgumentError("from_sequence", f"{sequence} does not exist yet, {self._last + 1} is next")
        if sequence <= self._last - len(self._batches):
            raise WrongStateError(
                "EVENTS_NOT_KEPT",
                f"batch {sequence} is no longer kept, {self._last - len(self._batches) + 1} is the oldest",
                field="from_sequence",
            )

    async def wait(self, sequence: int) -> None:
        """Waits until there is a batch `sequence`.

        Raises:
            KvpoolError: There will never be: what the log was closed with.
        """
        while sequence > self._last:
            if self._closed_by:
                raise self._closed_by
            await self._news.wait()

    async def get(self, sequence: int) -> LoggedBatch:
        """Waits for batch `sequence` and returns it.

        Raises:
            WrongStateError: It is no longer kept.
            KvpoolError: As `wait`.
        """
        await self.wait(sequence)
        return self.kept(sequence)

    def kept(self, sequence: int) -> LoggedBatch:
        """Returns batch `sequence`, which exists.

        Raises:
            WrongStateError: It is no longer kept.
        """
        self.check_start(sequence)
        return self._batches[sequence - self._last - 1]

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class EventLogs:
    """The event logs of a server's pools.

    Args:
        kept_names: Of how many names, of the pools that were removed, the newest number is remembered; of the others it
            is known what it was at most.
    """

    def __init__(self, kept_names: int = KEPT_NAMES) -> None:
        self._logs: dict[PoolName, EventLog] = {}
        self._past_sequences: dict[PoolName, int] = {}
        self._max_names = kept_names
        self._forgotten_sequence = 0

    def __getitem__(self, name: PoolName) -> EventLog:
        return self._logs[name]

    def open(self, name: PoolName) -> EventLog:
        """Finds the log of a pool, or begins it."""
        if name not in self._logs:
            past_sequence = self._past_sequences.pop(name, self._forgotten_sequence)
            self._logs[name] = EventLog(past_sequence=past_sequence)
        return self._logs[name]

    def close(self, name: PoolName, error: KvpoolError) -> None:
        """Closes the log of a pool that was removed; see `EventLog.close`."""
        log = self._logs.pop(name)
        self._past_sequences[name] = log.last_sequence + 1  # one that no watcher can go on from
        if len(self._past_sequences) > self._max_names:
            sequence = self._past_sequences.pop(next(iter(self._past_sequences)))
            self._forgotten_sequence = max(self._forgotten_sequence, sequence)
        log.close(error)


def _size_bytes(events: Sequence[BlockEvent]) -> int:
    """About how much memory a batch takes. O(events)."""
    stored = [event for event in events if isinstance(event, BlockStored)]
    tokens_bytes = sum(len(event.token_ids) * event.token_ids.itemsize for event in stored)
    return tokens_bytes + sum(len(event.block_hashes) for event in stored) * _HASH_BYTES + len(events) * _EVENT_BYTES
