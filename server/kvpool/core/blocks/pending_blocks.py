"""The cached blocks that only the session that fills them can find.

A block is pending from the allocation of its slots until its session reports the step that fills it as executed. A step
that never publishes its blocks has a negative number, or `NEVER`.
"""

from collections.abc import Collection, Iterable
from itertools import chain, islice
from typing import Final

from kvpool.core.ids import BlockId, SessionNumber, StepNumber
from kvpool.core.snapshots import Column

NEVER: Final = StepNumber(2**62)
"""A step number after every step that a session can make."""


class PendingBlocks:
    """Pending blocks by session and step.

    Attributes:
        steps: Each pending block with the step that fills it. Read-only.
    """

    __slots__ = ("_by_session", "steps")

    def __init__(self) -> None:
        self.steps: dict[BlockId, StepNumber] = {}
        # By session and step, in the order in which they were cached, which a restored map has too.
        self._by_session: dict[SessionNumber, dict[StepNumber, dict[BlockId, None]]] = {}

    def add(self, session_number: SessionNumber, sequence: StepNumber, block_ids: Collection[BlockId]) -> None:
        """Adds blocks that a step of a session fills."""
        by_step = self._by_session.get(session_number)
        if by_step is None:
            by_step = self._by_session[session_number] = {}
        blocks = by_step.get(sequence)
        if blocks is None:
            blocks = by_step[sequence] = {}
        if len(block_ids) == 1:  # filled by a decode; the calls below would cost more than they save
            (block_id,) = block_ids
            blocks[block_id], self.steps[block_id] = None, sequence
            return
        blocks.update(dict.fromkeys(block_ids))
        self.steps.update(dict.fromkeys(block_ids, sequence))

    def remove(self, session_number: SessionNumber, block_id: BlockId) -> StepNumber | None:
        """Removes a block of a session; returns the step that fills it, or None if it is not pending."""
        sequence = self.steps.pop(block_id, None)
        if sequence is not None:
            by_step = self._by_session[session_number]
            del by_step[sequence][block_id]
            if not by_step[sequence]:
                del by_step[sequence]
                if not by_step:
                    del self._by_session[session_number]
        return sequence

    def publish(self, session_number: SessionNumber, executed: StepNumber) -> None:
        """Removes the blocks that steps up to `executed` of a session fill: all sessions find them."""
        by_step = self._by_session.get(session_number)
        if not by_step:
            return
        for sequence in [sequence for sequence in by_step if 0 < sequence <= executed]:
            for block_id in by_step.pop(sequence):
                del self.steps[block_id]
        if not by_step:
            del self._by_session[session_number]

    def hide(self, session_number: SessionNumber, block_ids: Iterable[BlockId]) -> None:
        """Marks pending blocks of a session as never to be published."""
        for block_id in block_ids:
            self.remove(session_number, block_id)
            self.add(session_number, NEVER, (block_id,))

    def renumber_session(self, session_number: SessionNumber, new: SessionNumber) -> list[BlockId]:
        """Moves the blocks of a session to number `new`, which has filled none yet; returns them."""
        blocks = self.of(session_number)
        if blocks:
            self._by_session[new] = self._by_session.pop(session_number)
        return blocks

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
