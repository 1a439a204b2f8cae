"""What sessions of a pool can always have, and the most that they may hold.

Blocks count once a session, however many of its requests share them.

1. A session with a minimum *covers* blocks that it holds: all of them, up to its minimum. A used block is *common* if
   any table of another session, or of one that does not cover it, has it. One in covering tables only is not.
2. Common blocks are never more than the pool's, less all minima. So who holds fewer than its minimum is never refused
   a block, whatever others do, and whichever of its blocks they share.
3. To give blocks back never breaks 2: what is covered by nobody any more is common, or free.
4. A session's requests never hold more blocks than its maximum.
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
    """What a session asks for when it is opened.

    Attributes:
        min_blocks: Blocks that it can always have; 0 for none.
        max_blocks: Most blocks that it may hold, at least min_blocks; 0 for no limit.
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
    """The quotas of a pool's sessions. Without any it costs the pool nothing.

    Attributes:
        min_blocks: Sum of the sessions' minima.
        num_covering: In how many tables of sessions that cover it each block is; only blocks that are covered. Read it.
    """

    def __init__(self, blocks: BlockPool, num_usable_blocks: int) -> None:
        self.min_blocks = 0
        self._blocks = blocks
        self._num_usable_blocks = num_usable_blocks
        self.num_covering: dict[BlockId, int] = {}
        self._num_only_covered = 0  # used blocks in no other tables

    @property
    def num_left(self) -> int:
        """Free blocks that a session without a minimum can be given."""
        return self._blocks.num_free_blocks + self._num_only_covered - self.min_blocks

    @property
    def num_reserved(self) -> int:
        """Free blocks that only sessions with a minimum can be given."""
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
                f"{quota.min_blocks} blocks cannot be guaranteed now, at most {self.num_left}",
                field="min_blocks",
                retry_seconds=QUOTA_RETRY_SECONDS,
            )

    def open(self, quota: Quota) -> Holding | None:
        """Takes a new session's quota in.

        Returns:
            What is to be kept of the blocks that its requests hold; None if it has no quota.

        Raises:
            InvalidArgumentError: As `check`.
            ExhaustedError: Likewise.
        """
        self.check(quota)
        if quota == NO_QUOTA:
            return None
        self.min_blocks += quota.min_blocks
        return Holding(quota.min_blocks, quota.max_blocks)

    def end(self, holding: Holding, requests: Iterable[Request]) -> None:
        """Lets a session's quota go; what its `requests` hold yet counts to none any more. O(blocks and requests)."""
        for request in requests:
            request.holding = None
        for block_id, count in holding.counts.items():
            if block_id not in holding.uncovered:
                if self.num_covering[block_id] == self._blocks.ref_cnt(block_id):
                    self._num_only_covered -= 1
                self._uncover(block_id, count)
        self.min_blocks -= holding.min_blocks

    def num_free_for(self, holding: Holding | None) -> int:
        """Free blocks that a session can be given."""
        if holding is None:
            return self.num_left
        most = self.num_left + holding.num_lacking
        return min(most, holding.max_blocks - len(holding.counts)) if holding.max_blocks else most

    def applies_to(self, holding: Holding | None) -> bool:
        """Whether what a session takes and gives back must be told to the other methods."""
        return holding is not None or self.min_blocks > 0

    def allows(self, holding: Holding | None, hit: Sequence[BlockId], num_taken: int) -> bool:
        """Whether a session may take blocks; notes in its holding if its maximum is what forbids it.

        Args:
            holding: The session's.
            hit: Blocks that one more of its tables is to have.
            num_taken: Blocks that leave the free list, those of `hit` included.
        """
        ref_cnt, covering = self._blocks.ref_cnt, self.num_covering
        if holding:
            hit = [block_id for block_id in dict.fromkeys(hit) if block_id not in holding.counts]
            num_gained = num_taken + sum(1 for block_id in hit if ref_cnt(block_id))
            holding.is_over = bool(holding.max_blocks) and len(holding.counts) + num_gained > holding.max_blocks
            if holding.is_over:
                return False
        # What is used already is common already, or joins it if only covering tables have it.
        num_joining = num_taken + sum(1 for block_id in hit if covering.get(block_id) == ref_cnt(block_id))
        return num_joining - (holding.num_lacking if holding else 0) <= self.num_left

    def record_gained(self, holding: Holding | None, hit: Sequence[BlockId], taken: Sequence[BlockId]) -> None:
        """Takes note that one more table of a session has the blocks of a hit, and ones that were free; it has."""
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
            new = alone + shared  # those first that it is of use to cover
            holding.counts.update((block_id, counts[block_id]) for block_id in new)
            holding.uncovered.update(dict.fromkeys(new))
            self._cover(holding)

    def record_lost(self, holding: Holding | None, block_ids: Sequence[BlockId]) -> None:
        """Takes note that one table less of a session has these blocks; it has."""
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
        """Covers what the session's minimum has room for, the blocks first that it has held longest."""
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
    """Each block, and how often it comes again later: where a request's hashes repeat, the blocks of its hit do."""
    later = Counter(block_ids)
    for block_id in block_ids:
        later[block_id] -= 1
        yield block_id, later[block_id]
