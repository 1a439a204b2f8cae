"""Random programs of allocations on terms, on vLLM's own KV cache manager and on a pool: every answer must be the same.

After each call: whether it is granted, all block tables, the free blocks in the order in which they are taken, and
which hash each block has. Runs where vLLM's version of the terms can be imported (0.32).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request as EngineRequest
from vllm.v1.request import RequestStatus

from kvpool.server.core import types
from kvpool.server.core.config import KVCacheGroup, PoolConfig, ReuseOrder
from kvpool.server.core.integrity import check_integrity
from kvpool.server.core.pool import ComputedBlocks, Pool
from kvpool.server.core.request import Request
from kvpool.server.core.spec_base import KVCacheSpec
from kvpool.server.core.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from kvpool.server.core.terms import USUAL_TERMS, Terms
from kvpool.server.core.types import BlockHash, BlockId, PoolName, RequestId, RequestNumber, WriterId

if not hasattr(EngineRequest("r", [1], SamplingParams(), None), "num_in_flight_tokens"):
    pytest.skip("this vLLM knows no tokens in flight; 0.32 does", allow_module_level=True)

BLOCK_SIZE = 4
MAX_MODEL_LEN = 96
CALLS = 120
SEEDS = int(os.environ.get("KVPOOL_ENGINE_SEEDS", "20"))
HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)
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
block where the whole sequence must fit, so that it can admit a request that never finds room: see ADR 9.
"""


