"""Blocks that steps in flight of open sessions may still read or write.

A scheduler that launches a step before it has the results of the step before frees blocks while steps run on them. The
device runs the steps of one session in order, so the next step of this session may write them. No order protects them
from the steps of other sessions.

1. The steps of a session in flight are those that it reported as launched and not yet as executed. Work on credit has
   no number: with a step that frees while only such work is in flight, the session reports the number of that step. A
   session that reports no launched steps states with each free or preemption that no step runs on the blocks.
2. What a session frees while steps are in flight goes to no other session until it has reported as executed the step
   that it reported as launched then. The session itself can take it at once: the free list has a holder for it.
3. If a block is then in another session's table, or another session hits it, it is *kept*: it stays in use until that
   report, as if it was in one more table. Not even the session itself takes it. While a pool has one session, no block
   is kept, and this session gets the blocks that it would get without these rules.
4. A session that closes states that its steps are done. If it ends otherwise, its quarantine takes these blocks over.
   A session that reports no step as executed while blocks wait ends as if its lease had expired, see `Session`.
5. Contents need no rule of their own: blocks of steps in flight are pending, see `PrefixMap`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.core import ids
from kvpool.core.blocks.block_pool import BlockPool
from kvpool.core.blocks.free_list import NO_STEP
from kvpool.core.blocks.quota import Quotas
from kvpool.core.ids import BlockId, GroupId, SessionNumber
from kvpool.core.sessions.request import Holding

_ALL: Final = ids.StepNumber(2**62)
"""A step number after every step that a session can make."""


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """A block that is kept for steps of a session.

    Attributes:
        session_number: The session.
        block_id: The block.
        group_id: Group under which it is counted as used.
        until: Step whose execution ends this.
    """

    session_number: SessionNumber
    block_id: BlockId
    group_id: GroupId
    until: ids.StepNumber


class StepsInFlight:
    """The blocks of a pool that steps in flight may use although their session has freed them.

    Attributes:
        is_keeping: Whether the step that is applied keeps the shared blocks that it frees, see rule 3.
        kept: The blocks that are kept, by session and block. Read-only.
    """

    def __init__(self, blocks: BlockPool, quotas: Quotas) -> None:
        self.is_keeping = False
        self._blocks = blocks
        self._quotas = quotas
        self.kept: dict[SessionNumber, OrderedDict[BlockId, KeptBlock]] = {}

    def begin_frees(self, launched: ids.StepNumber, *, has_others: bool) -> None:
        """Makes what the user of the free list frees from now on wait for the step `launched`."""
        self._blocks.free_list.until = launched
        self.is_keeping = has_others

    def end_frees(self) -> None:
        """Ends what `begin_frees` began."""
        self._blocks.free_list.until = NO_STEP
        self.is_keeping = False

    def keep_shared(self, group_id: GroupId, block_ids: Sequence[BlockId]) -> None:
        """Keeps those blocks of a table that other tables contain, too. The caller frees the table next."""
        free_list = self._blocks.free_list
        if free_list.num_shared:
            for block_id in block_ids:
                if free_list.ref_cnt(block_id) > 1:
                    self._keep(KeptBlock(free_list.user, block_id, group_id, free_list.until))

    def keep_hit(self, hit: Iterable[Sequence[BlockId]]) -> None:
        """Keeps those blocks, group by group, that another session holds. The caller adds them to a table next."""
        free_list = self._blocks.free_list
        for group_id, block_ids in enumerate(hit):
            for block_id, chunk in free_list.held_for_others(block_ids):
                self._keep(KeptBlock(chunk.holder, block_id, GroupId(group_id), chunk.until))

    def _keep(self, block: KeptBlock) -> None:
        kept = self.kept.setdefault(block.session_number, OrderedDict())
        if kept.pop(block.block_id, None) is None:
            self._hold(block.group_id, [block.block_id])
            holding = self._quotas.holding_of(block.session_number)
            if self._quotas.applies_to(holding):
                self._quotas.record_gained(holding, [block.block_id], ())
        kept[block.block_id] = block  # last: one that is behind a newer step waits for that, too

    def _hold(self, group_id: GroupId, block_ids: Sequence[BlockId]) -> None:
        self._blocks.group_counters[group_id].used_blocks += self._blocks.free_list.hold(block_ids)

    def release(self, session_number: SessionNumber, executed: ids.StepNumber = _ALL) -> None:
        """Releases what waits for steps of a session up to `executed`. O(released blocks that were kept, chunks)."""
        self._blocks.free_list.release(session_number, executed)
        if self._blocks.host:
            self._blocks.host.release(session_number, executed)
        if holding := self._quotas.holding_of(session_number):
            self._quotas.cover(holding)
        kept = self.kept.get(session_number)
        while kept:
            block = next(iter(kept.values()))
            if block.until > executed:
                return
            del kept[block.block_id]
            self.free(block.group_id, [block.block_id], holding)
        self.kept.pop(session_number, None)

    def has_waiting(self, session_number: SessionNumber, launched: ids.StepNumber) -> bool:
        """Whether blocks wait for steps of a session, all of which are up to `launched`."""
        host = self._blocks.host
        return (
            session_number in self.kept
            or self._blocks.free_list.num_held_by(session_number) > 0
            or (host is not None and host.has_waiting(session_number, launched))
        )

    def free(self, group_id: GroupId, block_ids: Sequence[BlockId], holding: Holding | None = None) -> None:
        """Frees blocks that are in no table, and count for a session with this record of held blocks, if any."""
        self._blocks.free_blocks(group_id, block_ids)
        if self._quotas.applies_to(holding):
            self._quotas.record_lost(holding, block_ids)

    def take_over(self, session_number: SessionNumber) -> list[tuple[GroupId, list[BlockId]]]:
        """Takes everything that waits for steps of a session. Pass the result to `free` when the steps are done."""
        prefix_map, by_group = self._blocks.prefix_map, dict[GroupId, list[BlockId]]()
        for block_id in self._blocks.free_list.held_by(session_number):
            by_group.setdefault(prefix_map.group_id(block_id), []).append(block_id)
        for group_id, block_ids in by_group.items():
            self._hold(group_id, block_ids)
        for block in self.kept.pop(session_number, {}).values():
            by_group.setdefault(block.group_id, []).append(block.block_id)
        self._blocks.free_list.release(session_number, _ALL)
        return list(by_group.items())

    def restore(self, kept: Iterable[KeptBlock]) -> None:
        """Restores the blocks that are kept, in a restored pool, whose counts include them."""
        for block in kept:
            self.kept.setdefault(block.session_number, OrderedDict())[block.block_id] = block
