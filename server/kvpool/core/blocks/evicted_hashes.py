"""Remembers which hashes were evicted lately, to tell a block that was lost from one that was never cached.

1. About the last num_blocks / 8 evictions are remembered, at least MIN_REMEMBERED and at most MAX_REMEMBERED. A hash
   that is remembered as evicted would still be cached if the pool had had this number of blocks more.
2. A reset makes the cached hashes, up to the same number, those that the reset lost, and forgets earlier evictions. So
   a hash is remembered with the reason for which it was lost last.
3. Hashes are kept by map, as the prefix map finds them: one scope and one group.
4. It decides nothing: no hit, no block and no order of eviction depends on it.

Evictions fill the newest of GENERATIONS generations. When it is full, the oldest one is dropped as a whole, which costs
less than removing one hash for each new one. Hashes are not copied. A remembered one takes about 130 bytes, so a pool
takes up to 16 bytes per block, or 9 MB.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvpool.core.ids import BlockHash, MapId
from kvpool.core.snapshots import SLICE_LENGTH, Column
from kvpool.core.statistics import MissReason

MIN_REMEMBERED: Final = 1024
MAX_REMEMBERED: Final = 2**16
GENERATIONS: Final = 4
_BLOCKS_PER_REMEMBERED: Final = 8

_Generation = defaultdict[int, dict[BlockHash, None]]
"""Hashes by map, in the order of their evictions, so that equal pools have equal snapshots."""
_Run = tuple[int, MapId, list[BlockHash]]
"""Hashes of one generation, counted from the oldest, and one map. The hashes that a reset lost have generation -1."""
_RESET: Final = -1


@dataclass(frozen=True, slots=True)
class EvictedHashesSnapshot:
    """Evicted hashes at one moment.

    Attributes:
        num_generations: Number of generations that exist.
        num_newest: Evictions that the newest generation has recorded.
        runs: The hashes.
    """

    num_generations: int
    num_newest: int
    runs: Column[_Run]


class EvictedHashes:
    """The hashes that a pool has lost lately, see the rules.

    Args:
        num_blocks: Number of blocks of the pool.

    Attributes:
        generation_size: Number of evictions in a generation.
        num_remembered: Number of evictions after which one can be forgotten.
    """

    __slots__ = ("_generations", "_num_newest", "_reset", "generation_size", "num_remembered")

    def __init__(self, num_blocks: int) -> None:
        most = min(max(num_blocks // _BLOCKS_PER_REMEMBERED, MIN_REMEMBERED), MAX_REMEMBERED)
        self.generation_size = most // GENERATIONS
        self.num_remembered = (GENERATIONS - 1) * self.generation_size
        self._generations: deque[_Generation] = deque([defaultdict(dict)], GENERATIONS)
        self._num_newest = 0
        self._reset: _Generation = defaultdict(dict)

    def for_new(self, count: int) -> _Generation:
        """Returns the hashes by map to which the caller adds `count` evictions, at most `generation_size`.

        A method that took the hashes would need them in a list: for 256 blocks that is 3 of the 8 us.
        """
        if self._num_newest >= self.generation_size:
            self._generations.append(defaultdict(dict))
            self._num_newest = 0
        self._num_newest += count
        return self._generations[-1]

    def reset(self, cached: Iterable[tuple[BlockHash, int]]) -> None:
        """Records that all cached blocks were lost.

        Args:
            cached: Hash and map of each cached block by id, which is the same order in a restored pool.
        """
        self._generations = deque([defaultdict(dict)], GENERATIONS)
        self._num_newest = 0
        self._reset = defaultdict(dict)
        for block_hash, map_id in islice(cached, self.generation_size * GENERATIONS):
            self._reset[map_id][block_hash] = None

    def forget(self, map_id: MapId) -> None:
        """Forgets the hashes of a map that another scope uses from now on."""
        self._reset.pop(map_id, None)
        for generation in self._generations:
            generation.pop(map_id, None)

    def reason(self, map_id: MapId, block_hash: BlockHash) -> MissReason | None:
        """Why a hash that is not cached was lost; None if that is not known."""
        for generation in self._generations:
            if map_id in generation and block_hash in generation[map_id]:
                return MissReason.EVICTED
        if map_id in self._reset and block_hash in self._reset[map_id]:
            return MissReason.RESET
        return None

    def snapshot(self) -> EvictedHashesSnapshot:
        """The hashes at this moment. O(hashes of the newest generation): those of the others no longer change."""
        generations: list[dict[int, dict[BlockHash, None]]] = [dict(generation) for generation in self._generations]
        generations[-1] = {map_id: dict(hashes) for map_id, hashes in generations[-1].items()}
        parts = [(_RESET, dict(self._reset)), *enumerate(generations)]
        return EvictedHashesSnapshot(len(generations), self._num_newest, Column(_runs(parts), slice_length=1))

    def restore(self, snapshot: EvictedHashesSnapshot) -> None:
        """Makes new hashes as they were.

        Raises:
            LookupError: A generation does not exist.
        """
        self._generations.extend(defaultdict(dict) for _ in range(snapshot.num_generations - 1))
        self._num_newest = snapshot.num_newest
        for number, map_id, hashes in snapshot.runs.values:
            generation = self._reset if number == _RESET else self._generations[number]
            generation[map_id].update(dict.fromkeys(hashes))


def _runs(parts: Sequence[tuple[int, dict[int, dict[BlockHash, None]]]]) -> Iterator[_Run]:
    for number, generation in parts:
        for map_id, hashes in generation.items():
            left = iter(hashes)
            while run := list(islice(left, SLICE_LENGTH)):
                yield number, MapId(map_id), run
