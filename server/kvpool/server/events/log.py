"""Event logs that asyncio tasks wait for, and the logs of all pools of a server.

1. A closed log is read to its end. Then its watchers get the error that it was closed with.
2. A log that follows a closed log of the same name has higher numbers, so that no watcher confuses the two.
"""

import asyncio
import time
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import KvpoolError
from kvpool.core.ids import PoolName
from kvpool.core.views.event_log import KEPT_BATCHES, KEPT_BYTES, EventLog, LoggedBatch

KEPT_NAMES: Final = 4096


class LiveEventLog(EventLog):
    """An event log that tasks of one event loop wait for."""

    def __init__(self, kept_batches: int = KEPT_BATCHES, kept_bytes: int = KEPT_BYTES, past_sequence: int = 0) -> None:
        super().__init__(kept_batches, kept_bytes, past_sequence)
        self._news = asyncio.Event()
        self._closed_by: KvpoolError | None = None

    def publish(self, pool: KVCacheManager) -> None:
        """Adds the events of a pool's last change, if there are any, and wakes the watchers."""
        if self.take_from(pool, time.time()):
            self._wake()

    def close(self, error: KvpoolError) -> None:
        """Ends the watches with `error` once they have read all batches; nothing is added after that."""
        self._closed_by = error
        self._wake()

    async def wait(self, sequence: int) -> None:
        """Waits until there is a batch `sequence`.

        Raises:
            KvpoolError: The log was closed with this error before such a batch.
        """
        while sequence > self.last_sequence:
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

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class EventLogs:
    """The event logs of a server's pools.

    Args:
        kept_names: Of how many names, of the pools that were removed, the newest number is remembered; of the others it
            is known what it was at most.
    """

    def __init__(self, kept_names: int = KEPT_NAMES) -> None:
        self._logs: dict[PoolName, LiveEventLog] = {}
        self._past_sequences: dict[PoolName, int] = {}
        self._max_names = kept_names
        self._forgotten_sequence = 0

    def __getitem__(self, name: PoolName) -> LiveEventLog:
        return self._logs[name]

    def open(self, name: PoolName) -> LiveEventLog:
        """Finds the log of a pool, or begins it."""
        if name not in self._logs:
            past_sequence = self._past_sequences.pop(name, self._forgotten_sequence)
            self._logs[name] = LiveEventLog(past_sequence=past_sequence)
        return self._logs[name]

    def close(self, name: PoolName, error: KvpoolError) -> None:
        """Closes the log of a pool that was removed; see `LiveEventLog.close`."""
        log = self._logs.pop(name)
        self._past_sequences[name] = log.last_sequence + 1  # one that no watcher can go on from
        if len(self._past_sequences) > self._max_names:
            sequence = self._past_sequences.pop(next(iter(self._past_sequences)))
            self._forgotten_sequence = max(self._forgotten_sequence, sequence)
        log.close(error)
