"""A directory in memory whose answers are late, lost, or lost before or after they took effect."""

from collections.abc import Callable
from random import Random

from kvpool.server.cluster.directory import Entry, ShardRecord, Swap

Answer = Callable[[Swap | None], None]


class MemoryDirectory:
    """The record of one shard. Nothing happens by itself: the world chooses what happens next.

    Args:
        random: Decides fates.

    Attributes:
        entry: The entry as it is.
        history: Every record that was written.
        is_up: Whether calls are answered.
    """

    def __init__(self, random: Random) -> None:
        self.entry = Entry(0, None)
        self.history: list[ShardRecord] = []
        self.is_up = True
        self._random = random
        self._late: list[tuple[int, ShardRecord]] = []

    def get(self) -> Entry | None:
        """A linearizable read; None if it is not answered."""
        return self.entry if self.is_up else None

    def compare_and_swap(self, revision: int, record: ShardRecord) -> Swap | None:
        """A swap; None for an unknown outcome: it took effect, will later, or never."""
        if not self.is_up:
            return None
        fate = self._random.random()
        if fate < 0.1:
            self._late.append((revision, record))
            return None
        if fate < 0.15:
            return None
        swap = self._swap(revision, record)
        return None if fate < 0.25 else swap

    def apply_late(self) -> None:
        """Applies a swap whose answer was lost."""
        if self._late:
            self._swap(*self._late.pop(self._random.randrange(len(self._late))))

    def _swap(self, revision: int, record: ShardRecord) -> Swap:
        if revision != self.entry.revision:
            return Swap(won=False, entry=self.entry)
        self.entry = Entry(revision + 1, record)
        self.history.append(record)
        return Swap(won=True, entry=self.entry)
