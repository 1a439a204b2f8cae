"""Searches for the longest prefix that every group can serve from the cache. Groups that are not cached have no say.

A group can serve a hit of n tokens exactly when both conditions hold:

1. n is a multiple of the group's block span. All blocks of the first n tokens are cached and visible, except those
   that nothing reads once n tokens are computed. The needed blocks are [num_unread_blocks(n), n / span).
2. With EAGLE, the block after them is cached too. That block is computed again, because the draft state in the last
   slot of the hit can depend on a different next token. Kinds without a slot per token (state space) do not need it.
   Over mixed kinds vLLM 0.14.1 drops one more block in each round of its search, until nothing is left.

vLLM has a search per attention kind and coordinators over them. This one, by `num_unread_tokens` alone, returns the
same hits in all recorded schedules, and covers what vLLM does not support: any mix of kinds and block sizes, chunks
with EAGLE. A brute-force model checks it (`tests/property/test_group_mixes.py`).

With partial hits, n is a multiple of the hash block only. A state is then looked up by the hash of its n tokens, at
each n. Full attention has the longest run of cached blocks, and the longest tail in the block after them; it can serve
each n up to there.

A hit is the longest n within the bound that all groups can serve. The block after the hit may hold the request's last
token, which itself is never part of a hit. A pool with one group does not look that far: vLLM does not, and kvpool
returns the same hits.

Each group in turn shortens n to the longest length that the group can serve. The search ends because n only shrinks.
When no group shortens n any more, n is the longest hit: no group shortens n below a length that all groups can serve.

The longest length of one group: suppose that block m is missing among the blocks that a hit of n tokens needs. Every
shorter length needs m too, unless it ends at or before m, because the number of unread blocks never rises as n falls.
So n falls to the start of m (or, with EAGLE, of the block before m), and the search continues there. Blocks that were
found stay found, so each block of a group is looked up at most once: O(blocks looked up) per group, independent of the
other groups and of the length of the request.

With sparse caching of windows, the leading groups (those with the spec of the first group) determine the shared prefix
boundary: the longest hit that they could serve alone, if it is longer than the hit; else 0. With this boundary, a
prefix that a request shares with others is kept for the windows, too, from then on.

A window of few blocks makes many tries for a long request that misses. After MAX_TRIES tries a look-up stops and
finds nothing, which is valid: a shorter hit than the cache could serve is still a hit.

A look-up ends early if the hit is shorter than the longest hit that the request could have, which the whole blocks of
the group with the smallest blocks determine. The group that shortened the hit last ended it. The reason is that of the
first block that this group lacked when it did so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool.core.blocks.group_manager import GroupManager
from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.ids import NULL_BLOCK, BlockHash, BlockId, MapId, SessionNumber
from kvpool.core.sessions.request import Request
from kvpool.core.statistics import Miss, MissReason

MAX_TRIES: Final = 2**17
"""Maximum number of tries of one look-up, over all groups."""
TRY_PROBES: Final = 4
"""Cost of a try, in hashes found, in addition to the hashes that it finds. Each group also costs this much once."""


NOT_IN_SCOPE: Final = (MissReason.UNSEEN, MissReason.OTHER_SCOPE)
"""What is known of a block that the scope does not know. They become another reason together, or a tenant, to whom both
count as unseen, could tell them apart."""


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """A prefix that was found in the cache.

    Attributes:
        block_ids: The blocks, group by group; null where a group needs none. The blocks are not held: they can be
            evicted until they are allocated.
        num_tokens: Length of the prefix.
        num_shared_tokens: Tokens of those blocks that another session filled, in the group that has most of them.
        num_probes: Cost of the search, in hashes found.
        shared_prefix_boundary_tokens: See `Request`, which copies the value when the request gets these blocks or when
            a step looked them up. None for the result of an earlier step.
        miss: Where and why the search ended early; None if it did not, and for the result of an earlier step.
        num_host_tokens: If the blocks of host memory among these were replaced, see `KVCacheManager.num_host_tokens`.
    """

    block_ids: tuple[Sequence[BlockId], ...]
    num_tokens: int
    num_shared_tokens: int = 0
    num_probes: int = field(default=0, compare=False)
    shared_prefix_boundary_tokens: int | None = field(default=None, compare=False)
    miss: Miss | None = field(default=None, compare=False)
    num_host_tokens: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class SearchEnd:
    """Where a search in one group alone ended.

    Attributes:
        manager: The group's manager.
        num_tokens: The longest hit that the group can serve.
        max_tokens: The longest hit that it could serve if it had cached all of the request.
        missing_block: Index of the first block that it lacks for a longer hit; None if it lacks none.
        missing_hash: Hash of this block.
        reason: Why it lacks this block.
    """

    manager: GroupManager
    num_tokens: int
    max_tokens: int
    missing_block: int | None = None
    missing_hash: BlockHash = BlockHash(b"")  # noqa: RUF009 - a NewType of bytes is immutable
    reason: MissReason | None = None


@dataclass(slots=True, eq=False)
class _GroupSearch:
    """The search of one group for one request.

    Attributes:
        manager: The group's manager.
        prefix_map: The cached blocks.
        map_id: The map in which the request's blocks of the group are found.
        span_tokens: Tokens of a block; of a hash block if the group has states at which hits end within blocks.
        hashes: The request's hashes, one per `span_tokens` tokens.
        tail_hashes: Its hashes, one per hash block, if hits of full attention can end within blocks; else none.
        reader: The request's session.
        low: Index of the first found block.
        pieces: The found blocks from `low` on, last piece first.
        num_tries: Number of look-ups of consecutive blocks.
        num_found: Number of blocks that they found.
        first_missing: Index of the first block that was missing when the group last shortened a hit.
        hit_tokens: Length of the longest hit of full attention that can end within a block; -1 before the search.
        joint: The searches that find the same hit together with this one.
    """

    manager: GroupManager
    prefix_map: PrefixMap
    map_id: MapId
    span_tokens: int
    hashes: Sequence[BlockHash]
    tail_hashes: Sequence[BlockHash]
    reader: SessionNumber
    low: int
    pieces: list[list[BlockId]] = field(default_factory=list)
    num_tries: int = 0
    num_found: int = 0
    first_missing: int = 0
    hit_tokens: int = -1
    joint: Sequence["_GroupSearch"] = ()

    def fit(self, length: int, alignment: int, max_tries: int) -> int:
        """Returns the longest hit of at most `length` tokens that the group can serve.

        Args:
            length: Upper bound in tokens, a multiple of `alignment`.
            alignment: The hit is a multiple of this number of tokens.
            max_tries: Maximum number of tries, those of earlier calls included. The result is 0 when they are used up.
        """
        if self.tail_hashes:
            return self._fit_tail(length)
        span_tokens, num_extra = self.span_tokens, self.manager.num_eagle_blocks
        longest = length
        while length and self.num_tries < max_tries:
            first = self.manager.spec.num_unread_tokens(length) // span_tokens
            unknown = min(self.low, length // span_tokens + num_extra)
            if first >= unknown:
                return length
            found = self.prefix_map.find(self.map_id, self.hashes, first, unknown, self.reader)
            self.num_tries += 1
            self.num_found += len(found)
            is_whole = len(found) == unknown - first
            if not is_whole or unknown < self.low:  # earlier pieces do not continue this one
                self.pieces.clear()
            self.pieces.append(found)
            self.low = first
            if is_whole:
                return length
            if length == longest:
                self.first_missing = first + len(found)
            length = max(first + len(found) - num_extra, 0) * span_tokens // alignment * alignment
        return 0

    def _fit_tail(self, length: int) -> int:
        """As `fit`, of full attention with partial hits. Groups of one spec are searched together, as in vLLM."""
        if self.hit_tokens < 0:
            span, unit = self.span_tokens, self.manager.hit_span_tokens
            joint, num_dropped = self.joint or (self,), self.manager.num_eagle_blocks * unit
            bound = min(length + num_dropped, len(self.tail_hashes) * unit)
            runs = [each.prefix_map.find(each.map_id, each.hashes, 0, bound // span, each.reader) for each in joint]
            num_full = min(map(len, runs))
            found_tokens, tails = num_full * span, [list[BlockId]() for _ in joint]
            longest = min(bound, found_tokens + span - unit)
            for end in range(longest // unit, found_tokens // unit, -1):
                found = [self.prefix_map.find(m.map_id, self.tail_hashes, end - 1, end, m.reader) for m in joint]
                self.num_tries += 1
                if all(found):
                    found_tokens, tails = end * unit, found
                    break
            self.num_tries += 1
            missing = longest // unit - 1 if num_full == bound // span else (num_full + 1) * span // unit - 1
            for each, run, tail in zip(joint, runs, tails, strict=True):
                each.low, each.pieces = 0, [tail, run[:num_full]]
                each.hit_tokens = max(found_tokens - num_dropped, 0)
                each.num_found += len(run) + len(tail)
                each.first_missing = missing
        return min(length, self.hit_tokens)

    def blocks(self, length: int) -> list[BlockId]:
        """Returns the blocks of a hit of `length` tokens, which the group can serve."""
        count = -(-length // self.span_tokens)
        if not count:
            return []
        blocks = [NULL_BLOCK] * min(self.low, count)
        for piece in reversed(self.pieces):
            blocks += piece
        if self.span_tokens != self.manager.span_tokens:  # a state is the last of its block
            return [NULL_BLOCK] * (-(-length // self.manager.span_tokens) - 1) + blocks[count - 1 : count]
        del blocks[count:]
        return blocks

    @property
    def missing_hash(self) -> BlockHash:
        """Hash of the first missing block."""
        return (self.tail_hashes or self.hashes)[self.first_missing]

    @property
    def missing_block(self) -> int:
        """Index of the first missing block in the group's table."""
        per_block = self.manager.span_tokens // (self.manager.hit_span_tokens if self.tail_hashes else self.span_tokens)
        return self.first_missing // per_block

    def why_missing(self) -> MissReason:
        """Why the first missing block is missing."""
        return self.prefix_map.why_missing(self.map_id, self.missing_hash)


