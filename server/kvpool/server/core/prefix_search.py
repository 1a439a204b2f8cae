"""The search for the longest prefix that every group can serve from the cache.

A group can serve a hit of n tokens exactly when
1. n is a multiple of its blocks' span, and all its blocks of the first n tokens but those that it skips once n tokens
   are computed are cached and visible: [num_skipped_blocks(n), n / span);
2. with EAGLE, the block after them is cached too: it is computed again, for what a draft wrote into the last slot of
   the hit may have been meant for another next token. Kinds without a slot a token (state space) need none.

A hit is the longest n within the bound that all groups can serve. The block after it may hold the request's last token,
which itself is never hit. A pool of one group does not look that far: the reference does not, and its answers stand.
Each group in turn shortens n to the longest that it can serve; n only shrinks, so this ends, and when no group shortens
it any more it is the longest: no group ever shortens it below a length that all can serve.

One group's longest: if of the blocks it needs for n number m is missing, no shorter length does without m unless it
ends at or before it, since the number of skipped blocks never rises as n falls. So n falls to where m (or, with EAGLE,
the block before m) begins, and the search goes on from there. Every step passes blocks that need no second look: all
in all O(blocks of the longest hit) and the windows looked at.
"""

from collections.abc import Sequence

from kvpool.server.core.group_manager import GroupManager
from kvpool.server.core.prefix_map import PrefixMap
from kvpool.server.core.request import Request
from kvpool.server.core.types import NULL_BLOCK, BlockHash, BlockId, WriterId

Hit = tuple[int, list[list[BlockId]]]
"""Tokens found, and each group's blocks: nulls, then blocks."""


class PrefixSearch:
    """Searches the caches of all groups of a pool. Changes nothing."""

    def __init__(self, managers: Sequence[GroupManager], prefix_map: PrefixMap, alignment_tokens: int) -> None:
        # What keeps every block is searched once and first: it tells soonest that there is no hit.
        self._closed = [manager for manager in managers if manager.spec.keeps_all]
        self._windowed = [manager for manager in managers if not manager.spec.keeps_all]
        self._num_groups = len(managers)
        self._map = prefix_map
        self._alignment = alignment_tokens

    def find(self, request: Request, max_tokens: int) -> Hit:
        """Finds the longest hit of at most `max_tokens` tokens."""
        found: list[list[BlockId]] = [[] for _ in range(self._num_groups)]
        hashes = {m.group_id: m.hashes(request) for m in (*self._closed, *self._windowed)}
        length = max_tokens
        last_tokens = max_tokens if self._num_groups == 1 else request.num_tokens
        for manager in (*self._closed, *self._windowed):
            known = last_tokens // manager.span_tokens
            length = min(length, (known - manager.num_eagle_blocks) * manager.span_tokens)
        length = self._align(length)

        for manager in self._closed:
            length, found[manager.group_id] = self._fit(manager, length, hashes[manager.group_id], request.writer)
        turn = agreed = 0
        while length and agreed < len(self._windowed):
            manager = self._windowed[turn % len(self._windowed)]
            shorter, found[manager.group_id] = self._fit(manager, length, hashes[manager.group_id], request.writer)
            agreed = agreed + 1 if shorter == length else 1
            length, turn = shorter, turn + 1

        for manager in (*self._closed, *self._windowed):
            first, end = self._range(manager, length)
            found[manager.group_id] = [NULL_BLOCK] * first + found[manager.group_id][: end - first]
        return length, found

    def _fit(
        self, manager: GroupManager, length: int, hashes: Sequence[BlockHash], reader: WriterId
    ) -> tuple[int, list[BlockId]]:
        """Finds the longest hit up to `length` that one group can serve, and its blocks from the first not skipped."""
        extra = manager.num_eagle_blocks
        while length:
            first, end = self._range(manager, length)
            found = self._map.find(manager.group_id, hashes[first : end + extra], reader)
            if len(found) == end + extra - first:
                return length, found
            length = self._align(max(first + len(found) - extra, 0) * manager.span_tokens)
            if length and self._range(manager, length)[0] == first:
                return length, found
        return 0, []

    @staticmethod
    def _range(manager: GroupManager, length: int) -> tuple[int, int]:
        return manager.num_skipped_blocks(length), length // manager.span_tokens

    def _align(self, length: int) -> int:
        return max(length, 0) // self._alignment * self._alignment
