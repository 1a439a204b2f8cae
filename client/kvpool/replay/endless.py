"""A scheduler that runs until it is stopped, as an engine's does.

1. The end of a session does not end the scheduler: a past epoch, an expired lease, a server that cannot be reached or
   was restarted. The scheduler reports the reason, waits for the pool and opens another session.
2. Requests restart with each session. Tokens that they had computed are hits if they are still cached. Requests also
   restart if all of them have outgrown the pool.
3. Pauses grow up to a bound while nothing succeeds. They are randomized, so that schedulers do not retry together.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpool.client import Client, InvalidArgumentError, KvpoolError
from kvpool.client.connection import connect_as
from kvpool.replay.play import PoolSource
from kvpool.replay.result import Counts
from kvpool.replay.scheduler import SchedulerOptions, open_scheduler
from kvpool.replay.workload import Workload
from kvpool.wire.backoff import Backoff

_LONGEST_PAUSE_SECONDS: Final = 10.0
_REPORT_SECONDS: Final = 60.0


def play_until(
    stopping: threading.Event,
    pool: PoolSource,
    share: Workload,
    options: SchedulerOptions,
    report: Callable[[str], object],
) -> None:
    """Plays an unbounded workload on one session after another until `stopping` is set.

    Args:
        stopping: Set it to stop after the current round or pause. No blocks are held afterwards.
        pool: The pool to play on.
        share: The workload.
        options: The scheduler's options.
        report: Called with a sentence when a session begins or ends, and every minute.

    Raises:
        InvalidArgumentError: The service refuses a request that can never succeed, or no request fits the pool.
    """
    backoff = Backoff(0.25, 5.0)
    with connect_as(options.access, options.address, options.deadline_seconds) as client:
        while not stopping.is_set():
            try:
                pool.prepare(client)
                _play(client, share, options, _Hooks(report, backoff.reset, stopping.is_set))
            except InvalidArgumentError:
                raise
            except KvpoolError as error:
                seconds = min(backoff.next(error.retry_seconds), _LONGEST_PAUSE_SECONDS)
                report(f"{error.reason}: {error}; a new session in {seconds:.1f} s")
                stopping.wait(seconds)


@dataclass(frozen=True, slots=True)
class _Hooks:
    report: Callable[[str], object]
    advance: Callable[[], object]
    stopped: Callable[[], bool]


def _play(client: Client, share: Workload, options: SchedulerOptions, hooks: _Hooks) -> None:
    due_seconds = time.monotonic() + _REPORT_SECONDS

    def count() -> None:
        nonlocal due_seconds
        hooks.advance()
        if time.monotonic() >= due_seconds:
            due_seconds += _REPORT_SECONDS
            hooks.report(_summary(scheduler.counts))

    with open_scheduler(client, share, options, "kvpool-replay", count) as scheduler:
        hooks.report(f"a session on pool {options.pool!r}, epoch {scheduler.epoch}")
        try:
            scheduler.run(hooks.stopped)
        finally:
            hooks.report(_summary(scheduler.counts))
    if not scheduler.counts.requests and not hooks.stopped():
        raise InvalidArgumentError("pool", f"{options.pool!r} is too small for every request of the workload")


def _summary(counts: Counts) -> str:
    found = f"{counts.hit_rate:.1%} of the prompt tokens found in the cache"
    return f"{counts.requests:,} requests done in this session, {found}"
