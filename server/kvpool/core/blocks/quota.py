"""Quotas: the minimum number of blocks that a session can always have, and the maximum that it can hold.

A block counts once per session, however many of the session's requests share it.

1. A session with a minimum *covers* blocks that it holds: all of them, up to its minimum. A used block is *common* if
   it is in a table of a session that does not cover it. A block that is only in covering tables is not common.
2. The number of common blocks never exceeds the pool's blocks minus the sum of all minima. So a session that holds
   fewer blocks than its minimum is never refused a block, whatever other sessions do, and whichever of its blocks they
   share.
3. Freeing blocks never breaks rule 2: a block that no session covers any more is common or free.
4. The requests of a session never hold more blocks than the session's maximum.
5. Blocks that wait for steps in flight (`StepsInFlight`) do not follow rule 2: it counts those that are free as free,
   and those that are kept as common. Until these steps have run, a session below its minimum can be refused a block.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.errors import ExhaustedError, InvalidArgumentError, check_range
from kvpool.core.ids import MAX_BLOCKS, BlockId
from kvpool.core.sessions.request import Holding, Request

QUOTA_RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Quota:
    """The quota that a session requests when it is opened.

    Attributes:
        min_blocks: Number of blocks that the session can always have; 0 for none.
        max_blocks: Maximum number of blocks that the session can hold, at least min_blocks; 0 for no limit.
    """

    min_blocks: int = 0
    max_blocks: int = 0

    def check(self) -> None:
        """Raises InvalidArgumentError if a number is out of range."""
        check_range("min_blocks", self.min_blocks, 0, MAX_BLOCKS)
        check_range("max_blocks", self.max_blocks, 0, MAX_BLOCKS)
        if self.max_blocks and self.max_blocks < self.min_blocks:
            raise InvalidArgumentError("max_blocks", f"{self.max_blocks} is less than min_blocks, {self.min_blocks}")


NO_QUOTA: Final = Quota()


class Quotas:
    """The quotas of a pool's sessions. Without any quota, the pool has no extra cost.

    Attributes:
        min_blocks: Sum of the sessions' minima.
        num_covering: For each covered block, the number of tables that contain it and whose sessions cover it.
            Read-only.
    """

    def __init__(self, blocks: BlockPool, num_usable_blocks: int) -> None:
        self.min_blocks = 0
        self._blocks = blocks
        self._num_usable_blocks = num_usable_blocks
        self.num_covering: dict[BlockId, int] = {}
        self._num_only_covered = 0  # used blocks that are only in covering tables

    @property
    def num_left(self) -> int:
        """Number of free blocks that are available to a session without a minimum; negative in the case of rule 5."""
        return self._blocks.num_free_blocks + self._num_only_covered - self.min_blocks

    @property
    def num_reserved(self) -> int:
        """Number of free blocks that are reserved for sessions with a minimum."""
        return self.min_blocks - self._num_only_covered

    def check(self, quota: Quota) -> None:
        """Checks that a session with this quota can be opened now.

        Raises:
            InvalidArgumentError: A number is out of range.
            ExhaustedError: The minimum cannot be guaranteed now.
        """
        quota.check()
        check_range("min_blocks", quota.min_blocks, 0, self._num_usable_blocks)
        if quota.min_blocks > self.num_left:
            raise ExhaustedError(
                "QUOTA_UNAVAILABLE",
                f"{quota.min_blocks} blocks cannot be guaranteed now, at most {self.num_free_for(None)}",
                field="min_blocks",
                retry_seconds=QUOTA_RETRY_SECONDS,
            )

    def open(self, quota: Quota) -> Holding | None:
        """Adds the quota of a new session.

        Returns:
            The session's record of held blocks; None if the session has no quota.

        Raises:
            InvalidArgumentError: A number is out of range.
            ExhaustedError: The minimum cannot be guaranteed now.
        """
        self.check(quota)
        if quota == NO_QUOTA:
            return None
        self.min_blocks += quota.min_blocks
        return Holding(quota.min_blocks, quota.max_blocks)

    def restore(self, holdings: Iterable[Holding]) -> None:
        """Adds the quotas of the sessions of a restored pool. O(blocks they hold)."""
        for holding in holdings:
            self.min_blocks += holding.min_blocks
            for block_id in holding.counts.keys() - holding.uncovered.keys():
                self.num_covering[block_id] = self.num_covering.get(block_id, 0) + holding.counts[block_id]
        self._num_only_covered = sum(self._blocks.ref_cnt(b) == count for b, count in self.num_covering.items())

    def end(self, holding: Holding, requests: Iterable[Request]) -> None:
        """Removes a session's quota.

        Blocks that its `requests` still hold count for no session. O(blocks and requests).
        """
        for request in requests:
            request.holding = None
        for block_id, count in holding.counts.items():
            if block_id not in holding.uncovered:
                if self.num_covering[block_id] == self._blocks.ref_cnt(block_id):
                    self._num_only_covered -= 1
                self._uncover(block_id, count)
        self.min_blocks -= holding.min_blocks

    def num_free_for(self, holding: Holding | None) -> int:
        """Number of free blocks that are available to a session."""
        num_free = max(self.num_left + (holding.num_lacking if holding else 0), 0)
        if holding is None or not holding.max_blocks:
            return num_free
        return min(num_free, holding.max_blocks - len(holding.counts))

    def applies_to(self, holding: Holding | None) -> bool:
        """Whether the other methods must be called when a session gains or loses blocks."""
        return holding is not None or self.min_blocks > 0

    def allows(self, holding: Holding | None, hit: Sequence[BlockId], num_taken: int) -> bool:
        """Whether a session can take blocks. Records in `holding.is_over` whether the session's maximum forbids it.

        Args:
            holding: The session's record of held blocks.
            hit: Blocks that will be in one more table of the session.
            num_taken: Number of blocks that leave the free list, including those of `hit`.
        """
        ref_cnt, covering = self._blocks.ref_cnt, self.num_covering
        if holding:
            hit = [block_id for block_id in dict.fromkeys(hit) if block_id not in holding.counts]
            num_gained = num_taken + sum(1 for block_id in hit if ref_cnt(block_id))
            holding.is_over = bool(holding.max_blocks) and len(holding.counts) + num_gained > holding.max_blocks
            if holding.is_over:
                return False
        # A used block is already common, or becomes common if it is only in covering tables.
        num_joining = num_taken + sum(1 for block_id in hit if covering.get(block_id) == ref_cnt(block_id))
        return num_joining - (holding.num_lacking if holding else 0) <= self.num_left

    def record_gained(self, holding: Holding | None, hit: Sequence[BlockId], taken: Sequence[BlockId]) -> None:
        """Records that one more table of a session contains the blocks of a hit, and newly taken blocks."""
        alone, shared = list(taken), list[BlockId]()
        counts = dict.fromkeys(taken, 1)
        for block_id, num_later in _with_repeats(hit):
            num_before = self._blocks.ref_cnt(block_id) - 1 - num_later
            num_covering = self.num_covering.get(block_id, 0)
            is_new = holding is not None and block_id not in holding.counts
            if is_new and block_id not in counts:
                (alone if num_before == num_covering else shared).append(block_id)
            if holding and not is_new and block_id not in holding.uncovered:
                self.num_covering[block_id] = num_covering + 1
            elif num_covering and num_before == num_covering:
                self._num_only_covered -= 1
            if is_new:
                counts[block_id] = counts.get(block_id, 0) + 1
            elif holding:
                holding.counts[block_id] += 1
        if holding:
            new = alone + shared  # first the blocks for which covering has an effect
            holding.counts.update((block_id, counts[block_id]) for block_id in new)
            holding.uncovered.update(dict.fromkeys(new))
            self._cover(holding)

    def record_lost(self, holding: Holding | None, block_ids: Sequence[BlockId]) -> None:
        """Records that one table fewer of a session contains these blocks."""
        for block_id, num_later in _with_repeats(block_ids):
            ref_cnt = self._blocks.ref_cnt(block_id) + num_later
            if holding and block_id not in holding.uncovered:
                self._uncover(block_id, 1)
                if not ref_cnt:
                    self._num_only_covered -= 1
            elif self.num_covering.get(block_id) == ref_cnt:
                self._num_only_covered += 1
            if holding:
                holding.drop(block_id)
        if holding:
            self._cover(holding)

    def _cover(self, holding: Holding) -> None:
        """Covers as many blocks as the session's minimum allows, those held longest first."""
        for block_id in list(islice(holding.uncovered, holding.num_lacking)):
            del holding.uncovered[block_id]
            count = self.num_covering[block_id] = self.num_covering.get(block_id, 0) + holding.counts[block_id]
            if count == self._blocks.ref_cnt(block_id):
                self._num_only_covered += 1

    def _uncover(self, block_id: BlockId, count: int) -> None:
        left = self.num_covering[block_id] - count
        if left:
            self.num_covering[block_id] = left
        else:
            del self.num_covering[block_id]


def _with_repeats(block_ids: Sequence[BlockId]) -> Iterator[tuple[BlockId, int]]:
    """Yields each block with its number of later occurrences.

    If the hashes of a request repeat, the blocks of its hit repeat too.
    """
    later = Counter(block_ids)
    for block_id in block_ids:
        later[block_id] -= 1
        yield block_id, later[block_id]
