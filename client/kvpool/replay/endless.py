"""A scheduler that goes on for ever, as an engine's does.

1. What ends a session does not end the scheduler: an epoch that passed, a lease that ran out, a server that is away or
   was started anew. It says so in a line, waits for the pool and opens another session.
2. Its requests begin anew with it: what they had computed is in the cache, or it is gone. They begin anew as well if
   all have outgrown the pool.
3. Pauses grow while nothing succeeds, up to a bound, and spread, so that many schedulers do not come at once.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpool.client import Client, InvalidArgumentError, KvpoolError
from kvpool.client.connection import connect_as
from kvpool.replay.play import PoolSource
from kvpool.replay.playing import SchedulerOptions, scheduler_on
from kvpool.replay.result import Counts
from kvpool.replay.workload import Workload

_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 10.0
_REPORT_SECONDS: Final = 60.0


def play_until(
    stopping: threading.Event,
    pool: PoolSource,
    share: Workload,
    options: SchedulerOptions,
    say: Callable[[str], object],
) -> None:
    """Plays a workload that does not end, on one session after the other, until told to stop.

    Args:
        stopping: Set to stop: after the round, or the pause; nothing is held then.
        pool: Where.
        share: What to play.
        options: How.
        say: Called with a sentence whenever a session begins, ends, or has played for another minute.

    Raises:
        InvalidArgumentError: The service refuses what it is asked for, and always would; or nothing fits the pool.
    """
    pauses = _Pauses()
    with connect_as(options.access, options.address) as client:
        while not stopping.is_set():
            try:
                pool.prepare(client)
                _play(client, share, options, _Hooks(say, pauses.reset, stopping.is_set))
            except InvalidArgumentError:
                raise
            except KvpoolError as error:
                seconds = pauses.next(error.retry_seconds)
                say(f"{error.reason}: {error}; a new session in {seconds:.1f} s")
                stopping.wait(seconds)


@dataclass(frozen=True, slots=True)
class _Hooks:
    say: Callable[[str], object]
    advance: Callable[[], object]
    stopped: Callable[[], bool]


def _play(client: Client, share: Workload, options: SchedulerOptions, hooks: _Hooks) -> None:
    due_seconds = time.monotonic() + _REPORT_SECONDS

    def count() -> None:
        nonlocal due_seconds
        hooks.advance()
        if time.monotonic() >= due_seconds:
            due_seconds += _REPORT_SECONDS
            hooks.say(_summary(scheduler.counts))

    with scheduler_on(client, share, options, "kvpool-replay", count) as scheduler:
        hooks.say(f"a session on pool {options.pool!r}, epoch {scheduler.epoch}")
        try:
            scheduler.run(hooks.stopped)
        finally:
            hooks.say(_summary(scheduler.counts))
    if not scheduler.counts.requests and not hooks.stopped():
        raise InvalidArgumentError("pool", f"{options.pool!r} is too small for every request of the workload")


def _summary(counts: Counts) -> str:
    rate = counts.hit_tokens / counts.input_tokens if counts.input_tokens else 0.0
    return f"{counts.requests:,} requests done in this session, {rate:.1%} of the prompt tokens found in the cache"


class _Pauses:
    """How long to wait before each further try."""

    def __init__(self) -> None:
        self._random = random.Random()  # noqa: S311 - spreads pauses
        self._seconds = _FIRST_PAUSE_SECONDS

    def next(self, asked_seconds: float | None) -> float:
        """The next pause: what the service asked for, or twice the last one, spread; either bounded."""
        seconds = self._seconds * self._random.uniform(0.5, 1.0) if asked_seconds is None else asked_seconds
        self._seconds = min(2 * self._seconds, _LONGEST_PAUSE_SECONDS)
        return min(seconds, _LONGEST_PAUSE_SECONDS)

    def reset(self) -> None:
        """Something succeeded: begin with short pauses again."""
        self._seconds = _FIRST_PAUSE_SECONDS
