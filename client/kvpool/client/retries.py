"""Repeats a call until it is answered, within its deadline.

1. Only calls that can be repeated without effect come here: reads, and changes that the server recognizes by a key or
   a number.
2. A call is repeated only where this can help: the server cannot be reached (UNAVAILABLE), or it sends a retry time.
   Any other error is raised at once. If no time is left for another attempt, or for its answer, the last error before
   is raised.
3. A call without an answer after 2 s is logged, once. A host that drops packets causes no error by then, so the first
   attempt can be limited to that time.
4. Pauses grow and are random, so that the clients of a restarted server do not all return at once. A retry time that
   the server sends is the minimum.
"""

import logging
import random
import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_before_delay,
    wait_fixed,
    wait_random_exponential,
)

from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.wire.errors import DeadlineError

_BACKOFF: Final = wait_fixed(0.02) + wait_random_exponential(multiplier=0.1, max=1.0)
_JITTER: Final = 0.1
"""Maximum share by which a pause that the server requested is extended."""

LOGGED_AFTER_SECONDS: Final = 2.0
"""Time without an answer after which a call is logged."""

_log = logging.getLogger("kvpool.client")

_T = TypeVar("_T")


async def call(
    attempt: Callable[[float], Awaitable[_T]],
    deadline_seconds: float,
    sleep: Callable[[float], Awaitable[None]],
    first_attempt_seconds: float = inf,
) -> _T:
    """Calls until there is an answer, a final error, or no time left.

    Args:
        attempt: Makes one call, within the seconds that it is given.
        deadline_seconds: Time limit of all attempts together.
        sleep: Waits between attempts.
        first_attempt_seconds: Time limit of the first attempt.

    Raises:
        KvpoolError: The last attempt's, or that of the attempt before, if the last one got no answer in time.
    """
    started_seconds = time.monotonic()
    due_seconds = started_seconds + deadline_seconds
    is_logged = False
    try:
        # The usual case, without the cost of the rest.
        return await attempt(min(deadline_seconds, first_attempt_seconds))
    except KvpoolError as error:
        first, last = [error], error
    was_cut = isinstance(last, DeadlineError) and first_attempt_seconds < deadline_seconds

    async def try_again() -> _T:
        nonlocal last
        if first:
            raise first.pop()
        try:
            return await attempt(due_seconds - time.monotonic())
        except DeadlineError:
            raise
        except KvpoolError as error:
            last = error
            raise

    def may_retry(error: BaseException) -> bool:
        return _may_retry(error) or (was_cut and error is last)

    def log_once(_: RetryCallState) -> None:
        nonlocal is_logged
        waited_seconds = time.monotonic() - started_seconds
        if not is_logged and (was_cut or waited_seconds >= LOGGED_AFTER_SECONDS):
            is_logged = True
            fields = {"reason": last.reason, "error": str(last), "seconds": round(waited_seconds, 1)}
            _log.warning("no answer yet, trying again", extra=fields)

    retrying = AsyncRetrying(
        sleep=sleep,
        retry=retry_if_exception(may_retry),
        wait=_pause_seconds,
        stop=stop_before_delay(due_seconds - time.monotonic()),
        before_sleep=log_once,
        reraise=True,
    )
    try:
        return await retrying(try_again)
    except DeadlineError:  # the rest of the time was too short for an answer
        raise last from None


def _may_retry(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    return isinstance(error, UnavailableError) or getattr(error, "retry_seconds", None) is not None


def _pause_seconds(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, KvpoolError) and error.retry_seconds:
        return error.retry_seconds * (1 + random.uniform(0, _JITTER))  # noqa: S311 - spreads load
    return _BACKOFF(state)
