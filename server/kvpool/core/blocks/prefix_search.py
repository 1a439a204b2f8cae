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
the block before m) begins, and the search goes on from there. What was found stays found, so each block of a group is
looked up once at most: O(blocks looked up) a group, whatever the others do, however long the request is.

Where windows are cached sparsely, the leading groups, those of the first group's spec, tell the junction: the longest
hit that they could serve alone, if that is longer; else 0. So the reference finds what a prefix has in common with
others that was not kept of a window, and then is.

A window of few blocks makes many tries of a long request that misses. A look-up that has made MAX_TRIES without an end
finds nothing: a hit that is shorter than what is cached is still one.
"""

from collections.abc import Sequence
from typing import Final

from kvpool.core.blocks.group_manager import GroupManager
from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.ids import NULL_BLOCK, BlockHash, BlockId, SessionNumber
from kvpool.core.sessions.request import Request

MAX_TRIES: Final = 2**17
"""Tries, of all groups together, after which a look-up is given up."""
TRY_PROBES: Final = 4
"""What a try costs beside the hashes that it finds, in hashes found; a group costs as much before its first."""

Hit = tuple[int, list[list[BlockId]], int, int]
"""Tokens found; each group's blocks: nulls, then blocks; what the search cost, in hashes found; the junction."""


class _Run:
    """What one group has found for a request: the pieces, the last one first, are its blocks from `low` on."""

    __slots__ = (
        "_hashes",
        "_low",
        "_map",
        "_pieces",
        "_reader",
        "extra",
        "manager",
        "num_found",
        "num_tries",
        "span_tokens",
    )

    def __init__(
        self, manager: GroupManager, hashes: Sequence[BlockHash], prefix_map: PrefixMap, reader: SessionNumber
    ) -> None:
        self.manager = manager
        self.span_tokens = manager.span_tokens
        self.extra = manager.num_eagle_blocks
        self.num_tries = 0
        self.num_found = 0
        self._hashes = hashes
        self._low = len(hashes)
        self._pieces: list[list[BlockId]] = []
        self._map = prefix_map
        self._reader = reader

    def fit(self, length: int, alignment: int, max_tries: int) -> int:
        """The longest hit up to `length`, both multiples of `alignment`, that the group can serve.

        0 if that was not found in `max_tries`, those of earlier calls included.
        """
        while length and self.num_tries < max_tries:
            first = self.manager.num_skipped_blocks(length)
            unknown = min(self._low, length // self.span_tokens + self.extra)
            if first >= unknown:
                return length
            found = self._map.find(self.manager.group_id, self._hashes, first, unknown, self._reader)
            self.num_tries += 1
            self.num_found += len(found)
            is_whole = len(found) == unknown - first
            if not is_whole or unknown < self._low:  # nothing that was found before follows on it
                self._pieces.clear()
            self._pieces.append(found)
            self._low = first
            if is_whole:
                return length
            length = max(first + len(found) - self.extra, 0) * self.span_tokens // alignment * alignment
        return 0

    def blocks(self, length: int) -> list[BlockId]:
        """The blocks of a hit of `length` tokens, which the group can serve."""
        count = length // self.span_tokens
        if not count:
            return []
        blocks = [NULL_BLOCK] * min(self._low, count)
        for piece in reversed(self._pieces):
            blocks += piece
        del blocks[count:]
        return blocks


class PrefixSearch:
    """Searches the caches of all groups of a pool. Changes nothing."""

    def __init__(
        self,
        managers: Sequence[GroupManager],
        prefix_map: PrefixMap,
        alignment_tokens: int,
        *,
        finds_shared_prefix_boundary: bool = False,
    ) -> None:
        # What keeps every block comes first: it tells soonest that there is no hit.
        self._managers = sorted(managers, key=lambda manager: not manager.spec.keeps_all)
        self._num_leading = 0
        if finds_shared_prefix_boundary:
            first = self._managers[0].spec
            self._managers.sort(key=lambda manager: (not manager.spec.keeps_all, manager.spec != first))
            self._num_leading = sum(manager.spec == first for manager in managers)
        self._joining = [manager for manager in managers if manager.joins_hashes]
        self._map = prefix_map
        self._alignment = alignment_tokens

    def find(self, request: Request, max_tokens: int) -> Hit:
        """Finds the longest hit of at most `max_tokens` tokens."""
        num_probes = TRY_PROBES * len(self._managers)
        for manager in self._joining:
            num_probes += manager.num_hashes_to_join(request)
        runs = [_Run(manager, manager.hashes(request), self._map, request.session_number) for manager in self._managers]
        last_tokens = max_tokens if len(runs) == 1 else request.num_tokens
        bounds = [(last_tokens // run.span_tokens - run.extra) * run.span_tokens for run in runs]
        length, junction, tries_left = max_tokens, 0, MAX_TRIES
        if self._num_leading:
            leading = runs[: self._num_leading]
            length, tries_left = self._agreed(leading, min(length, *bounds[: len(leading)]), tries_left)
            junction = length
        length, _ = self._agreed(runs, min(length, *bounds), tries_left)

        found: list[list[BlockId]] = [[] for _ in runs]
        for run in runs:
            found[run.manager.group_id] = run.blocks(length)
            num_probes += TRY_PROBES * run.num_tries + run.num_found
        return length, found, num_probes, junction if junction > length else 0

    def _agreed(self, runs: Sequence[_Run], length: int, tries_left: int) -> tuple[int, int]:
        """The longest hit up to `length` that all these groups can serve, and how many tries are left then."""
        length = max(length, 0) // self._alignment * self._alignment
        turn = agreed = 0
        while length and agreed < len(runs):
            run = runs[turn % len(runs)]
            before = run.num_tries
            shorter = run.fit(length, self._alignment, before + tries_left)
            tries_left -= run.num_tries - before
            agreed = agreed + 1 if shorter == length else 1
            length, turn = shorter, turn + 1
        return length, tries_left
