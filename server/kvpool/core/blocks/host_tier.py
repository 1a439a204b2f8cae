"""The second tier of a pool: blocks of host memory that keep what the first tier evicts.

1. Ids [num_blocks, num_blocks + num_host_blocks) name its blocks. The prefix map has maps for them, beside those
   for the others, and one look-up finds either. Of the blocks with one hash, those of the first tier are found first.
   Few are here twice: equal blocks that one step copies, and those that have the hashes of tails of prompts.
2. A block is in no table. It is in use while a copy from or to it may be under way: until the session reports the step
   that makes the copy as executed. Otherwise it is free, in the order in which it is used next: the one that was copied
   least recently first. As in the first tier, a free block keeps its contents.
3. Demotion is cleaning: the server orders copies of cached blocks that are free and will be allocated soon. So no
   allocation waits for a copy; the eviction of a clean block only changes the map. What an allocation takes before it
   is clean is lost to the pool. Pending blocks are not cleaned, as it is not certain that they are computed.
4. No session finds the target of such a copy until its step is reported as executed, so that the death of an
   engine leaves no wrong block. Until then it is pending, under a number that is no session's (`copier`).
5. The source stays free. The steps of the session that copies it run in order, so this session can take it. If another
   session takes it before the step is executed, the contents of the target are uncertain, and it loses its hash.
6. Promotion: an admission takes blocks of the first tier for those of its hit that are here, and orders the copies.
   These are `BlockCopy`s, which hold their targets until the step is launched.
7. A step orders copies to this tier only if it takes blocks, so that it is certain to be launched, and in proportion;
   and none while MAX_UNREPORTED steps of its session use blocks here, so that no session holds them all, and one report
   or the end of the session releases few.
8. A session that reports neither launched nor executed steps has executed the steps before each step.
9. Events name a block here from its publication on; those of a promotion are recorded when it is ordered, as of all
   blocks of the first tier.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from kvpool.core import ids
from kvpool.core.blocks.free_list import FreeList, FreeListSnapshot
from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.ids import BlockId, GroupId, SessionNumber
from kvpool.core.snapshots import Column
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.statistics import HostCounters

MAX_CLEANED: Final = 256
"""Maximum number of blocks that one step copies to host memory."""
MAX_UNREPORTED: Final = 32
"""Maximum number of steps of a session, not reported as executed, that copy blocks to host memory."""
_LEAST_CLEANED: Final = 8
_AHEAD_SHARE: Final = 8
_AHEAD_STEPS: Final = 4
_MAX_AHEAD: Final = 4096
"""The next blocks that are kept clean: this share of the pool, as a divisor, or those of this number of large steps."""


class FirstTier(Protocol):
    """What this tier uses of the `BlockPool` that it belongs to."""

    free_list: FreeList
    prefix_map: PrefixMap

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the first tier."""

    def remove_hashes(self, cached: Sequence[BlockId]) -> None:
        """Removes the hashes of blocks that have one."""

    def copy_hashes(
        self, source: BlockId, target: BlockId, session_number: SessionNumber, sequence: ids.StepNumber
    ) -> None:
        """Gives the hashes of one block to another, too, which step `sequence` fills with the same contents."""

    def record_copied(self, block_ids: Iterable[BlockId]) -> None:
        """Records the events of blocks that were copied."""


def copier(session_number: SessionNumber) -> SessionNumber:
    """The number under which the targets of a session's copies to host memory are pending; see rule 4."""
    return SessionNumber(-session_number)


@dataclass(frozen=True, slots=True)
class HostUse:
    """Blocks of host memory that copies of one step read or write.

    Attributes:
        session_number: The session.
        sequence: Its step.
        block_ids: The blocks, one entry per copy.
        sources: Of copies to host memory, the blocks of the first tier.
    """

    session_number: SessionNumber
    sequence: ids.StepNumber
    block_ids: list[BlockId]
    sources: list[BlockId] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HostTierSnapshot:
    """The second tier at one moment.

    Attributes:
        free_list: The free blocks, by their number here.
        uses: The copies that may be under way.
        copying: Of copies to host memory whose sources were not taken since: source, session and target.
        to_clean: Blocks of the first tier that are to be cleaned, in order, unless they have changed since.
        num_unscanned: Number of blocks that were allocated since these were found.
        num_large: Number of blocks that a large step has taken lately.
        counters: See `HostTier`.
    """

    free_list: FreeListSnapshot
    uses: Column[HostUse]
    copying: Column[tuple[BlockId, SessionNumber, BlockId]]
    to_clean: Column[BlockId]
    num_unscanned: int
    num_large: int
    counters: HostCounters


