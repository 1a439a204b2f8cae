"""Samples of a server, and rates between two of them, for `kvpool top`."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

from kvpool.client import KvpoolError, PoolInfo
from kvpool.client.admin import AdminClient
from kvpool.v1.admin_pb2 import ListPoolsResponse, SessionInfo

MAX_SESSIONS: Final = 2000
"""Maximum number of sessions in a sample; the counts of pools include all."""

_STOP_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a server at one moment, and rates since the sample before.

    Attributes:
        taken_seconds: Time of the sample, on the monotonic clock.
        overview: The server and its pools.
        sessions: Its first `MAX_SESSIONS` sessions, the busiest first.
        interval_seconds: Time since the sample before; 0 without one, and after a restart of the server.
        rates: Of each pool that was in the sample before, by name: rates per second, and the hit ratio of the interval.
        session_steps: Steps per second of each session that was in the sample before.
        epoch_began_seconds: Time of the first sample with the pool's epoch, if an earlier sample had another one.
    """

    taken_seconds: float
    overview: ListPoolsResponse
    sessions: list[SessionInfo]
    interval_seconds: float = 0.0
    rates: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    session_steps: Mapping[int, float] = field(default_factory=dict)
    epoch_began_seconds: Mapping[str, float] = field(default_factory=dict)


def take(client: AdminClient, before: Sample | None = None) -> Sample:
    """Takes a sample of a server, which continues the sample before."""
    overview = client.overview()
    sessions = busiest(islice(client.sessions(), MAX_SESSIONS))
    return since(before, Sample(time.monotonic(), overview, sessions))


def since(before: Sample | None, now: Sample) -> Sample:
    """Adds to a sample what has happened since the one before."""
    if before is None:
        return now
    pools = {info.config.name: info for info in before.overview.pools}
    known = [(pools[info.config.name], info) for info in now.overview.pools if info.config.name in pools]
    changed = {info.config.name: now.taken_seconds for old, info in known if info.epoch != old.epoch}
    now = replace(now, epoch_began_seconds={**before.epoch_began_seconds, **changed})
    seconds = now.taken_seconds - before.taken_seconds
    if seconds <= 0 or before.overview.server.uptime_seconds > now.overview.server.uptime_seconds:
        return now
    steps = {info.session_number: info.sequence for info in before.sessions}
    return replace(
        now,
        interval_seconds=seconds,
        rates={
            info.config.name: _rates(old, info, seconds)
            for old, info in known
            if info.activity.steps >= old.activity.steps
        },
        session_steps={
            info.session_number: (info.sequence - steps[info.session_number]) / seconds
            for info in now.sessions
            if info.session_number in steps
        },
    )


def as_json(address: str, sample: Sample) -> dict[str, Any]:
    """Returns a sample as JSON; pools and sessions without known rates are not in `per_second` and `session_steps`."""
    return {
        "address": address,
        "server": sample.overview.server,
        "interval_seconds": sample.interval_seconds or None,
        "pools": list(sample.overview.pools),
        "per_second": sample.rates,
        "sessions": sample.sessions,
        "session_steps_per_second": sample.session_steps,
    }


def busiest(sessions: Iterable[SessionInfo]) -> list[SessionInfo]:
    """Sorts sessions by running requests, then by held blocks, largest first."""
    return sorted(sessions, key=lambda info: (-info.running_requests, -sum(info.held_blocks), info.session_number))


@dataclass(frozen=True, slots=True)
class Latest:
    """The latest sample of a feed.

    Attributes:
        answered_seconds: Time of the last answer, or of the feed's start, on the monotonic clock.
        now: The newest sample; None before the first.
        error: The error of the newest call; None after a success.
    """

    answered_seconds: float
    now: Sample | None = None
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
                self.latest = Latest(sample.taken_seconds, sample)
            self._notify()


def _rates(before: PoolInfo, now: PoolInfo, seconds: float) -> dict[str, float | None]:
    queried = now.prefix_cache.queries_tokens - before.prefix_cache.queries_tokens
    hit = now.prefix_cache.hits_tokens - before.prefix_cache.hits_tokens
    copies = ("copied_out", "copied_in") if now.HasField("host_memory") else ()
    fields = [(name, f"{name}_blocks") for name in copies]
    return {
        "steps": (now.activity.steps - before.activity.steps) / seconds,
        "allocations": (now.activity.allocations - before.activity.allocations) / seconds,
        "refusals": (now.activity.refusals - before.activity.refusals) / seconds,
        "evictions": (now.evicted_blocks - before.evicted_blocks) / seconds,
        "preemptions": (now.preemptions - before.preemptions) / seconds,
        "hit_ratio": hit / queried if queried else None,
        **{n: (getattr(now.host_memory, of) - getattr(before.host_memory, of)) / seconds for n, of in fields},
    }
