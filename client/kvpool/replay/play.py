"""A replay from beginning to end: the pool, the schedulers, the result."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvpool.client import Client, FullAttentionSpec, KVCacheGroup, PoolConfig, PoolInfo, ReuseOrder
from kvpool.client.connection import connect_as
from kvpool.core.ids import PoolName
from kvpool.replay.children import own_server
from kvpool.replay.playing import SchedulerOptions
from kvpool.replay.processes import play_concurrently
from kvpool.replay.result import Counts, Result
from kvpool.replay.serial import play_serially
from kvpool.replay.trace import TraceRequest
from kvpool.replay.workload import TraceShare, Workload


class PoolSource(Protocol):
    """The pool to play on, and where it comes from."""

    @property
    def name(self) -> str:
        """The pool's name."""

    def prepare(self, client: Client) -> PoolInfo:
        """Sees to it that the pool is there and ready; may be asked again at any time.

        Raises:
            KvpoolError: It cannot be had.
        """


@dataclass(frozen=True, slots=True)
class ExistingPool:
    """A pool that others declared, or that ranks form.

    Attributes:
        name: Its name.
        wait_seconds: How long it is waited for.
    """

    name: str
    wait_seconds: float

    def prepare(self, client: Client) -> PoolInfo:
        """See `PoolSource`: waits until it is ready."""
        return client.wait_until_ready(self.name, timeout_seconds=self.wait_seconds)


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """A pool that the replay declares.

    Attributes:
        name: Its name.
        num_blocks: Blocks, the null block included.
        block_size: Tokens a block.
        max_model_len: Most tokens of a request.
        reuse_order: The order in which freed blocks are used again.
    """

    name: str
    num_blocks: int
    block_size: int
    max_model_len: int
    reuse_order: ReuseOrder

    def config(self) -> PoolConfig:
        """The pool's configuration."""
        group = KVCacheGroup(FullAttentionSpec(self.block_size), ("replay",))
        return PoolConfig(PoolName(self.name), self.num_blocks, self.max_model_len, (group,), self.reuse_order)

    def prepare(self, client: Client) -> PoolInfo:
        """See `PoolSource`: declares it, if it is not there."""
        return client.create_pool(self.config())


@dataclass(frozen=True, slots=True)
class Console:
    """Whom to tell how it goes.

    Attributes:
        advance: Called with how many more requests are done with.
        complain: Called with a sentence about what went wrong on the way.
        started: Called with the ids of the scheduler processes.
    """

    advance: Callable[[int], object]
    complain: Callable[[str], object]
    started: Callable[[list[int]], object] = lambda _: None


@contextmanager
def service(address: str | None) -> Iterator[str]:
    """Yields the address of a service: the one given, or of a server of our own while it is needed."""
    if address is not None:
        yield address
        return
    with own_server() as own:
        yield own


def replay_serially(pool: PoolSource, trace: list[TraceRequest], options: SchedulerOptions, console: Console) -> Result:
    """Plays a trace's prompts one after the other on one session."""
    with connect_as(options.access, options.address) as client:
        before = pool.prepare(client).evicted_blocks
        start = time.perf_counter()
        with client.open_session(
            pool.name, client_name="kvpool-replay", lease_seconds=options.lease_seconds
        ) as session:
            counts = play_serially(session, trace, lambda: console.advance(1))
        return _result(client, pool, [counts], before, start)


def replay_shares(pool: PoolSource, shares: list[Workload], options: SchedulerOptions, console: Console) -> Result:
    """Plays shares concurrently, each in a scheduler process of its own."""
    with connect_as(options.access, options.address) as client:
        before = pool.prepare(client).evicted_blocks
        start = time.perf_counter()
        played = play_concurrently(shares, options, console.advance, console.complain, console.started)
        by_session = [scheduler.counts if scheduler else None for scheduler in played]
        return _result(client, pool, by_session, before, start)


def trace_shares(path: Path, limit: int | None, sessions: int, rounds: int | None = 1) -> list[Workload]:
    """Deals a trace out to schedulers, one request to each in turn; see `TraceShare` for the rounds."""
    return [TraceShare(path, limit, index, sessions, rounds) for index in range(sessions)]


def _result(
    client: Client, pool: PoolSource, by_session: list[Counts | None], evicted_before: int, start: float
) -> Result:
    total = Counts()
    for counts in by_session:
        total.add(counts or Counts())
    evicted = client.get_pool(pool.name).evicted_blocks - evicted_before
    return Result(total, by_session, evicted, time.perf_counter() - start)
