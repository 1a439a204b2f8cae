"""Event logs that asyncio tasks wait for, and the logs of all pools of a server.

1. Watchers read a closed log to its end, and then get the error that it was closed with.
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
    """An event log whose new batches tasks of one event loop can wait for."""

    def __init__(self, kept_batches: int = KEPT_BATCHES, kept_bytes: int = KEPT_BYTES, past_sequence: int = 0) -> None:
        super().__init__(kept_batches, kept_bytes, past_sequence)
        self._changed = asyncio.Event()
        self._closed_by: KvpoolError | None = None

    def publish(self, pool: KVCacheManager) -> None:
        """Adds the events of a pool's last change, if there are any, and wakes the watchers."""
        if self.take_from(pool, time.time()):
            self._wake()

    def close(self, error: KvpoolError) -> None:
        """Ends the watches with `error` after they have read all batches. Nothing is added after that."""
        self._closed_by = error
        self._wake()

    async def get(self, sequence: int) -> LoggedBatch:
        """Waits for batch `sequence` and returns it.

        Raises:
            WrongStateError: It is no longer kept.
            KvpoolError: The log was closed with this error before such a batch.
        """
        while sequence > self.last_sequence:
            if self._closed_by:
                raise self._closed_by
            await self._changed.wait()
        return self.kept(sequence)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class EventLogs:
    """The event logs of a server's pools.

    Args:
        kept_bytes: See `EventLog`, for each log.
        kept_names: Number of removed pools whose newest batch number is remembered by name. For all older ones only the
            maximum is kept.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES, kept_names: int = KEPT_NAMES) -> None:
        self._logs: dict[PoolName, LiveEventLog] = {}
        self._past_sequences: dict[PoolName, int] = {}
        self._max_names = kept_names
        self._kept_bytes = kept_bytes
        self._forgotten_sequence = 0

    def __contains__(self, name: PoolName) -> bool:
        return name in self._logs

    def __getitem__(self, name: PoolName) -> LiveEventLog:
        return self._logs[name]

    def open(self, pool: KVCacheManager) -> LiveEventLog:
        """Returns the log of a pool, and creates it on first use."""
        name = pool.config.name
        if name not in self._logs:
            past_sequence = self._past_sequences.pop(name, self._forgotten_sequence)
            self._logs[name] = LiveEventLog(kept_bytes=self._kept_bytes, past_sequence=past_sequence)
        return self._logs[name]

    def publish(self, pool: KVCacheManager) -> None:
        """Adds the events of a pool's last change to its log."""
        if pool.blocks.contents:  # the pool makes events
            self._logs[pool.config.name].publish(pool)

    def close(self, name: PoolName, error: KvpoolError) -> None:
        """Closes the log of a pool that was removed; see `LiveEventLog.close`."""
        log = self._logs.pop(name)
        self._past_sequences[name] = log.last_sequence + 1  # a number that no watcher can continue from
        if len(self._past_sequences) > self._max_names:
            sequence = self._past_sequences.pop(next(iter(self._past_sequences)))
            self._forgotten_sequence = max(self._forgotten_sequence, sequence)
        log.close(error)