class HostTier:
    """The blocks of host memory of a pool.

    Attributes:
        num_blocks: Number of blocks.
        counters: What was copied and lost.
    """

    def __init__(self, config: PoolConfig, first: FirstTier) -> None:
        self.num_blocks = config.num_host_blocks
        self.counters = HostCounters()
        self._first = first
        self._group_ids = [GroupId(i) for i in range(len(config.groups))]
        self._first_id = config.num_blocks
        self._offset = config.num_blocks - 1  # the free list's block 0 is the null block
        self._free = FreeList(config.num_host_blocks + 1)
        self._free.extend_columns(config.num_host_blocks + 1)
        self._uses: dict[SessionNumber, deque[HostUse]] = {}
        self._copying: dict[BlockId, tuple[SessionNumber, BlockId]] = {}  # sources: who copies them, and the targets
        self._num_large = config.num_blocks // _AHEAD_SHARE // _AHEAD_STEPS + 1  # what a large step has taken lately
        self._to_clean: deque[BlockId] = deque()
        self._num_unscanned = 0  # blocks that were allocated since these were found

    @property
    def num_free(self) -> int:
        """Number of blocks that no copy uses."""
        return self._free.num_free

    @property
    def num_cached(self) -> list[int]:
        """Number of blocks that have a hash, by group. O(scopes)."""
        return [self._first.prefix_map.num_cached_in_host(group_id) for group_id in self._group_ids]

    @property
    def uses(self) -> list[HostUse]:
        """The copies that may be under way."""
        return [use for uses in self._uses.values() for use in uses]

    @property
    def num_pending(self) -> int:
        """Number of targets of copies that are not reported as executed. O(steps in flight)."""
        pending = self._first.prefix_map.pending
        return sum(sum(pending.num_by_step(copier(number)).values()) for number in self._uses)

    def contains(self, block_id: BlockId) -> bool:
        """Whether a block is of this tier."""
        return block_id >= self._first_id

    def places(self, block_ids: Sequence[BlockId]) -> list[int]:
        """Where blocks of this tier are among these."""
        return [i for i, block_id in enumerate(block_ids) if block_id >= self._first_id]

    def without(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """The blocks that are of the first tier."""
        return [block_id for block_id in block_ids if block_id < self._first_id]

    def ref_cnt(self, block_id: BlockId) -> int:
        """Number of copies that use a block."""
        return self._free.ref_cnt(BlockId(block_id - self._offset))

    def promote(
        self,
        sources: Sequence[BlockId],
        targets: Sequence[BlockId],
        session_number: SessionNumber,
        sequence: ids.StepNumber,
    ) -> None:
        """Gives the hashes of blocks here to blocks of the first tier, which step `sequence` copies them to."""
        for source, target in zip(sources, targets, strict=True):
            self._first.copy_hashes(source, target, session_number, sequence)
        self._first.record_copied(targets)
        self.read(sources, session_number, sequence)

    def read(self, sources: Sequence[BlockId], session_number: SessionNumber, sequence: ids.StepNumber) -> None:
        """Makes blocks in use that step `sequence` copies to the first tier."""
        self._free.hold([BlockId(block_id - self._offset) for block_id in sources])
        self._note_use(HostUse(session_number, sequence, list(sources)))
        self.counters.copied_in_blocks += len(sources)

    def clean(
        self, num_taken: int, session_number: SessionNumber, sequence: ids.StepNumber
    ) -> Iterator[tuple[GroupId, BlockId, BlockId]]:
        """Orders copies of the next blocks to be allocated, see rule 7; yields group, source and target of each.

        Called at the end of step `sequence`, which has taken `num_taken` blocks and makes the copies.
        """
        if not num_taken or len(self._uses.get(session_number, ())) >= MAX_UNREPORTED:
            return
        self._num_unscanned += num_taken
        self._num_large = max(num_taken, self._num_large - self._num_large // 64)
        num_ahead = min(max(self._first.num_blocks // _AHEAD_SHARE, _AHEAD_STEPS * self._num_large), _MAX_AHEAD)
        if self._num_unscanned >= num_ahead // _AHEAD_STEPS:
            self._num_unscanned = 0
            self._to_clean = deque(self._first.free_list.next_used(num_ahead))
        most = min(2 * num_taken + _LEAST_CLEANED, MAX_CLEANED, self._free.num_free)
        sources: list[BlockId] = []
        while self._to_clean and len(sources) < most:
            block_id = self._to_clean.popleft()
            if self._is_to_clean(block_id):
                sources.append(block_id)
        if not sources:
            return
        targets = [BlockId(number + self._offset) for number in self._free.take(len(sources))]
        evicted = self._first.prefix_map.hashed_among(targets)
        self.counters.evicted_blocks += len(evicted)
        self._first.remove_hashes(evicted)
        for source, target in zip(sources, targets, strict=True):
            self._first.copy_hashes(source, target, copier(session_number), sequence)
            self._copying[source] = session_number, target
            yield self._first.prefix_map.group_id(target), source, target
        self.counters.copied_out_blocks += len(targets)
        self._note_use(HostUse(session_number, sequence, targets, sources))

    def _is_to_clean(self, block_id: BlockId) -> bool:
        first = self._first
        return (
            not first.free_list.ref_cnt(block_id)
            and first.prefix_map.block_hash(block_id) is not None
            and block_id not in first.prefix_map.pending.steps
            and not self.has_copy(block_id)
        )

    def note_taken(self, block_ids: Sequence[BlockId]) -> None:
        """Drops the contents of copies whose sources another session takes, the user of the free list; see rule 5."""
        copying, user = self._copying, self._first.free_list.user
        if copying.keys().isdisjoint(block_ids):
            return
        uncertain = [copying.pop(b)[1] for b in block_ids if b in copying and copying[b][0] != user]
        self._first.remove_hashes(self._first.prefix_map.hashed_among(uncertain))

    def copies_of(self, block_ids: Iterable[BlockId]) -> list[BlockId]:
        """The blocks here with the contents of those of these blocks that are cached."""
        prefix_map = self._first.prefix_map
        return [copy for block_id in prefix_map.hashed_among(block_ids) for copy in prefix_map.host_copies(block_id)]

    def has_copy(self, block_id: BlockId) -> bool:
        """Whether the contents of a cached block of the first tier are here, too."""
        return bool(self._first.prefix_map.host_copies(block_id))

    def note_evicted(self, block_ids: Sequence[BlockId]) -> None:
        """Counts the contents that are lost when these cached blocks of the first tier are evicted."""
        self.counters.lost_blocks += [self.has_copy(block_id) for block_id in block_ids].count(False)

    def _note_use(self, use: HostUse) -> None:
        self._uses.setdefault(use.session_number, deque()).append(use)

    def has_waiting(self, session_number: SessionNumber, launched: ids.StepNumber) -> bool:
        """Whether blocks are in use by copies of a session's steps up to `launched`."""
        uses = self._uses.get(session_number)
        return uses is not None and uses[0].sequence <= launched

    def release(self, session_number: SessionNumber, executed: ids.StepNumber) -> None:
        """Frees what copies of a session's steps up to `executed` use, and publishes their targets. O(blocks)."""
        uses = self._uses.get(session_number)
        self._first.prefix_map.pending.publish(copier(session_number), executed)
        while uses and uses[0].sequence <= executed:
            use = uses.popleft()
            for source, target in zip(use.sources, use.block_ids, strict=False):  # of copies from here: no sources
                self._first.prefix_map.set_writer(target, session_number)
                if self._copying.get(source) == (session_number, target):
                    del self._copying[source]
            if use.sources:  # in the order of allocation: the last block of a prefix first
                self._first.record_copied(reversed(use.block_ids))
            freed = self._free.drop([BlockId(block_id - self._offset) for block_id in use.block_ids])
            block_hash = self._first.prefix_map.block_hash
            self._free.prepend([each for each in freed if block_hash(BlockId(each + self._offset)) is None])
            self._free.append([each for each in freed if block_hash(BlockId(each + self._offset)) is not None])
        if uses is not None and not uses:
            del self._uses[session_number]

    def snapshot(self) -> HostTierSnapshot:
        """The tier at this moment; read it before `end_snapshot`. O(copies under way)."""
        copying = ((source, *of) for source, of in self._copying.copy().items())
        return HostTierSnapshot(
            self._free.snapshot(),
            Column(self.uses, slice_length=1),
            Column(copying, slice_length=1024),
            Column(list(self._to_clean)),
            self._num_unscanned,
            self._num_large,
            replace(self.counters),
        )

    def end_snapshot(self) -> None:
        """Ends a snapshot. The rest of it can no longer be read."""
        self._free.end_snapshot()

    def restore(self, snapshot: HostTierSnapshot) -> None:
        """Makes a new tier as it was, after the prefix map.

        Raises:
            ValueError: The snapshot is not of a tier of this size.
            LookupError: A block does not exist.
        """
        self._free.restore(snapshot.free_list, [BlockId(i) for i in range(self.num_blocks + 1)])
        for use in snapshot.uses.values:
            self._note_use(use)
        self._copying = {source: (session_number, target) for source, session_number, target in snapshot.copying.values}
        self._to_clean, self._num_unscanned = deque(snapshot.to_clean.values), snapshot.num_unscanned
        self._num_large = snapshot.num_large
        self.counters = snapshot.counters