class PrefixSearch:
    """Searches the prefix caches of all groups of a pool. Read-only."""

    def __init__(
        self,
        managers: Sequence[GroupManager],
        prefix_map: PrefixMap,
        alignment_tokens: int,
        *,
        finds_shared_prefix_boundary: bool = False,
    ) -> None:
        self._num_groups = len(managers)
        self._uncached = [manager for manager in managers if not manager.spec.is_cached]
        managers = [manager for manager in managers if manager.spec.is_cached] or managers
        # Groups that keep every block come first: they detect a miss soonest.
        self._managers = sorted(managers, key=lambda manager: not manager.spec.keeps_all)
        self._num_leading = 0
        if finds_shared_prefix_boundary:
            first = self._managers[0].spec
            self._managers.sort(key=lambda manager: (not manager.spec.keeps_all, manager.spec != first))
            self._num_leading = sum(manager.spec == first for manager in managers)
        self._selecting = [manager for manager in managers if manager.selects_hashes]
        self._map = prefix_map
        self._alignment = alignment_tokens
        self._smallest_span = min(manager.hit_span_tokens for manager in managers)
        self._has_tails = any(manager.resumes_within and manager.spec.keeps_all for manager in managers)
        self._largest = max(managers, key=lambda manager: manager.span_tokens)
        self._has_full = self._managers[0].spec.keeps_all

    def find(self, request: Request, max_tokens: int) -> ComputedBlocks:
        """Finds the longest hit of at most `max_tokens` tokens."""
        num_probes = TRY_PROBES * len(self._managers)
        for manager in self._selecting:
            num_probes += manager.num_hashes_to_select(request)
        searches = self._searches(request)
        if self._has_tails:
            self._join(searches)
        last_tokens = max_tokens if self._num_groups == 1 else request.num_tokens
        bounds = [(last_tokens // m.hit_span_tokens - m.num_eagle_blocks) * m.hit_span_tokens for m in self._managers]
        bound = min(max_tokens, *bounds)
        length, boundary, tries_left = bound, 0, MAX_TRIES
        ended_by: _GroupSearch | None = None
        if self._num_leading:
            leading = searches[: self._num_leading]
            length = min(max_tokens, *bounds[: len(leading)])
            length, tries_left, ended_by = self._longest_common(leading, length, tries_left)
            boundary = length
        length, tries_left, last = self._longest_common(searches, min(length, bound), tries_left)

        found: list[list[BlockId]] = [[] for _ in range(self._num_groups)]
        for each in searches:
            found[each.manager.group_id] = each.blocks(length)
            num_probes += TRY_PROBES * each.num_tries + each.num_found
        for manager in self._uncached:  # of which the request gets new blocks behind these
            found[manager.group_id] = [NULL_BLOCK] * manager.num_skipped_blocks(length)
        num_shared = self.num_shared_tokens(request, found, length)
        boundary = boundary if boundary > length else 0
        miss: Miss | None = None
        longest = bound // self._alignment * self._alignment
        if length < longest:
            miss = self._miss(longest - length, last or ended_by, has_tries=tries_left > 0)
        elif self._alignment != self._smallest_span:
            miss = self._alignment_miss(max(longest, 0), min(max_tokens, max(bounds)))
        return ComputedBlocks(tuple(found), length, num_shared, num_probes, boundary, miss)

    def ends(self, request: Request, max_tokens: int) -> list[SearchEnd]:
        """Searches in each group alone, in the order of the groups. O(blocks of the request)."""
        ends = []
        last_tokens = max_tokens if self._num_groups == 1 else request.num_tokens
        for search in self._searches(request):
            manager = search.manager
            span = manager.hit_span_tokens
            longest = max(min(max_tokens // span, last_tokens // span - manager.num_eagle_blocks) * span, 0)
            length = search.fit(longest, span, MAX_TRIES)
            if length == longest:
                ends.append(SearchEnd(manager, length, longest))
            else:
                missing, reason = search.missing_block, search.why_missing()
                ends.append(SearchEnd(manager, length, longest, missing, search.missing_hash, reason))
        return sorted(ends, key=lambda end: end.manager.group_id)

    def _searches(self, request: Request) -> list[_GroupSearch]:
        searches = []
        for manager in self._managers:
            hashes, span_tokens = manager.hashes(request), manager.span_tokens
            tail_hashes: Sequence[BlockHash] = ()
            if manager.resumes_within and manager.spec.keeps_all:
                tail_hashes = request.hashes
            elif manager.resumes_within:
                hashes, span_tokens = request.hashes, manager.hit_span_tokens
            map_id, reader, low = manager.map_id(request), request.session_number, len(hashes)
            searches.append(_GroupSearch(manager, self._map, map_id, span_tokens, hashes, tail_hashes, reader, low))
        return searches

    @staticmethod
    def _join(searches: Sequence[_GroupSearch]) -> None:
        """Joins the searches in groups of full attention with equal specs whose hits can end within blocks."""
        for search in searches:
            if search.tail_hashes:
                search.joint = [each for each in searches if each.manager.spec == search.manager.spec]

    def _miss(self, num_tokens: int, ended_by: _GroupSearch | None, *, has_tries: bool) -> Miss | None:
        """The miss of a search that a group ended, `num_tokens` before the longest hit."""
        if ended_by is None:
            return None
        manager = ended_by.manager
        reason = ended_by.why_missing() if has_tries else MissReason.SEARCH_LIMIT
        if self._has_full and not manager.spec.keeps_all and reason in NOT_IN_SCOPE:
            reason = MissReason.NOT_KEPT
        return manager.group_id, reason, num_tokens

    def _alignment_miss(self, longest: int, max_tokens: int) -> Miss | None:
        """The miss of a search that found the longest hit, because whole small blocks may follow it."""
        num_tokens = max_tokens // self._smallest_span * self._smallest_span - longest
        return (self._largest.group_id, MissReason.ALIGNMENT, num_tokens) if num_tokens > 0 else None

    def num_shared_tokens(self, request: Request, block_ids: Sequence[Sequence[BlockId]], num_tokens: int) -> int:
        """See `ComputedBlocks`: of a hit of `num_tokens` tokens, group by group, whose blocks are cached. O(blocks)."""
        most = 0
        for manager in self._managers:
            held = [block_id for block_id in block_ids[manager.group_id] if block_id != NULL_BLOCK]
            num_shared = len(held) - self._map.num_written_by(held, request.session_number)
            most = max(most, num_shared * manager.span_tokens)
        return min(most, num_tokens)

    def _longest_common(
        self, searches: Sequence[_GroupSearch], length: int, tries_left: int
    ) -> tuple[int, int, _GroupSearch | None]:
        """Searches in several groups.

        Returns:
            The longest hit up to `length` that all these groups can serve, the tries that are left, and the group that
            shortened it last; None if none did.
        """
        length = max(length, 0) // self._alignment * self._alignment
        turn = num_agreed = 0
        ended_by: _GroupSearch | None = None
        while length and num_agreed < len(searches):
            search = searches[turn % len(searches)]
            before = search.num_tries
            shorter = search.fit(length, self._alignment, before + tries_left)
            tries_left -= search.num_tries - before
            if shorter == length:
                num_agreed += 1
            else:
                num_agreed, ended_by = 1, search
            length, turn = shorter, turn + 1
        return length, tries_left, ended_by
