"""Sends a call again until it is answered, within its deadline.

1. Only what cannot be done twice is given to this: reads, and changes that the server knows again by a key or a number.
2. Only where trying again may help: nobody could be reached (UNAVAILABLE), or the server says when to come back. Any
   other error is told at once; so is one whose next try would come after the deadline.
3. Pauses grow and are random, so that a thousand clients of a server that was restarted do not come back at once. What
   the server says is the least.
"""

import random
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypedDict, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_before_delay,
    wait_fixed,
    wait_random_exponential,
)

from kvpool.client.errors import ExhaustedError, KvpoolError, UnavailableError

_BACKOFF: Final = wait_fixed(0.02) + wait_random_exponential(multiplier=0.1, max=1.0)
_JITTER: Final = 0.1
"""Share by which a pause that the server asked for is made longer, at most."""

_T = TypeVar("_T")


class _Strategy(TypedDict):
    """What tenacity is told, for either kind of call."""

    retry: retry_if_exception
    wait: Callable[[RetryCallState], float]
    stop: stop_before_delay
    reraise: bool


def _may_retry(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    if isinstance(error, ExhaustedError):
        return error.retry_seconds is not None
    return isinstance(error, UnavailableError)


def call(attempt: Callable[[float], _T], deadline_seconds: float, sleep: Callable[[float], object] = time.sleep) -> _T:
    """Calls until there is an answer, an error that is final, or no time left.

    Args:
        attempt: Makes one call, which may take so many seconds.
        deadline_seconds: How long all attempts together may take.
        sleep: Waits between them.

    Raises:
        KvpoolError: The last attempt's.
    """
    due_seconds = time.monotonic() + deadline_seconds
    try:
        return attempt(deadline_seconds)  # the usual case, which is not to pay for the rest
    except KvpoolError as error:
        failed = [error]

    def try_again() -> _T:
        if failed:
            raise failed.pop()
        return attempt(due_seconds - time.monotonic())

    def pause(seconds: float) -> None:
        sleep(seconds)

    return Retrying(sleep=pause, **_strategy(due_seconds))(try_again)


async def call_async(attempt: Callable[[float], Awaitable[_T]], deadline_seconds: float) -> _T:
    """The same for asyncio."""
    due_seconds = time.monotonic() + deadline_seconds
    try:
        return await attempt(deadline_seconds)
    except KvpoolError as error:
        failed = [error]

    async def try_again() -> _T:
        if failed:
            raise failed.pop()
        return await attempt(due_seconds - time.monotonic())

    return await AsyncRetrying(**_strategy(due_seconds))(try_again)


def _strategy(due_seconds: float) -> _Strategy:
    return _Strategy(
        retry=retry_if_exception(_may_retry),
        wait=_pause_seconds,
        stop=stop_before_delay(due_seconds - time.monotonic()),
        reraise=True,
    )


def _pause_seconds(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, KvpoolError) and error.retry_seconds:
        return error.retry_seconds * (1 + random.uniform(0, _JITTER))  # noqa: S311 - spreads load
    return _BACKOFF(state)
