"""Counters of a pool: plain integers that are updated while the pool works, and read on request."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, TypeAlias

from kvpool.core.ids import GroupId
from kvpool.core.steps.columns import LOOKING_UP, Operation, Step

RECENT_REQUESTS: Final = 1000
_ADMITTING: Final = frozenset((*LOOKING_UP, Operation.ADMIT))


@dataclass(slots=True)
class PrefixCacheStats:
    """Look-up counters since the pool was created. Look-ups of preempted requests are counted separately.

    A look-up counts once, when slots are allocated for its request, unless it is one that counts at once.

    Attributes:
        requests: Look-ups.
        queries_tokens: Tokens queried.
        hits_tokens: Tokens found.
        preempted_requests: Look-ups of requests that had been preempted.
        preempted_queries_tokens: Tokens that those look-ups queried.
        preempted_hits_tokens: Tokens that those look-ups found.
        resets: Resets of the prefix cache.
        shared_hits_tokens: Tokens found, by all look-ups, in blocks that another session filled.
        host_hits_tokens: Tokens found, by all look-ups, in blocks of host memory.
    """

    requests: int = 0
    queries_tokens: int = 0
    hits_tokens: int = 0
    preempted_requests: int = 0
    preempted_queries_tokens: int = 0
    preempted_hits_tokens: int = 0
    resets: int = 0
    shared_hits_tokens: int = 0
    host_hits_tokens: int = 0


class RecentHitRate:
    """Hit rate over the last 1,000 look-ups since the last reset. Look-ups of preempted requests are excluded."""

    __slots__ = ("_hits", "_queries", "_recent")

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque()
        self._queries = 0
        self._hits = 0

    def observe(self, queries_tokens: int, hits_tokens: int) -> None:
        """Counts one look-up."""
        self._recent.append((queries_tokens, hits_tokens))
        self._queries += queries_tokens
        self._hits += hits_tokens
        if len(self._recent) > RECENT_REQUESTS:
            queries, hits = self._recent.popleft()
            self._queries -= queries
            self._hits -= hits

    def lookups(self) -> list[tuple[int, int]]:
        """Tokens queried and found by each of these look-ups. `observe` them to make an equal object."""
        return list(self._recent)

    def reset(self) -> None:
        """Removes all look-ups."""
        self._recent.clear()
        self._queries = self._hits = 0

    @property
    def rate(self) -> float:
        """Tokens found per token queried, [0, 1]; 0 if no tokens were queried."""
        return self._hits / self._queries if self._queries else 0.0


@dataclass(slots=True)
class ActivityCounters:
    """Counters of a pool's activity since it was created.

    Attributes:
        allocations: Successful allocations.
        refusals: Allocations that failed because too few blocks were free.
        steps: Steps applied, unary calls included.
        operations: Operations in those steps.
        retries: Steps that were sent again and answered from memory.
        sessions_opened: Sessions opened.
        sessions_closed: Sessions closed by their scheduler.
        leases_expired: Sessions whose lease expired.
        epoch_ends: Sessions ended because a rank was lost.
        evicted_sessions: Sessions ended by an operator.
        suspensions: Times that a missing rank stopped allocation.
        processes_gone: Sessions ended because a process of theirs exited.
        waits_admission: Steps with a look-up or an admission, of sessions with slots in reserve.
        waits_prefill: Other steps that allocate several tokens of a request, of these sessions.
        waits_decode: Other steps that allocate, of these sessions: a request has used its reserve up, or got none.
        waits_exact: Steps of sessions without slots in reserve, which wait for each answer.
    """

    allocations: int = 0
    refusals: int = 0
    steps: int = 0
    operations: int = 0
    retries: int = 0
    sessions_opened: int = 0
    sessions_closed: int = 0
    leases_expired: int = 0
    epoch_ends: int = 0
    evicted_sessions: int = 0
    suspensions: int = 0
    processes_gone: int = 0
    waits_admission: int = 0
    waits_prefill: int = 0
    waits_decode: int = 0
    waits_exact: int = 0

    def count_step(self, step: Step, reserve_tokens: int) -> None:
        """Counts an applied step of a session, and why a scheduler waits for its answer, if one does."""
        self.steps += 1
        self.operations += len(step.operations)
        self.allocations += step.num_credit_allocations
        if not reserve_tokens:
            self.waits_exact += 1
        elif not _ADMITTING.isdisjoint(step.operations):
            self.waits_admission += 1
        elif Operation.ALLOCATE in step.operations:
            if max(step.num_new_tokens, default=0) > 1:
                self.waits_prefill += 1
            else:
                self.waits_decode += 1


class MissReason(Enum):
    """Why a look-up found less than the longest hit that its request could have. See docs/how-to/explain-misses.md."""

    UNSEEN = "unseen"
    """The block was never cached, or it was evicted too long ago to be known."""

    EVICTED = "evicted"
    """The block was evicted lately: by an allocation, or by a call that evicts blocks."""

    RESET = "reset"
    """The block was cached before the most recent reset, or before the most recent epoch began."""

    OTHER_SCOPE = "other_scope"
    """The block is cached, but in another namespace or under another weights version."""

    NOT_EXECUTED = "not_executed"
    """The block is cached, but its session has not reported the step that fills it as executed."""

    NOT_KEPT = "not_kept"
    """Other groups had the prefix. This group, which keeps windows or states, keeps none at this length."""

    ALIGNMENT = "alignment"
    """All that a hit can cover was found. The rest fills no block of the group with the largest blocks."""

    SEARCH_LIMIT = "search_limit"
    """The search ended after its maximum number of tries."""


Miss: TypeAlias = tuple[GroupId, MissReason, int]
"""Where and why a look-up ended early: the group that ended it, which is the last one that shortened the hit; the
reason, which is that of the first block that the group lacked; the tokens between the hit and the longest hit that the
request could have. A tuple, because half of the look-ups make one, and it costs a tenth of an object."""


@dataclass(slots=True)
class GroupCounters:
    """Counters of one group.

    Attributes:
        used_blocks: Blocks that requests hold or that are reserved for sinks; a shared block counts once.
        allocated_blocks: Blocks taken from the free list since the pool was created.
        evicted_blocks: Cached blocks of this group that were evicted by allocations since the pool was created.
        misses: Counted look-ups that the group ended early since the pool was created, by reason, with those of
            preempted requests.
        missed_tokens: Tokens that these look-ups missed, by reason.
    """

    used_blocks: int = 0
    allocated_blocks: int = 0
    evicted_blocks: int = 0
    misses: dict[MissReason, int] = field(default_factory=dict)
    missed_tokens: dict[MissReason, int] = field(default_factory=dict)

    def count_miss(self, reason: MissReason, num_tokens: int) -> None:
        """Counts a look-up that the group ended."""
        self.misses[reason] = self.misses.get(reason, 0) + 1
        self.missed_tokens[reason] = self.missed_tokens.get(reason, 0) + num_tokens

    def continue_from(self, before: "GroupCounters") -> None:
        """Continues the counters of the same group, whose blocks are gone."""
        self.allocated_blocks += before.allocated_blocks
        self.evicted_blocks = before.evicted_blocks
        self.misses, self.missed_tokens = before.misses, before.missed_tokens

    def copy(self) -> "GroupCounters":
        """Returns an independent copy."""
        return replace(self, misses=self.misses.copy(), missed_tokens=self.missed_tokens.copy())


@dataclass(slots=True)
class HostCounters:
    """Counters of a pool's second tier since the pool was created; see HostMemoryInfo in pool.proto.

    Attributes:
        copied_out_blocks: Blocks that steps copied to host memory.
        copied_in_blocks: Blocks that steps copied from there.
        evicted_blocks: Cached blocks of host memory that others replaced.
        lost_blocks: Cached blocks of the first tier that allocations evicted before they were copied.
        copying_out_microseconds: Time that copies to host memory have taken, as engines report it.
        copying_in_microseconds: Time that copies from there have taken.
    """

    copied_out_blocks: int = 0
    copied_in_blocks: int = 0
    evicted_blocks: int = 0
    lost_blocks: int = 0
    copying_out_microseconds: int = 0
    copying_in_microseconds: int = 0


class Histogram:
    """A histogram with fixed bucket bounds.

    Attributes:
        bounds: Upper bounds of the buckets, ascending. One more bucket holds values above the last bound.
        counts: Number of values in each bucket, not cumulative.
        total: Sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Adds a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> "Histogram":
        """Returns an independent copy."""
        made = Histogram(self.bounds)
        made.counts[:] = self.counts
        made.total = self.total
        return made
