"""How long blocks keep what they hold, by a sample of them.

1. One block in `sample_every` is followed, from when it is taken until its contents are evicted, or until it is taken
   again without having been cached.
2. An access is being taken or being hit while free or held, as vLLM counts its metrics of the same names.
3. Costs a set operation a call where nothing is sampled, and nothing on blocks that are not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core.ids import BlockId
from kvpool.core.statistics import Histogram

BOUNDS_SECONDS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)


@dataclass(slots=True)
class _Followed:
    taken_seconds: float
    accessed_seconds: float


class BlockLifetimes:
    """The sampled blocks of a pool, and what was learned of them.

    Args:
        sample_every: Of how many blocks one is followed, at least 1.
        randrange: Draws an int in [0, n), as `random.randrange`.

    Attributes:
        now_seconds: Time of the change being made; set by whoever makes it.
        lifetime: Seconds from being taken to eviction.
        idle: Seconds from the last access to eviction.
        reuse_gap: Seconds between two accesses.
        followed: The blocks being followed. Read it; change it through this class.
    """

    __slots__ = ("_randrange", "_sample_every", "_until", "followed", "idle", "lifetime", "now_seconds", "reuse_gap")

    def __init__(self, sample_every: int, randrange: Callable[[int], int]) -> None:
        self.now_seconds = 0.0
        self.lifetime = Histogram(BOUNDS_SECONDS)
        self.idle = Histogram(BOUNDS_SECONDS)
        self.reuse_gap = Histogram(BOUNDS_SECONDS)
        self.followed: dict[BlockId, _Followed] = {}
        self._sample_every = sample_every
        self._randrange = randrange
        self._until = self._gap()

    def taken(self, block_ids: Sequence[BlockId]) -> None:
        """Chooses among blocks that were just taken; forgets those that were followed and never evicted."""
        followed = self.followed
        if followed and not followed.keys().isdisjoint(block_ids):
            for block_id in block_ids:
                followed.pop(block_id, None)
        count = len(block_ids)
        while self._until < count:
            followed[block_ids[self._until]] = _Followed(self.now_seconds, self.now_seconds)
            self._until += 1 + self._gap()
        self._until -= count

    def accessed(self, block_ids: Sequence[BlockId]) -> None:
        """Notes that blocks were hit."""
        followed = self.followed
        if not followed or followed.keys().isdisjoint(block_ids):
            return
        for block_id in block_ids:
            block = followed.get(block_id)
            if block:
                self.reuse_gap.observe(self.now_seconds - block.accessed_seconds)
                block.accessed_seconds = self.now_seconds

    def evicted(self, block_ids: Sequence[BlockId]) -> None:
        """Notes that blocks lost their contents."""
        if not self.followed or self.followed.keys().isdisjoint(block_ids):
            return
        for block_id in block_ids:
            block = self.followed.pop(block_id, None)
            if block:
                self.lifetime.observe(self.now_seconds - block.taken_seconds)
                self.idle.observe(self.now_seconds - block.accessed_seconds)

    def forget(self) -> None:
        """Follows no block any more, as all lost their contents at once."""
        self.followed.clear()

    def _gap(self) -> int:
        """Blocks to let pass before the next one to follow: sample_every - 1 on average."""
        return self._randrange(2 * self._sample_every - 1)
