"""Random programs of allocations on terms, on vLLM's own KV cache manager and on a pool: every answer must be the same.

After each call: whether it is granted, all block tables, the free blocks in the order in which they are taken, and
which hash each block has. Runs where vLLM's version of the terms can be imported (0.32).
"""

import os
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from engine.manager_pair import BLOCK_SIZE, SESSION_NUMBER, ManagerPair, RequestPair, make_groups
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.ids import PoolName, StepNumber
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.allocation_options import DEFAULT_OPTIONS, AllocationOptions
from support.integrity import check_integrity

pytestmark = pytest.mark.complete

MAX_MODEL_LEN = 96
CALLS = 120
SEEDS = int(os.environ.get("KVPOOL_ENGINE_SEEDS", "10"))
FULL, WINDOW_5, WINDOW_12 = (
    FullAttentionSpec(BLOCK_SIZE),
    SlidingWindowSpec(BLOCK_SIZE, sliding_window=5),
    SlidingWindowSpec(BLOCK_SIZE, sliding_window=12),
)
WINDOW_1 = SlidingWindowSpec(BLOCK_SIZE, sliding_window=1)
CHUNK_8, CHUNK_6 = (ChunkedLocalAttentionSpec(BLOCK_SIZE, attention_chunk_size=size) for size in (8, 6))
MIXES: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (FULL,),
    "window": (WINDOW_5,),
    "full and two windows": (FULL, WINDOW_5, WINDOW_12),
    "chunks": (CHUNK_8,),
    "chunks and full": (CHUNK_8, FULL),
}
UNCACHED: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (FULL,),
    "full and two windows": (FULL, WINDOW_5, WINDOW_12),
    "window of one": (WINDOW_1,),
    "window of one and full": (WINDOW_1, FULL),
    "chunks across blocks": (CHUNK_6,),
    "chunks across blocks and full": (CHUNK_6, FULL),
    "full and chunks across blocks": (FULL, CHUNK_6),
}
"""Also what the two look up differently. Of a window of one nothing is needed for a hit, which vLLM does not see. Where
a chunk begins within a block, vLLM's hits lack the block that it shares with the chunk before; nor does vLLM count that
block where the whole sequence must fit, so that it can admit a request that never finds room.
"""


