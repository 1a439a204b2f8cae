"""Quotas: the minimum number of blocks that a session can always have, and the maximum that it can hold.

A block counts once per session, however many of the session's requests share it.

1. A session with a minimum *covers* blocks that it holds: all of them, up to its minimum. A used block is *common* if
   it is in a table of a session that does not cover it. A block that is only in covering tables is not common.
2. The number of common blocks never exceeds the pool's blocks minus the sum of all minima. So a session that holds
   fewer blocks than its minimum is never refused a block, whatever other sessions do, and whichever of its blocks they
   share.
3. Freeing blocks never breaks rule 2: a block that no session covers any more is common or free.
4. The requests of a session never hold more blocks than the session's maximum.
5. A block that waits for steps in flight (`StepsInFlight`) counts as held by the session that freed it: within its
   maximum, its minimum covers it, and it is common if it is not covered. So a session that never reports its steps as
   executed keeps no more than it may hold. Where rules 2 and 4 leave it too few others, it takes blocks that wait for
   it. Until its steps have run, it can be refused what these cannot serve: a hit, and a block for each kept one.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, cast

from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.errors import ExhaustedError, InvalidArgumentError, check_range
from kvpool.core.ids import MAX_BLOCKS, BlockId, SessionNumber
from kvpool.core.sessions.request import Holding, Request
from kvpool.core.sessions.session import Session

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

    def __init__(self, blocks: BlockPool, num_usable_blocks: int, sessions: Mapping[SessionNumber, Session]) -> None:
        self.min_blocks = 0
        self._sessions = sessions
        self._blocks = blocks
        self._num_usable_blocks = num_usable_blocks
        self.num_covering: dict[BlockId, int] = {}
        self._num_only_covered = 0  # used blocks that are only in covering tables
        self._num_waiting_covered = 0

    @property
    def num_left(self) -> int:
        """Number of free blocks that wait for no step and are available to a session without a minimum."""
        free_list = self._blocks.free_list
        num_covered = self._num_only_covered + self._num_waiting_covered
        return free_list.num_free - free_list.num_held + num_covered - self.min_blocks

    @property
    def num_reserved(self) -> int:
        """Number of free blocks that are reserved for sessions with a minimum."""
        return self.min_blocks - self._num_only_covered

    def holding_of(self, session_number: SessionNumber) -> Holding | None:
        """The record of held blocks of an open session; None if it has no quota."""
        session = self._sessions.get(session_number)
        return session.holding if session else None

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

    def open(self, quota: Quota, session_number: SessionNumber) -> Holding | None:
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
        return Holding(quota.min_blocks, quota.max_blocks, session_number=session_number)

    def restore(self, sessions: Iterable[Session]) -> None:
        """Adds the quotas of the sessions of a restored pool. O(blocks they hold)."""
        for session in sessions:
            holding = session.holding
            if not holding:
                continue
            holding.session_number, holding.num_waiting_covered = session.session_number, 0
            holding.uncovered = OrderedDict(holding.uncovered)
            self.min_blocks += holding.min_blocks
            for block_id in holding.counts.keys() - holding.uncovered.keys():
                self.num_covering[block_id] = self.num_covering.get(block_id, 0) + holding.counts[block_id]
            self.cover(holding)
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
        self._num_waiting_covered -= holding.num_waiting_covered

    def num_free_for(self, holding: Holding | None) -> int:
        """Number of free blocks that are available to a session, the user of the free list."""
        free_list = self._blocks.free_list
        num_free = self.num_left + max(free_list.num_held_by(free_list.user), holding.num_lacking if holding else 0)
        if holding is None or not holding.max_blocks:
            return num_free
        return min(num_free, holding.max_blocks - len(holding.counts))

    def max_blocks_for(self, holding: Holding | None) -> int:
        """Maximum number of blocks that a session can hold as long as the minima of the other sessions stay."""
        num_blocks = self._num_usable_blocks - self.min_blocks + (holding.min_blocks if holding else 0)
        return min(num_blocks, holding.max_blocks) if holding and holding.max_blocks else num_blocks

    def applies_to(self, holding: Holding | None) -> bool:
        """Whether the other methods must be called when a session gains or loses blocks."""
        return holding is not None or self.min_blocks > 0

    def num_from_own(self, holding: Holding | None, hit: Sequence[BlockId], num_taken: int) -> int | None:
        """How many of the blocks that a session takes must be of those that wait for it; None if it cannot take them.

        Records in `holding.is_over` whether the session's maximum forbids it. The session is the user of the free list.

        Args:
            holding: The session's record of held blocks.
            hit: Blocks that will be in one more table of the session.
            num_taken: Number of blocks that leave the free list, including those of `hit`.
        """
        ref_cnt, covering, free_list = self._blocks.ref_cnt, self.num_covering, self._blocks.free_list
        num_waiting, num_lacking, num_from_own, num_own = free_list.num_held_by(free_list.user), 0, 0, 0
        if num_waiting:
            num_own_hit = free_list.num_held_among(hit)
            num_own = max(min(num_waiting - num_own_hit, num_taken - free_list.num_free_among(hit)), 0)
            num_taken -= num_own_hit
        if holding:
            num_lacking = max(holding.num_lacking - num_waiting, 0)
            hit = [block_id for block_id in dict.fromkeys(hit) if block_id not in holding.counts]
            num_gained = num_taken + sum(1 for block_id in hit if ref_cnt(block_id))
            num_over = len(holding.counts) + num_waiting + num_gained - holding.max_blocks
            holding.is_over = bool(holding.max_blocks) and num_over > num_own
            if holding.is_over:
                return None
            num_from_own = num_over if holding.max_blocks else 0
        # A used block is already common, or becomes common if it is only in covering tables.
        num_joining = num_taken + sum(1 for block_id in hit if covering.get(block_id) == ref_cnt(block_id))
        num_from_own = max(num_from_own, num_joining - num_lacking - self.num_left)
        return num_from_own if num_from_own <= num_own else None

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
            uncovered = cast("OrderedDict[BlockId, None]", holding.uncovered)
            replaces_waiting = bool(uncovered) and holding.num_lacking > 0
            uncovered.update(dict.fromkeys(new))
            for block_id in reversed(new) if replaces_waiting else ():
                uncovered.move_to_end(block_id, last=False)
            holding.counts.update((block_id, counts[block_id]) for block_id in new)
            self.cover(holding)

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
            self.cover(holding)

    def cover(self, holding: Holding) -> None:
        """Covers as many blocks as the session's minimum allows: those that wait first, then those held longest.

        To cover a block in tables of others, too, has no effect. So those that wait come first: they have left tables
        in which they were covered. Call it when the number of blocks that wait has changed.
        """
        num_waiting = self._blocks.free_list.num_held_by(holding.session_number)
        for block_id in list(islice(holding.uncovered, max(holding.num_lacking - num_waiting, 0))):
            del holding.uncovered[block_id]
            count = self.num_covering[block_id] = self.num_covering.get(block_id, 0) + holding.counts[block_id]
            if count == self._blocks.ref_cnt(block_id):
                self._num_only_covered += 1
        num_covered = min(num_waiting, holding.num_lacking)
        self._num_waiting_covered += num_covered - holding.num_waiting_covered
        holding.num_waiting_covered = num_covered

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
