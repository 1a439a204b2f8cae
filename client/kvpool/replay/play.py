"""A whole replay: the pool, the schedulers, the result."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from kvpool.client import (
    Client,
    FullAttentionSpec,
    KVCacheGroup,
    Outcome,
    PoolConfig,
    PoolInfo,
    Request,
    ReuseOrder,
    Session,
)
from kvpool.client.connection import connect_as
from kvpool.core.ids import PoolName
from kvpool.replay.processes import Reporter, play_concurrently
from kvpool.replay.result import Counts, Result
from kvpool.replay.scheduler import SchedulerOptions
from kvpool.replay.trace_formats import TraceRequest
from kvpool.replay.workload import Workload


@dataclass(frozen=True, slots=True)
class ExistingPool:
    """A pool that another client created, or that ranks form.

    Attributes:
        name: Its name.
        wait_seconds: How long to wait for it.
    """

    name: str
    wait_seconds: float

    def prepare(self, client: Client) -> PoolInfo:
        """Waits until the pool is ready; may be called repeatedly.

        Raises:
            KvpoolError: The pool is not available.
        """
        return client.wait_until_ready(self.name, timeout_seconds=self.wait_seconds)


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """A pool that the replay creates.

    Attributes:
        name: Its name.
        num_blocks: Blocks, the null block included.
        block_size: Tokens per block.
        max_model_len: Maximum tokens of a request.
        reuse_order: The order in which freed blocks are used again.
    """

    name: str
    num_blocks: int
    block_size: int
    max_model_len: int
    reuse_order: ReuseOrder

    def prepare(self, client: Client) -> PoolInfo:
        """Creates the pool if it does not exist; may be called repeatedly.

        Raises:
            KvpoolError: The pool is not available.
        """
        groups = (KVCacheGroup(FullAttentionSpec(self.block_size), ("replay",)),)
        return client.create_pool(
            PoolConfig(
                PoolName(self.name),
                self.num_blocks,
                self.max_model_len,
                groups,
                self.reuse_order,
                allow_too_few_blocks=True,
            )
        )


PoolSource: TypeAlias = ExistingPool | PoolOptions
"""The pool to play on, and how it comes to exist."""


def replay_serially(
    pool: PoolSource, trace: list[TraceRequest], options: SchedulerOptions, reporter: Reporter
) -> Result:
    """Plays prompts one after another, without their outputs."""

    def play(client: Client) -> list[Counts | None]:
        name = "kvpool-replay"
        with client.open_session(pool.name, client_name=name, lease_seconds=options.lease_seconds) as session:
            return [_play_serially(session, trace, lambda: reporter.advance(1))]

    return _replay(pool, options, play)


def replay_shares(pool: PoolSource, shares: list[Workload], options: SchedulerOptions, reporter: Reporter) -> Result:
    """Plays shares concurrently, each in its own scheduler process."""

    def play(_: Client) -> list[Counts | None]:
        return [played.counts if played else None for played in play_concurrently(shares, options, reporter)]

    return _replay(pool, options, play)


def _play_serially(session: Session, trace: Iterable[TraceRequest], advance: Callable[[], object]) -> Counts:
    """Plays prompts one after another. Each step frees the previous prompt and admits the next; outputs are skipped."""
    counts = Counts()
    before: Request | None = None
    for number, entry in enumerate(trace):
        counts.input_tokens += entry.input_length
        if entry.input_length > session.config.max_model_len:
            counts.rejected_requests += 1
            advance()
            continue
        request = session.request(f"r{number}", entry.token_ids())
        with session.step(executed_sequence=session.sequence) as step:
            if before:
                step.free(before)
            admitted = step.admit(request)
        before = request
        counts.steps += 1
        if admitted.outcome is Outcome.OK:
            counts.requests += 1
            counts.hit_tokens += admitted.num_hit_tokens
            counts.shared_hit_tokens += admitted.num_shared_hit_tokens
        else:
            counts.rejected_requests += 1
        advance()
    if before:
        session.mark_executed()
        session.free(before)
    return counts


def _replay(pool: PoolSource, options: SchedulerOptions, play: Callable[[Client], list[Counts | None]]) -> Result:
    with connect_as(options.access, options.address, options.deadline_seconds) as client:
        evicted_before = pool.prepare(client).evicted_blocks
        start = time.perf_counter()
        by_session = play(client)
        total = Counts()
        for counts in by_session:
            total.add(counts or Counts())
        evicted = client.get_pool(pool.name).evicted_blocks - evicted_before
        return Result(total, by_session, evicted, time.perf_counter() - start)
