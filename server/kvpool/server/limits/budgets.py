"""Checks steps against the limits of a server, and against what the sessions of a token, and all, hold together.

1. The requests and tokens of a token's sessions are counted when its first step is checked. Each further step adds what
   it declares and appends; what it frees is not subtracted. So the count is an upper bound.
2. Only when the bound exceeds the maximum are the sessions counted again, O(sessions). Therefore no step is refused
   that the maximum allows.
"""

from dataclasses import dataclass

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import ExhaustedError
from kvpool.core.pools.sessions import SessionRegistry
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Step
from kvpool.server.limits.config import RETRY_SECONDS, Limits, num_freed_tokens


@dataclass(slots=True)
class _Holding:
    """What sessions hold together, or more."""

    num_requests: int
    num_tokens: int


class Budgets:
    """The limits of steps, and what sessions hold together.

    Args:
        limits: The limits.
        sessions: The open sessions.
    """

    def __init__(self, limits: Limits, sessions: SessionRegistry) -> None:
        self._limits = limits
        self._sessions = sessions
        self._holdings: dict[str, _Holding] = {}  # by the name of the token; "" for all sessions
        self._maxima = limits.max_token_requests, limits.max_token_tokens
        self._total_maxima = limits.max_total_requests, limits.max_total_tokens

    def check_step(self, pool: KVCacheManager, session: Session, step: Step) -> None:
        """Raises ExhaustedError if a new step exceeds a limit, or would make sessions exceed one. See `Limits`."""
        num_tokens = self._limits.check_step(pool, session, step)
        longest = pool.config.max_model_len
        if num_tokens > longest and max(step.num_appended_tokens) > longest:
            return  # malformed: the core refuses it
        if num_tokens or (step.request_ids and step.sequence > session.sequence):
            if session.owner:
                self._check(session.owner, self._maxima, session, step, num_tokens)
            self._check("", self._total_maxima, session, step, num_tokens)

    def _check(self, owner: str, maxima: tuple[int, int], session: Session, step: Step, num_tokens: int) -> None:
        holding, num_requests = self._holdings.get(owner), len(step.request_ids)
        if holding:
            holding.num_requests += num_requests
            holding.num_tokens += num_tokens
            if holding.num_requests <= maxima[0] and holding.num_tokens <= maxima[1]:
                return
        holding = self._holdings[owner] = self._count(owner)
        num_requests += holding.num_requests - step.operations.count(Operation.FREE)
        num_tokens += holding.num_tokens - num_freed_tokens(session, step)
        for what, count, maximum in zip(("requests", "tokens"), (num_requests, num_tokens), maxima, strict=True):
            if count > maximum:
                raise _too_many(owner, what, maximum)
        holding.num_requests, holding.num_tokens = num_requests, num_tokens

    def _count(self, owner: str) -> _Holding:
        sessions = [session for _, session in self._sessions if not owner or session.owner == owner]
        return _Holding(sum(len(each.requests) for each in sessions), sum(each.num_tokens for each in sessions))


def _too_many(owner: str, what: str, maximum: int) -> ExhaustedError:
    holder, of, flag = (f"the token {owner!r}", "TOKEN_", "token") if owner else ("the server", "", "total")
    message = f"the sessions of {holder} would have more than {maximum} {what} together (--max-{flag}-{what})"
    field = "request_ids" if what == "requests" else "num_appended_tokens"
    return ExhaustedError(f"TOO_MANY_{of}{what.upper()}", message, field=field, retry_seconds=RETRY_SECONDS)
