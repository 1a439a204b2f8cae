"""What is counted as a pool works: plain ints on the way, read when somebody asks."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

RECENT_REQUESTS: Final = 1000


@dataclass(slots=True)
class PrefixCacheStats:
    """Counters since the pool was created; look-ups of preempted requests are counted apart.

    Attributes:
        requests: Look-ups.
        queries_tokens: Tokens they asked for.
        hits_tokens: Tokens they found.
        preempted_requests: The same of requests that had been preempted.
        preempted_queries_tokens: Tokens they asked for.
        preempted_hits_tokens: Tokens they found.
        resets: Times the prefix cache was reset.
        shared_hits_tokens: Of all tokens found, those of blocks that another session had filled, or the same before it
            was resumed.
    """

    requests: int = 0
    queries_tokens: int = 0
    hits_tokens: int = 0
    preempted_requests: int = 0
    preempted_queries_tokens: int = 0
    preempted_hits_tokens: int = 0
    resets: int = 0
    shared_hits_tokens: int = 0


class RecentHitRate:
    """Hit rate over the last 1,000 look-ups since the last reset, preempted requests' left out."""

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

    def reset(self) -> None:
        """Forgets all look-ups."""
        self._recent.clear()
        self._queries = self._hits = 0

    @property
    def rate(self) -> float:
        """Tokens found for each token asked for, [0, 1]; 0 if none were asked for."""
        return self._hits / self._queries if self._queries else 0.0


@dataclass(slots=True)
class ActivityCounters:
    """What a pool did since it was created.

    Attributes:
        allocations: Times that a request was given room.
        refusals: Times that there were too few free blocks to.
        steps: Changes applied, unary calls included.
        operations: Operations in them.
        retries: Changes that came again and were answered from memory.
        sessions_opened: Sessions opened.
        sessions_closed: Sessions that their scheduler closed.
        leases_expired: Sessions whose lease ran out.
        epoch_ends: Sessions ended because a rank was lost.
        evicted_sessions: Sessions that an operator ended.
        suspensions: Times that a missing rank stopped allocation.
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


@dataclass(slots=True)
class GroupCounters:
    """The blocks of one group.

    Attributes:
        used_blocks: Held by requests or set aside for sinks now; each once, however many requests share it.
        allocated_blocks: Taken from the free list, since the pool was created.
        evicted_blocks: Of this group's cached blocks, given up to make room, since the pool was created.
    """

    used_blocks: int = 0
    allocated_blocks: int = 0
    evicted_blocks: int = 0


class Histogram:
    """How often values fell where.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; what is greater than all goes to one more.
        counts: Values in each bucket, not cumulative.
        total: Sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> "Histogram":
        """Makes one that later values do not change."""
        made = Histogram(self.bounds)
        made.counts[:] = self.counts
        made.total = self.total
        return made
