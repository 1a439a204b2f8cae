"""Checks steps against the limits of a server, and against what the sessions of a token, and all, hold together.

1. The requests and tokens of a token's sessions are counted when its first step is checked. Each further step adds what
   it declares and appends; what it frees is not subtracted. So the count is an upper bound.
2. Only when the bound exceeds the maximum are the sessions counted again, O(sessions). Therefore no step is refused
   that the maximum allows.
"""

from dataclasses import dataclass
from typing import Final

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import ExhaustedError
from kvpool.core.ids import RequestNumber
from kvpool.core.pools.sessions import SessionRegistry
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Step
from kvpool.server.limits.config import RETRY_SECONDS, Limits

MAX_COMMON_PREFIXES: Final = 64
"""Maximum of OPERATION_COMMON_PREFIX per step: each reads all blocks that the session's requests have in common."""
MAX_HIT_BLOCKS: Final = 2**22
"""Maximum number of block ids of the hits that a step allocates, null blocks included."""
MAX_EVICTED_BLOCKS: Final = 2**18
"""Maximum number of block ids of a step that evicts blocks."""


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
        self._small_operations = min(limits.max_step_operations, MAX_COMMON_PREFIXES)

    def check_step(self, pool: KVCacheManager, session: Session, step: Step) -> None:
        """Checks a new step, and what its session, and others with it, would hold. The core refuses malformed steps.

        Raises:
            ExhaustedError: The step exceeds a limit, or would make sessions exceed one. See `Limits`.
        """
        if step.sequence <= session.sequence:  # a retry, answered with the stored result
            return
        if len(step.operations) > self._small_operations or len(step.block_ids) > MAX_EVICTED_BLOCKS:
            self._check_size(step)
        num_requests, num_tokens = len(step.request_ids), sum(step.num_appended_tokens)
        if not num_requests and not num_tokens:
            return
        if num_requests:
            left = len(session.requests) - step.operations.count(Operation.FREE)
            if left + num_requests > self._limits.max_session_requests:
                message = f"the session would have more than {self._limits.max_session_requests} requests"
                raise ExhaustedError("TOO_MANY_REQUESTS", message, field="request_ids")
        longest = pool.config.max_model_len
        if num_tokens > longest and max(step.num_appended_tokens) > longest:
            return  # malformed
        freed = _num_freed_tokens(session, step) if Operation.FREE in step.operations else 0
        if session.num_tokens - freed + num_tokens > self._limits.max_session_tokens:
            message = f"the session's requests would have more than {self._limits.max_session_tokens} tokens"
            raise ExhaustedError("TOO_MANY_TOKENS", message, field="num_appended_tokens")
        added = _Holding(num_requests, num_tokens)
        if session.owner:
            self._check(session.owner, self._maxima, session, step, added)
        self._check("", self._total_maxima, session, step, added)

    def _check_size(self, step: Step) -> None:
        count, maximum = len(step.operations), self._limits.max_step_operations
        if count > maximum:
            message = f"{count} operations; the maximum is {maximum}"
            raise ExhaustedError("STEP_TOO_LARGE", message, field="operations")
        if step.operations.count(Operation.COMMON_PREFIX) > MAX_COMMON_PREFIXES:
            message = f"more than {MAX_COMMON_PREFIXES} operations request a common prefix"
            raise ExhaustedError("STEP_TOO_LARGE", message, field="operations")
        maximum = MAX_EVICTED_BLOCKS if Operation.EVICT in step.operations else MAX_HIT_BLOCKS
        if len(step.block_ids) > maximum:
            message = f"{len(step.block_ids)} block ids; the maximum for this step is {maximum}"
            raise ExhaustedError("STEP_TOO_LARGE", message, field="block_ids")

    def _check(self, owner: str, maxima: tuple[int, int], session: Session, step: Step, added: _Holding) -> None:
        holding = self._holdings.get(owner)
        if holding:
            holding.num_requests += added.num_requests
            holding.num_tokens += added.num_tokens
            if holding.num_requests <= maxima[0] and holding.num_tokens <= maxima[1]:
                return
        holding = self._holdings[owner] = self._count(owner)
        num_requests = holding.num_requests + added.num_requests - step.operations.count(Operation.FREE)
        num_tokens = holding.num_tokens + added.num_tokens - _num_freed_tokens(session, step)
        for what, count, maximum in zip(("requests", "tokens"), (num_requests, num_tokens), maxima, strict=True):
            if count > maximum:
                raise _too_many(owner, what, maximum)
        holding.num_requests, holding.num_tokens = num_requests, num_tokens

    def _count(self, owner: str) -> _Holding:
        sessions = [session for _, session in self._sessions if not owner or session.owner == owner]
        return _Holding(sum(len(each.requests) for each in sessions), sum(each.num_tokens for each in sessions))


def _num_freed_tokens(session: Session, step: Step) -> int:
    """Known tokens of the requests that a step frees."""
    named = zip(step.operations, step.request_numbers, strict=False)
    freed = (session.by_number.get(RequestNumber(number)) for operation, number in named if operation == Operation.FREE)
    return sum(request.num_tokens for request in freed if request)


def _too_many(owner: str, what: str, maximum: int) -> ExhaustedError:
    holder, of, flag = (f"the token {owner!r}", "TOKEN_", "token") if owner else ("the server", "", "total")
    message = f"the sessions of {holder} would have more than {maximum} {what} together (--max-{flag}-{what})"
    field = "request_ids" if what == "requests" else "num_appended_tokens"
    return ExhaustedError(f"TOO_MANY_{of}{what.upper()}", message, field=field, retry_seconds=RETRY_SECONDS)
