"""What `kvpool top` shows: samples of a server, and what happened between two of them."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Final

from kvpool.cli import admin_output as output
from kvpool.client import KvpoolError, PoolInfo
from kvpool.client.admin import AdminClient, Overview, SessionInfo
from kvpool.core.ids import PoolName, SessionNumber

MAX_SESSIONS: Final = 2000
"""Sessions that are asked for in one sample; pools count all."""

_STOP_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A server at one moment.

    Attributes:
        taken_seconds: When, on the monotonic clock.
        overview: The server and its pools.
        sessions: Its sessions, the first 2,000.
    """

    taken_seconds: float
    overview: Overview
    sessions: tuple[SessionInfo, ...]


@dataclass(frozen=True, slots=True)
class PoolRates:
    """What a pool did between two samples: times a second, and the share of tokens asked for that were found."""

    steps: float
    allocations: float
    refusals: float
    evictions: float
    preemptions: float
    hit_ratio: float | None


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened between two samples; nothing is known of what was not there in both.

    Attributes:
        seconds: Its length; 0 if there is only one sample.
        pools: Of each pool.
        session_steps: Steps a second of each session.
    """

    seconds: float = 0.0
    pools: Mapping[PoolName, PoolRates] = field(default_factory=dict)
    session_steps: Mapping[SessionNumber, float] = field(default_factory=dict)


def take(client: AdminClient) -> Sample:
    """Asks a server how it is."""
    overview = client.overview()
    sessions = tuple(islice(client.sessions(), MAX_SESSIONS))
    return Sample(time.monotonic(), overview, sessions)


def between(before: Sample | None, now: Sample) -> Interval:
    """Works out what happened between two samples; nothing if the server was started anew meanwhile."""
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
    """A sample as JSON has it; rates are null where nothing is known."""
    pools = []
    for info in sample.overview.pools:
        rates = interval.pools.get(info.config.name)
        pools.append({**output.pool_json(info), "per_second": _rates_json(rates) if rates else None})
    sessions = [
        {**output.session_json(info), "steps_per_second": interval.session_steps.get(info.session_number)}
        for info in busiest(sample.sessions)
    ]
    return {
        "address": address,
        "server": output.server_json(sample.overview.server),
        "interval_seconds": interval.seconds or None,
        "pools": pools,
        "sessions": sessions,
    }


def busiest(sessions: tuple[SessionInfo, ...]) -> list[SessionInfo]:
    """The sessions, those with most running requests first, then those that hold most blocks."""
    return sorted(sessions, key=lambda info: (-info.running_requests, -sum(info.held_blocks), info.session_number))


@dataclass(frozen=True, slots=True)
class Heard:
    """What a feed has heard so far.

    Attributes:
        answered_seconds: When the last answer came, or the feed began; on the monotonic clock.
        now: The newest sample; None before the first.
        interval: What happened before it.
        error: Why the newest question had no answer; None if it had.
    """

    answered_seconds: float
    now: Sample | None = None
    interval: Interval = Interval()
    error: KvpoolError | None = None


class Feed:
    """Asks a server again and again, on a thread of its own, so that who shows it never waits.

    Attributes:
        heard: What it has heard so far; replaced as a whole.
        interval_seconds: From one question to the next.
    """

    def __init__(self, client: AdminClient, interval_seconds: float, tell: Callable[[], object]) -> None:
        """Begins to ask.

        Args:
            client: The connection.
            interval_seconds: From one question to the next.
            tell: Called on the feed's thread after each answer, and each error.
        """
        self.heard = Heard(time.monotonic())
        self.interval_seconds = interval_seconds
        self._client = client
        self._tell = tell
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="kvpool-top", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Asks no more. Closes the connection, which ends a question that waits for its answer."""
        self._stopped.set()
        self._client.close()
        self._thread.join(_STOP_SECONDS)

    def _ask(self) -> None:
        due_seconds = time.monotonic()
        while not self._stopped.wait(max(due_seconds - time.monotonic(), 0.0)):
            due_seconds = time.monotonic() + self.interval_seconds
            try:
                sample = take(self._client)
            except KvpoolError as error:
                self.heard = replace(self.heard, error=error)
            except ValueError:  # the connection was closed
                return
            else:
                self.heard = Heard(sample.taken_seconds, sample, between(self.heard.now, sample))
            self._tell()


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


def _rates_json(rates: PoolRates) -> dict[str, Any]:
    return asdict(rates)