class Program:
    """Calls drawn at random.

    Attributes:
        granted: Allocations that found room.
        refused: Those that found too few blocks.
        num_external: Those of tokens that were computed elsewhere.
    """

    def __init__(self, rng: Random, specs: tuple[KVCacheSpec, ...], *, caches: bool = True) -> None:
        self.rng = rng
        num_blocks = rng.choice((8, 14, 20, 40, 80))
        in_flight = rng.choice((0, 0, 4, 16, 30))
        has_window = any(isinstance(spec, SlidingWindowSpec) for spec in specs)
        retention = rng.choice((None, None, 0, 8)) if caches and has_window else None
        self.pair = ManagerPair(
            PoolConfig(
                PoolName("m"),
                num_blocks,
                MAX_MODEL_LEN,
                make_groups(specs),
                enable_caching=caches,
                max_in_flight_tokens=in_flight,
                retention_tokens=retention,
            )
        )
        self.manager, self.pool = self.pair.manager, self.pair.pool
        self.caches, self.counts_alike = caches, CHUNK_6 not in specs
        self.requests: list[RequestPair] = []
        self.granted = self.refused = self.num_external = self.made = 0
        self.sequence = 0

    def add(self) -> RequestPair:
        rng = self.rng
        self.made += 1
        document = [rng.randrange(2)] * rng.randint(1, 8) + [rng.randrange(2)] * rng.randint(0, 60)
        both = self.pair.make_request(self.made, document)
        self.requests.append(both)
        return both

    def play(self) -> None:
        rng = self.rng
        running = [both for both in self.requests if both.ours.num_computed_tokens]
        waiting = [both for both in self.requests if not both.ours.num_computed_tokens]
        kind = rng.random()
        if kind < 0.3 or not running:
            self.admit(rng.choice(waiting) if waiting and rng.random() < 0.7 else self.add())
        elif kind < 0.8:
            self.go_on(rng.choice(running))
        elif kind < 0.86 and self.caches:
            self.cache(rng.choice(running))
        elif kind < 0.93:
            self.free(rng.choice(running))
        else:
            self.pair.preempt(rng.choice(running))
        self.pair.compare(self.requests)

    def admit(self, both: RequestPair) -> None:
        """A waiting request: looked up, then given room."""
        rng = self.rng
        blocks, num_hit, both.theirs.shared_prefix_boundary = self.manager.get_computed_blocks(both.theirs)
        found = self.pool.find_longest_cache_hit(both.ours)
        both.ours.shared_prefix_boundary_tokens = (
            found.shared_prefix_boundary_tokens or 0
        )  # as a step that looks up notes it
        assert num_hit == found.num_tokens
        assert blocks.get_block_ids() == tuple([list(ids) for ids in found.block_ids])
        left = both.ours.num_tokens - num_hit
        external = rng.choice((0, 0, 0, BLOCK_SIZE, 2 * BLOCK_SIZE, rng.randint(0, left), left))
        external = min(external, left)
        left -= external
        least = 0 if external else 1
        new = min(max(rng.choice((0, 1, left, rng.randint(0, max(left, 0)))), least), max(left, least))
        both.theirs.status = rng.choice((RequestStatus.WAITING, RequestStatus.WAITING, RequestStatus.PREEMPTED))
        self.ask(both, new, external, found if num_hit else None, blocks if num_hit else None)

    def go_on(self, both: RequestPair) -> None:
        """A running request: decodes, goes on with its prompt, or throws drafts away."""
        rng = self.rng
        kept = both.ours.num_computed_tokens - rng.choice((0, 0, 0, 1, 2))
        if rng.random() < 0.5 and both.ours.num_tokens < MAX_MODEL_LEN - 8:
            both.grow([rng.randrange(2) for _ in range(rng.randint(1, 3))])
        if kept > 0 and kept >= both.ours.num_tokens - 3 and self.pool.can_reject(both.ours, kept):
            both.keep(kept)
        most = min(MAX_MODEL_LEN - both.ours.num_computed_tokens, 30)
        if most < 1:
            return
        both.theirs.status = RequestStatus.RUNNING
        self.ask(both, rng.choice((1, 1, 1, rng.randint(1, most))), 0, None, None)

    def ask(self, both: RequestPair, new: int, external: int, found: ComputedBlocks | None, blocks: Any) -> None:
        rng = self.rng
        theirs, ours = both.theirs, both.ours
        theirs.num_in_flight_tokens = rng.choice((0, 0, 1, 5, rng.randint(0, 40)))
        self.manager.watermark_blocks = rng.choice((0, 0, 1, 3))
        has_scheduled = rng.random() < 0.7
        reserved, must_fit = rng.choice((0, 0, 0, 1, 4, 30)), rng.random() < 0.3 and self.counts_alike
        lookahead, delay = rng.choice((0, 0, 0, 2, 5)), rng.random() < 0.2
        is_waiting = theirs.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        granted = self.manager.allocate_slots(
            theirs,
            new,
            found.num_tokens if found else 0,
            blocks,
            num_lookahead_tokens=lookahead,
            num_external_computed_tokens=external,
            delay_cache_blocks=delay,
            full_sequence_must_fit=must_fit,
            reserved_blocks=reserved,
            has_scheduled_reqs=has_scheduled,
        )
        watermark = self.manager.watermark_blocks if is_waiting and has_scheduled else 0
        options = AllocationOptions(external, theirs.num_in_flight_tokens, reserved, watermark, must_fit)
        self.sequence += 1
        given = self.pool.allocate_slots(
            ours,
            new,
            lookahead,
            found,
            delay_cache_blocks=delay,
            options=DEFAULT_OPTIONS if options == DEFAULT_OPTIONS else options,
            sequence=StepNumber(self.sequence),
        )
        assert (given is None) == (granted is None), (options, new, lookahead, delay)
        if granted is None:
            self.refused += 1
            return
        self.granted += 1
        self.num_external += bool(external)
        both.compute((found.num_tokens if found else 0) + external + new)

    def cache(self, both: RequestPair) -> None:
        num_tokens = min(self.rng.randint(0, both.ours.num_computed_tokens), both.ours.num_tokens)
        self.manager.cache_blocks(both.theirs, num_tokens)
        self.pool.cache_blocks(both.ours, num_tokens, sequence=StepNumber(self.sequence))
        both.ours.credit_tokens = self.pool.credit_tokens(both.ours)

    def free(self, both: RequestPair) -> None:
        self.pair.free(both)
        self.requests.remove(both)


def play(program: Program, record_property: Callable[[str, object], None]) -> None:
    for _ in range(CALLS):
        program.play()
    assert program.granted
    for both in list(program.requests):
        program.free(both)
    program.pair.compare([])
    program.pool.evict_pending(SESSION_NUMBER)
    check_integrity(program.pool, [])
    for name in ("granted", "refused", "num_external"):
        record_property(name, getattr(program, name))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_allocation_options_are_answered_as_in_vllm(
    mix: str, seed: int, record_property: Callable[[str, object], None]
) -> None:
    play(Program(Random(f"{mix} {seed}"), MIXES[mix]), record_property)


@pytest.mark.parametrize("mix", UNCACHED)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_they_are_without_caching(mix: str, seed: int, record_property: Callable[[str, object], None]) -> None:
    play(Program(Random(f"uncached {mix} {seed}"), UNCACHED[mix], caches=False), record_property)
