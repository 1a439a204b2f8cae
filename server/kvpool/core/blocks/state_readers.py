"""The states from which the most recent steps of requests end their prompts.

A hit of another request waits for these steps, as in vLLM 0.32; see `KVCacheManager.allocate_slots`. A search of all
requests of the session took 3 s for a step of 2,000 hits.

1. The record follows from the requests, so that a restored pool makes it again.
2. A change costs O(groups), and a move of the later ones of the steps that end prompts from the same state. These are
   in order when they are recorded, unless tokens were rejected.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence

from kvpool.core.blocks.state_manager import StateManager
from kvpool.core.ids import BlockHash, GroupId, SessionNumber, StepNumber
from kvpool.core.sessions.request import Request

_Key = tuple[SessionNumber, GroupId, BlockHash]


class StateReaders:
    """The record of one pool."""

    __slots__ = ("_by_request", "_managers", "_steps")

    def __init__(self, managers: Sequence[StateManager]) -> None:
        self._managers = [manager for manager in managers if manager.waits_for_readers]
        self._by_request: dict[Request, tuple[StepNumber, list[_Key]]] = {}
        self._steps: dict[_Key, list[StepNumber]] = {}  # ascending, one per request

    def record(self, request: Request) -> None:
        """Records what the most recent step of a request reads. Call it after each change of the request."""
        if not self._managers:  # no hit waits for a reader
            return
        recorded = self._by_request.pop(request, None)
        if recorded:
            step, keys = recorded
            for key in keys:
                steps = self._steps[key]
                del steps[bisect_right(steps, step) - 1]
                if not steps:
                    del self._steps[key]
        number, step = request.session_number, request.filling_sequence
        read = [(each.group_id, each.state_read(request)) for each in self._managers]
        keys = [(number, group_id, block_hash) for group_id, block_hash in read if block_hash is not None]
        for key in keys:
            insort(self._steps.setdefault(key, []), step)
        if keys:
            self._by_request[request] = step, keys

    def is_read_after(self, manager: StateManager, request: Request, num_blocks: int, launched: StepNumber) -> bool:
        """Whether a step after `launched` of the request's session reads the state at the end of a hit.

        Args:
            manager: The group's manager.
            request: The request that has the hit.
            num_blocks: Number of blocks of the hit.
            launched: The step.
        """
        if not manager.waits_for_readers:
            return False
        steps = self._steps.get((request.session_number, manager.group_id, manager.hashes(request)[num_blocks - 1]))
        return steps is not None and steps[-1] > launched
