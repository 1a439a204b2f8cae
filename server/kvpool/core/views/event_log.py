"""The newest block events of a pool, numbered, for any number of watchers that each read at their own pace.

1. Batches are numbered without gaps, from 1. A log that follows one of the same name starts above its numbers. One
   batch holds the events of one change.
2. The log keeps the newest batches, bounded by count and by memory. A watcher reads from the log itself, so a slow
   watcher costs nothing. A watcher that requests a batch that is no longer kept gets an error.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import InvalidArgumentError, WrongStateError
from kvpool.core.events import BlockEvent, BlockStored
from kvpool.core.specs.pool_config import PoolConfig

KEPT_BATCHES: Final = 10_000
KEPT_BYTES: Final = 256 * 1024 * 1024
_HASH_BYTES: Final = 72
_EVENT_BYTES: Final = 400


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """The events of one change of a pool.

    Attributes:
        sequence: Number of the batch.
        events: The events, in order; at least one.
        time_seconds: Time of the change, in seconds since 1970.
        epoch: The pool's epoch after the change.
        config: The pool's configuration after the change.
    """

    sequence: int
    events: Sequence[BlockEvent]
    time_seconds: float
    epoch: int
    config: PoolConfig


class EventLog:
    """The events of one pool.

    Args:
        kept_batches: Maximum number of batches kept.
        kept_bytes: Approximate maximum memory of the batches kept; the newest batch is always kept.
        past_sequence: A number that no watcher can have requested yet, if a pool of the same name existed before.

    Attributes:
        last_sequence: Number of the newest batch, or the number before the first batch. Read-only.
    """

    def __init__(self, kept_batches: int = KEPT_BATCHES, kept_bytes: int = KEPT_BYTES, past_sequence: int = 0) -> None:
        self._batches: deque[LoggedBatch] = deque()
        self._max_batches, self._max_bytes = kept_batches, kept_bytes
        self._size_bytes = 0
        self.last_sequence = past_sequence

    def take_from(self, pool: KVCacheManager, time_seconds: float) -> bool:
        """Adds the events of a pool's last change.

        Args:
            pool: The pool.
            time_seconds: The time of the change, in seconds since 1970.

        Returns:
            Whether there were any.
        """
        events = pool.blocks.take_events()
        if not events:
            return False
        self.last_sequence += 1
        self._batches.append(LoggedBatch(self.last_sequence, events, time_seconds, pool.epoch, pool.config))
        self._size_bytes += _size_bytes(events)
        while len(self._batches) > self._max_batches or (self._size_bytes > self._max_bytes and len(self._batches) > 1):
            self._size_bytes -= _size_bytes(self._batches.popleft().events)
        return True

    def check_start(self, sequence: int) -> None:
        """Checks that a watch can start with batch `sequence`.

        Raises:
            InvalidArgumentError: It is further ahead than the next batch.
            WrongStateError: It is no longer kept.
        """
        if sequence > self.last_sequence + 1:
            raise InvalidArgumentError(
                "from_sequence", f"{sequence} does not exist yet, {self.last_sequence + 1} is next"
            )
        oldest = self.last_sequence - len(self._batches) + 1
        if sequence < oldest:
            message = f"batch {sequence} is no longer kept, {oldest} is the oldest"
            raise WrongStateError("EVENTS_NOT_KEPT", message, field="from_sequence")

    def kept(self, sequence: int) -> LoggedBatch:
        """Returns batch `sequence`, which exists.

        Raises:
            WrongStateError: It is no longer kept.
        """
        self.check_start(sequence)
        return self._batches[sequence - self.last_sequence - 1]


def _size_bytes(events: Sequence[BlockEvent]) -> int:
    """Approximate memory of a batch, in bytes. O(events)."""
    stored = [event for event in events if isinstance(event, BlockStored)]
    tokens_bytes = sum(len(event.token_ids) * event.token_ids.itemsize for event in stored)
    return tokens_bytes + sum(len(event.block_hashes) for event in stored) * _HASH_BYTES + len(events) * _EVENT_BYTES