def engine_spec(spec: KVCacheSpec) -> Any:
    """The same for vLLM."""
    common = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if isinstance(spec, SlidingWindowSpec):
        return interface.SlidingWindowSpec(**common, sliding_window=spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return interface.ChunkedLocalAttentionSpec(**common, attention_chunk_size=spec.attention_chunk_size)
    return interface.FullAttentionSpec(**common)


@dataclass
class Twin:
    """A request of both."""

    theirs: Any
    ours: Request

    @property
    def num_tokens(self) -> int:
        return self.ours.num_tokens

    def grow(self, token_ids: list[int]) -> None:
        self.theirs.append_output_token_ids(token_ids)
        self.follow()

    def follow(self) -> None:
        self.ours.num_tokens = self.theirs.num_tokens
        self.ours.hashes = [BlockHash(bytes(block_hash)) for block_hash in self.theirs.block_hashes]


class Both:
    """vLLM's manager and a pool, to which the same is done."""

    def __init__(self, rng: Random, specs: tuple[KVCacheSpec, ...], *, caches: bool = True) -> None:
        self.rng = rng
        num_blocks = rng.choice((8, 14, 20, 40, 80))
        in_flight = rng.choice((0, 0, 4, 16, 30))
        has_window = any(isinstance(spec, SlidingWindowSpec) for spec in specs)
        retention = rng.choice((None, None, 0, 8)) if caches and has_window else None
        groups = [interface.KVCacheGroupSpec([f"l{i}"], engine_spec(spec)) for i, spec in enumerate(specs)]
        self.manager = KVCacheManager(
            interface.KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=groups,
                prefix_cache_retention_interval=retention,
            ),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            max_in_flight_tokens=in_flight or None,
            enable_caching=caches,
        )
        self.pool = Pool(
            PoolConfig(
                PoolName("m"),
                num_blocks,
                MAX_MODEL_LEN,
                tuple(KVCacheGroup(spec, (f"l{i}",)) for i, spec in enumerate(specs)),
                reuse_order=ReuseOrder.UNCACHED_FIRST,
                enable_caching=caches,
                max_in_flight_tokens=in_flight,
                retention_tokens=retention,
            )
        )
        self.caches, self.counts_alike = caches, CHUNK_6 not in specs
        self.hasher = get_request_block_hasher(BLOCK_SIZE, HASH) if caches else None
        self.requests: list[Twin] = []
        self.granted = self.refused = self.num_external = self.made = 0
        self.sequence = 0

    def add(self) -> Twin:
        rng = self.rng
        self.made += 1
        document = [rng.randrange(2)] * rng.randint(1, 8) + [rng.randrange(2)] * rng.randint(0, 60)
        theirs = EngineRequest(
            f"r{self.made}", document, SamplingParams(max_tokens=999), None, block_hasher=self.hasher
        )
        ours = Request(RequestId(theirs.request_id), RequestNumber(self.made), WriterId(1), self.pool.new_tables())
        ours.num_prompt_tokens = len(document)
        twin = Twin(theirs, ours)
        twin.follow()
        self.requests.append(twin)
        return twin

    def play(self) -> None:
        rng = self.rng
        running = [twin for twin in self.requests if twin.ours.num_computed_tokens]
        waiting = [twin for twin in self.requests if not twin.ours.num_computed_tokens]
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
            self.preempt(rng.choice(running))
        self.compare()

    def admit(self, twin: Twin) -> None:
        """A waiting request: looked up, then given room."""
        rng = self.rng
        blocks, num_hit, twin.theirs.shared_prefix_boundary = self.manager.get_computed_blocks(twin.theirs)
        found = self.pool.peek(twin.ours)
        twin.ours.junction_tokens = found.junction_tokens or 0  # as a step that looks up notes it
        assert num_hit == found.num_tokens
        assert blocks.get_block_ids() == tuple([list(ids) for ids in found.block_ids])
        left = twin.num_tokens - num_hit
        external = rng.choice((0, 0, 0, BLOCK_SIZE, 2 * BLOCK_SIZE, rng.randint(0, left), left))
        external = min(external, left)
        left -= external
        least = 0 if external else 1
        new = min(max(rng.choice((0, 1, left, rng.randint(0, max(left, 0)))), least), max(left, least))
        twin.theirs.status = rng.choice((RequestStatus.WAITING, RequestStatus.WAITING, RequestStatus.PREEMPTED))
        self.ask(twin, new, external, found if num_hit else None, blocks if num_hit else None)

    def go_on(self, twin: Twin) -> None:
        """A running request: decodes, goes on with its prompt, or throws drafts away."""
        rng = self.rng
        kept = twin.ours.num_computed_tokens - rng.choice((0, 0, 0, 1, 2))
        if rng.random() < 0.5 and twin.num_tokens < MAX_MODEL_LEN - 8:
            twin.grow([rng.randrange(2) for _ in range(rng.randint(1, 3))])
        if kept > 0 and kept >= twin.num_tokens - 3 and self.pool.can_reject(twin.ours, kept):
            twin.theirs.num_computed_tokens = twin.ours.num_computed_tokens = kept
        most = min(MAX_MODEL_LEN - twin.ours.num_computed_tokens, 30)
        if most < 1:
            return
        twin.theirs.status = RequestStatus.RUNNING
        self.ask(twin, rng.choice((1, 1, 1, rng.randint(1, most))), 0, None, None)

    def ask(self, twin: Twin, new: int, external: int, found: ComputedBlocks | None, blocks: Any) -> None:
        rng = self.rng
        theirs, ours = twin.theirs, twin.ours
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
        terms = Terms(external, theirs.num_in_flight_tokens, reserved, watermark, must_fit)
        self.sequence += 1
        given = self.pool.allocate(
            ours,
            new,
            lookahead,
            found,
            delay_cache_blocks=delay,
            terms=USUAL_TERMS if terms == USUAL_TERMS else terms,
            sequence=types.Sequence(self.sequence),
        )
        assert (given is None) == (granted is None), (terms, new, lookahead, delay)
        if granted is None:
            self.refused += 1
            return
        self.granted += 1
        self.num_external += bool(external)
        theirs.num_computed_tokens += (found.num_tokens if found else 0) + external + new
        assert theirs.num_computed_tokens == ours.num_computed_tokens

    def cache(self, twin: Twin) -> None:
        num_tokens = min(self.rng.randint(0, twin.ours.num_computed_tokens), twin.num_tokens)
        self.manager.cache_blocks(twin.theirs, num_tokens)
        self.pool.cache(twin.ours, num_tokens, sequence=types.Sequence(self.sequence))
        twin.ours.quiet_tokens = self.pool.quiet_tokens(twin.ours)

    def free(self, twin: Twin) -> None:
        self.manager.free(twin.theirs)
        self.pool.free(twin.ours)
        self.requests.remove(twin)

    def preempt(self, twin: Twin) -> None:
        self.manager.free(twin.theirs)
        twin.theirs.num_computed_tokens = 0
        self.pool.preempt(twin.ours)

    def compare(self) -> None:
        theirs, ours = self.manager.block_pool, self.pool.blocks
        for twin in self.requests:
            wanted = self.manager.get_block_ids(twin.theirs.request_id)
            assert [table.block_ids for table in twin.ours.tables] == [list(ids) for ids in wanted]
        assert ours.num_free_blocks == theirs.get_num_free_blocks()
        assert list(ours.free_list) == [block.block_id for block in theirs.free_block_queue.get_all_free_blocks()]
        for block in theirs.blocks[1:]:
            block_id = BlockId(block.block_id)
            assert ours.ref_cnt(block_id) == block.ref_cnt
            # theirs ends with the group, in 4 bytes
            wanted_hash = bytes(block.block_hash)[:-4] if block.block_hash else None
            assert ours.prefix_map.hash_of(block_id) == wanted_hash


def play(both: Both, record_property: Callable[[str, object], None]) -> None:
    for _ in range(CALLS):
        both.play()
    assert both.granted
    for twin in list(both.requests):
        both.free(twin)
    both.compare()
    both.pool.end_writer(WriterId(1))
    check_integrity(both.pool, [])
    for name in ("granted", "refused", "num_external"):
        record_property(name, getattr(both, name))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_terms_are_answered_as_vllm_answers_them(
    mix: str, seed: int, record_property: Callable[[str, object], None]
) -> None:
    play(Both(Random(f"{mix} {seed}"), MIXES[mix]), record_property)


@pytest.mark.parametrize("mix", UNCACHED)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_they_are_without_caching(mix: str, seed: int, record_property: Callable[[str, object], None]) -> None:
    play(Both(Random(f"uncached {mix} {seed}"), UNCACHED[mix], caches=False), record_property)
