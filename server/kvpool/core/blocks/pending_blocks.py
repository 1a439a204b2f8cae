"""The cached blocks that only the session that fills them can find.

A block is pending from the allocation of its slots until its session reports the step that fills it as executed. A step
that never publishes its blocks has a negative number, or `NEVER`.
"""

from collections.abc import Collection, Iterable
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from typing import Final

from kvpool.core.ids import BlockId, SessionNumber, StepNumber
from kvpool.core.snapshots import Column

_SOME_STEPS: Final = 64
NEVER: Final = StepNumber(2**62)
"""A step number after every step that a session can make."""


class PendingBlocks:
    """Pending blocks by session and step.

    Attributes:
        steps: Each pending block with the step that fills it. Read-only.
    """

    __slots__ = ("_by_session", "_unpublished", "steps")

    def __init__(self) -> None:
        self.steps: dict[BlockId, StepNumber] = {}
        # By session and step, in the order in which they were cached, which a restored map has too.
        self._by_session: dict[SessionNumber, dict[StepNumber, dict[BlockId, None]]] = {}
        # By session, a heap of its steps, so that no report looks at later ones. Some have no blocks any more.
        self._unpublished: dict[SessionNumber, list[StepNumber]] = {}

    def add(self, session_number: SessionNumber, sequence: StepNumber, block_ids: Collection[BlockId]) -> None:
        """Adds blocks that a step of a session fills."""
        by_step = self._by_session.get(session_number)
        if by_step is None:
            by_step = self._by_session[session_number] = {}
            self._unpublished[session_number] = []
        blocks = by_step.get(sequence)
        if blocks is None:
            blocks = by_step[sequence] = {}
            if sequence > 0:
                self._add_unpublished(session_number, sequence)
        if len(block_ids) == 1:  # filled by a decode; the calls below would cost more than they save
            (block_id,) = block_ids
            blocks[block_id], self.steps[block_id] = None, sequence
            return
        blocks.update(dict.fromkeys(block_ids))
        self.steps.update(dict.fromkeys(block_ids, sequence))

    def _add_unpublished(self, session_number: SessionNumber, sequence: StepNumber) -> None:
        """Adds a step to the heap, and removes those without blocks if they are the most. Amortized O(log steps)."""
        steps, by_step = self._unpublished[session_number], self._by_session[session_number]
        heappush(steps, sequence)
        if len(steps) > 2 * len(by_step) + _SOME_STEPS:
            steps[:] = [step for step in by_step if step > 0]
            heapify(steps)

    def _drop_session(self, session_number: SessionNumber) -> None:
        """Forgets a session without pending blocks."""
        del self._by_session[session_number], self._unpublished[session_number]

    def remove(self, session_number: SessionNumber, block_id: BlockId) -> StepNumber | None:
        """Removes a block of a session; returns the step that fills it, or None if it is not pending."""
        sequence = self.steps.pop(block_id, None)
        if sequence is not None:
            by_step = self._by_session[session_number]
            del by_step[sequence][block_id]
            if not by_step[sequence]:
                del by_step[sequence]
                if not by_step:
                    self._drop_session(session_number)
        return sequence

    def publish(self, session_number: SessionNumber, executed: StepNumber) -> None:
        """Removes the blocks that steps up to `executed` of a session fill: all sessions find them."""
        by_step = self._by_session.get(session_number)
        if not by_step:
            return
        steps = self._unpublished[session_number]
        while steps and steps[0] <= executed:
            for block_id in by_step.pop(heappop(steps), ()):
                del self.steps[block_id]
        if not by_step:
            self._drop_session(session_number)

    def hide(self, session_number: SessionNumber, block_ids: Iterable[BlockId]) -> None:
        """Marks pending blocks of a session as never to be published."""
        for block_id in block_ids:
            self.remove(session_number, block_id)
            self.add(session_number, NEVER, (block_id,))

    def has_any(self, session_number: SessionNumber) -> bool:
        """Whether blocks of a session are pending."""
        return session_number in self._by_session

    def first_of(self, session_number: SessionNumber, count: int) -> list[BlockId]:
        """At most `count` of the pending blocks of a session. O(count)."""
        by_step = self._by_session.get(session_number, {})
        return list(islice(chain.from_iterable(by_step.values()), count))

    def of(self, session_number: SessionNumber) -> list[BlockId]:
        """The pending blocks of a session, by step in the order in which the steps cached them, then by id."""
        return [b for blocks in self._by_session.get(session_number, {}).values() for b in sorted(blocks)]

    def num_by_step(self, session_number: SessionNumber) -> dict[StepNumber, int]:
        """Number of pending blocks of each step of a session."""
        return {sequence: len(blocks) for sequence, blocks in self._by_session.get(session_number, {}).items()}

    def clear(self) -> None:
        """Removes all blocks."""
        self.steps.clear()
        self._by_session.clear()
        self._unpublished.clear()

    def snapshot(self) -> Column[tuple[SessionNumber, StepNumber, list[BlockId]]]:
        """The blocks of each step of a session at this moment."""
        steps = [
            (number, sequence, list(block_ids))
            for number, by_step in self._by_session.items()
            for sequence, block_ids in by_step.items()
        ]
        return Column(steps, slice_length=64)

    def restore(self, snapshot: Column[tuple[SessionNumber, StepNumber, list[BlockId]]]) -> None:
        """Adds the blocks of a snapshot."""
        for step in snapshot.values:
            self.add(*step)
