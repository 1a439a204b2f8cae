"""Prefix-cache statistics: what look-ups asked for and found."""

from collections import deque
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
        shared_hits_tokens: Of all tokens found, those of blocks that another session had filled.
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
