"""A whole replay: the pool, the prompts, the result."""

import time
from collections.abc import Callable, Iterable

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
from kvpool.core.ids import PoolName
from kvpool.replay.result import Counts, Result, host_figures
from kvpool.replay.trace_formats import TraceRequest


def replay_pool(name: str, num_blocks: int, block_size: int, max_model_len: int, reuse_order: ReuseOrder) -> PoolConfig:
    """Returns the configuration of a pool of one group with full attention, however few its blocks are."""
    groups = (KVCacheGroup(FullAttentionSpec(block_size), ("replay",)),)
    return PoolConfig(PoolName(name), num_blocks, max_model_len, groups, reuse_order, allow_too_few_blocks=True)


def measured(client: Client, pool: PoolInfo, play: Callable[[], Counts]) -> Result:
    """Measures what a function that plays on a pool does to it.

    Args:
        client: A connection to the service.
        pool: The pool before.
        play: Plays; returns its counts.
    """
    start_seconds = time.perf_counter()
    counts = play()
    now = client.get_pool(pool.config.name)
    evicted, seconds = now.evicted_blocks - pool.evicted_blocks, time.perf_counter() - start_seconds
    return Result(counts, evicted, seconds, host_figures(pool, now))


def play_prompts(session: Session, trace: Iterable[TraceRequest], advance: Callable[[], object]) -> Counts:
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
