"""Samples of a server, and rates between two of them, for `kvpool top`."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Final

from kvpool.cli.pools import pool_json
from kvpool.client import KvpoolError, PoolInfo
from kvpool.client.admin import AdminClient, Overview, SessionInfo
from kvpool.core.ids import PoolName, SessionNumber

MAX_SESSIONS: Final = 2000
"""Maximum number of sessions in a sample; the counts of pools include all."""

_STOP_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a server at one moment.

    Attributes:
        taken_seconds: Time of the sample, on the monotonic clock.
        overview: The server and its pools.
        sessions: Its first `MAX_SESSIONS` sessions.
        epoch_began_seconds: Time of the first sample with the pool's epoch, if an earlier sample had another one.
    """

    taken_seconds: float
    overview: Overview
    sessions: tuple[SessionInfo, ...]
    epoch_began_seconds: Mapping[PoolName, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolRates:
    """Rates of a pool between two samples, per second, and its hit ratio in tokens."""

    steps: float
    allocations: float
    refusals: float
    evictions: float
    preemptions: float
    hit_ratio: float | None


@dataclass(frozen=True, slots=True)
class Interval:
    """Rates between two samples. Only pools and sessions in both samples have rates.

    Attributes:
        seconds: Length of the interval; 0 if there is only one sample.
        pools: Rates of each pool.
        session_steps: Steps per second of each session.
    """

    seconds: float = 0.0
    pools: Mapping[PoolName, PoolRates] = field(default_factory=dict)
    session_steps: Mapping[SessionNumber, float] = field(default_factory=dict)


def take(client: AdminClient, before: Sample | None = None) -> Sample:
    """Takes a sample of a server, which continues the sample before."""
    overview = client.overview()
    sessions = tuple(islice(client.sessions(), MAX_SESSIONS))
    sample = Sample(time.monotonic(), overview, sessions)
    return replace(sample, epoch_began_seconds=_epoch_changes(before, sample)) if before else sample


def _epoch_changes(before: Sample, now: Sample) -> dict[PoolName, float]:
    epochs = {info.config.name: info.epoch for info in before.overview.pools}
    changed = {
        info.config.name: now.taken_seconds
        for info in now.overview.pools
        if info.epoch != epochs.get(info.config.name, info.epoch)
    }
    return {**before.epoch_began_seconds, **changed}


def between(before: Sample | None, now: Sample) -> Interval:
    """Computes the rates between two samples; none if the server has restarted in between."""
    if before is None or before.overview.server.uptime_seconds > now.overview.server.uptime_seconds:
        return Interval()
    seconds = now.taken_seconds - before.taken_seconds
    if seconds <= 0:
        return Interval()
    pools_before = {info.config.name: info for info in before.overview.pools}
    rates = {
        info.config.name: _rates(pools_before[info.config.name], info, seconds)
        for info in now.overview.pools
        if info.config.name in pools_before and info.activity.steps >= pools_before[info.config.name].activity.steps
    }
    steps_before = {info.session_number: info.sequence for info in before.sessions}
    steps = {
        info.session_number: (info.sequence - steps_before[info.session_number]) / seconds
        for info in now.sessions
        if info.session_number in steps_before
    }
    return Interval(seconds, rates, steps)


def as_json(address: str, sample: Sample, interval: Interval) -> dict[str, Any]:
    """Returns a sample as JSON; unknown rates are null."""
    pools = [{**pool_json(info), "per_second": interval.pools.get(info.config.name)} for info in sample.overview.pools]
    sessions = [
        {**asdict(info), "steps_per_second": interval.session_steps.get(info.session_number)}
        for info in busiest(sample.sessions)
    ]
    return {
        "address": address,
        "server": sample.overview.server,
        "interval_seconds": interval.seconds or None,
        "pools": pools,
        "sessions": sessions,
    }


def busiest(sessions: tuple[SessionInfo, ...]) -> list[SessionInfo]:
    """Sorts sessions by running requests, then by held blocks, largest first."""
    return sorted(sessions, key=lambda info: (-info.running_requests, -sum(info.held_blocks), info.session_number))


@dataclass(frozen=True, slots=True)
class Latest:
    """The latest sample of a feed.

    Attributes:
        answered_seconds: Time of the last answer, or of the feed's start, on the monotonic clock.
        now: The newest sample; None before the first.
        interval: The rates before the newest sample.
        error: The error of the newest call; None after a success.
    """

    answered_seconds: float
    now: Sample | None = None
    interval: Interval = Interval()
    error: KvpoolError | None = None


class Feed:
    """Takes samples of a server on a thread of its own, so that the display never waits.

    Attributes:
        latest: The latest sample; replaced as a whole.
        interval_seconds: Interval between samples.
    """

    def __init__(self, client: AdminClient, interval_seconds: float, notify: Callable[[], object]) -> None:
        """Starts the thread.

        Args:
            client: The connection.
            interval_seconds: Interval between samples.
            notify: Called on the feed's thread after each answer and each error.
        """
        self.latest = Latest(time.monotonic())
        self.interval_seconds = interval_seconds
        self._client = client
        self._notify = notify
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-top", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread. Closes the connection, which ends a waiting call."""
        self._stopped.set()
        self._client.close()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        due_seconds = time.monotonic()
        while not self._stopped.wait(max(due_seconds - time.monotonic(), 0.0)):
            due_seconds = time.monotonic() + self.interval_seconds
            try:
                sample = take(self._client, self.latest.now)
            except KvpoolError as error:
                self.latest = replace(self.latest, error=error)
            except ValueError:  # the connection was closed
                return
            else:
                self.latest = Latest(sample.taken_seconds, sample, between(self.latest.now, sample))
            self._notify()


def _rates(before: PoolInfo, now: PoolInfo, seconds: float) -> PoolRates:
    queried = now.prefix_cache.queries_tokens - before.prefix_cache.queries_tokens
    hit = now.prefix_cache.hits_tokens - before.prefix_cache.hits_tokens
    return PoolRates(
        steps=(now.activity.steps - before.activity.steps) / seconds,
        allocations=(now.activity.allocations - before.activity.allocations) / seconds,
        refusals=(now.activity.refusals - before.activity.refusals) / seconds,
        evictions=(now.evicted_blocks - before.evicted_blocks) / seconds,
        preemptions=(now.preemptions - before.preemptions) / seconds,
        hit_ratio=hit / queried if queried else None,
    )
