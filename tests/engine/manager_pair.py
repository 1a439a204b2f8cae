"""One schedule for two managers: vLLM's own, and a pool. After each call all that can be seen of both is compared.

Import it where vLLM 0.32 or later is installed.
"""

import random
from dataclasses import dataclass
from typing import Any, Final

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request as VllmRequest

from kvpool.server.core.config import KVCacheGroup, PoolConfig
from kvpool.server.core.integrity import check_integrity
from kvpool.server.core.pool import ComputedBlocks, Pool
from kvpool.server.core.request import Request
from kvpool.server.core.session import Session
from kvpool.server.core.spec_base import KVCacheSpec
from kvpool.server.core.specs import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from kvpool.server.core.types import (
    BlockHash,
    BlockId,
    PoolName,
    RequestId,
    RequestNumber,
    Sequence,
    SessionId,
    WriterId,
)

BLOCK_SIZE: Final = 4
MAX_MODEL_LEN: Final = 160
_STEP: Final = Sequence(1)
_MAX_RUNNING: Final = 8
_HASH: Final = get_hash_fn_by_name("sha256_cbor")
init_none_hash(_HASH)


@dataclass(frozen=True, slots=True)
class Shape:
    """A pool. A group is what its window is: 0 for full attention, negative for chunks of so many tokens."""

    windows: tuple[int, ...]
    retention_tokens: int | None
    use_eagle: bool

    @property
    def specs(self) -> list[KVCacheSpec]:
        return [_spec(window) for window in self.windows]


def _spec(window: int) -> KVCacheSpec:
    if window < 0:
        return ChunkedLocalAttentionSpec(BLOCK_SIZE, attention_chunk_size=-window)
    return SlidingWindowSpec(BLOCK_SIZE, sliding_window=window) if window else FullAttentionSpec(BLOCK_SIZE)


def _vllm_spec(window: int) -> Any:
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": kv_cache_interface.torch.float32}
    if window < 0:
        return kv_cache_interface.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=-window)
    if window:
        return kv_cache_interface.SlidingWindowSpec(**shape, sliding_window=window)
    return kv_cache_interface.FullAttentionSpec(**shape)


def _manager(shape: Shape, num_blocks: int) -> Any:
    config = kv_cache_interface.KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            kv_cache_interface.KVCacheGroupSpec([f"layer.{i}"], _vllm_spec(window))
            for i, window in enumerate(shape.windows)
        ],
        prefix_cache_retention_interval=shape.retention_tokens,
    )
    return KVCacheManager(
        config,
        max_model_len=MAX_MODEL_LEN,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        use_eagle=shape.use_eagle,
    )


@dataclass(slots=True, eq=False)
class _Both:
    """A request of both."""

    theirs: Any
    ours: Request

    def grow(self, token_ids: list[int]) -> None:
        self.theirs.append_output_token_ids(token_ids)
        self.know()

    def know(self) -> None:
        """Ours has vLLM's hashes."""
        self.ours.num_tokens = self.theirs.num_tokens
        self.ours.hashes += map(BlockHash, self.theirs.block_hashes[len(self.ours.hashes) :])


class Program:
    """A schedule drawn from a seed, as a scheduler with too few blocks makes it.

    Attributes:
        num_hits: Look-ups that found something.
        num_junctions: Look-ups that found a junction.
        num_refusals: Allocations that found too few blocks.
        is_apart: Whether vLLM found a hit with EAGLE that ours does not take, and why is known; then it ends there.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self._random = random.Random(f"{shape}{seed}")
        num_blocks = self._random.choice([8, 12, 20, 40]) * len(shape.windows) + 1
        groups = tuple(KVCacheGroup(spec, (f"layer.{i}",)) for i, spec in enumerate(shape.specs))
        self._shape = shape
        self._manager = _manager(shape, num_blocks)
        self._pool = Pool(
            PoolConfig(
                PoolName("m"),
                num_blocks,
                MAX_MODEL_LEN,
                groups,
                use_eagle=shape.use_eagle,
                retention_tokens=shape.retention_tokens,
            )
        )
        self._session = Session(SessionId("s"), WriterId(1), "", 10.0, 0.0)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, _HASH)
        self._families = [self._tokens(MAX_MODEL_LEN) for _ in range(3)]
        self._waiting: list[_Both] = []
        self._running: list[_Both] = []
        self._count = 0
        self.num_hits = self.num_junctions = self.num_refusals = 0
        self.is_apart = False

    def run(self, num_calls: int) -> None:
        calls = (self._arrive, self._admit, self._go_on, self._preempt, self._finish, self._evict, self._reset)
        weights = (4, 10, 30, 1, 2, 0.5, 0.5)
        for i in range(num_calls):
            self._random.choices(calls, weights)[0]()
            if self.is_apart:
                return
            self._compare()
            if i % 20 == 0:
                check_integrity(self._pool, [self._session])
        for both in [*self._running]:
            self._free(both)
        self._compare()
        check_integrity(self._pool, [self._session])

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1, 1000) for _ in range(count)]

    def _arrive(self) -> None:
        """A request whose prompt begins like others, or goes on where one of them ended."""
        family = self._random.choice(self._families)
        common = self._random.choice([self._random.randrange(1, 100), 4 * self._random.randrange(1, 25)])
        own = self._random.choice([0, 0, 1, 4, self._random.randrange(40)])
        prompt = family[:common] + self._tokens(own)
        if self._random.random() < 0.1:  # a branch that others may take, too
            self._families[self._random.randrange(len(self._families))] = prompt + self._tokens(MAX_MODEL_LEN)
        self._count += 1
        theirs = VllmRequest(
            request_id=f"r{self._count}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=MAX_MODEL_LEN),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        number, writer = RequestNumber(self._count), self._session.writer
        ours = Request(RequestId(theirs.request_id), number, writer, self._pool.new_tables())
        ours.num_prompt_tokens = len(prompt)
        both = _Both(theirs, ours)
        both.know()
        self._session.add(ours)
        self._session.num_tokens += ours.num_tokens
        self._waiting.append(both)

    def _admit(self) -> None:
        if not self._waiting or len(self._running) == _MAX_RUNNING:
            return
        both = self._waiting[0]
        found, num_found, junction = self._manager.get_computed_blocks(both.theirs)
        both.theirs.shared_prefix_boundary = junction
        computed = self._pool.look_up(both.ours)
        expected = [list(ids) for ids in found.get_block_ids()]
        if computed.num_tokens < num_found and self._lacks_block_after(both, num_found):
            self.is_apart = True
            return
        assert (computed.num_tokens, [list(ids) for ids in computed.block_ids]) == (num_found, expected)
        if self._shape.retention_tokens is not None:
            assert computed.junction_tokens == junction
        self.num_hits += num_found > 0
        self.num_junctions += junction > 0
        if self._random.random() < 0.1:  # it waits, and is looked up again
            return
        if self._allocate(both, self._chunk(both, num_found), (found, computed)):
            self._running.append(self._waiting.pop(0))
        elif not self._running:  # it never fits
            self._session.forget(self._waiting.pop(0).ours)
        elif self._random.random() < 0.5:
            self._free(self._running[0])

    def _lacks_block_after(self, both: _Both, num_found: int) -> bool:
        """Whether vLLM's hit rests on what an EAGLE draft may have meant for another token: see ADR 10.

        It checks that of a group at the length that this group agreed to first, not at what others shortened that to.
        """
        at, hashes = num_found // BLOCK_SIZE, both.theirs.block_hashes
        return self._shape.use_eagle and any(
            not self._manager.block_pool.get_cached_block(hashes[at], [i]) for i in range(len(self._shape.windows))
        )

    def _chunk(self, both: _Both, num_found: int) -> int:
        left = both.ours.num_tokens - both.ours.num_computed_tokens - num_found
        return min(left, self._random.choice([3, 8, 16, 1000]))

    def _go_on(self) -> None:
        """The next chunk of a prompt, or a decode, with EAGLE of drafts of which some are thrown away."""
        if not self._running:
            return
        both = self._random.choice(self._running)
        ours = both.ours
        if ours.num_tokens - ours.num_computed_tokens > 0:
            if not self._allocate(both, self._chunk(both, 0)):
                self._preempt()
            return
        if ours.num_tokens + 5 > MAX_MODEL_LEN:
            self._free(both)
            return
        both.grow(self._tokens(1))
        self._session.num_tokens += 1
        drafts = self._random.randrange(4) if self._shape.use_eagle else 0
        if not self._allocate(both, 1 + drafts):
            self._preempt()
            return
        accepted = self._random.randint(0, drafts)
        if not self._pool.can_reject(ours, ours.num_computed_tokens - (drafts - accepted)):
            accepted = drafts
        both.grow(self._tokens(accepted))
        self._session.num_tokens += accepted
        ours.num_computed_tokens -= drafts - accepted
        both.theirs.num_computed_tokens -= drafts - accepted

    def _allocate(self, both: _Both, count: int, hit: tuple[Any, ComputedBlocks] | None = None) -> bool:
        found, computed = hit or (None, None)
        num_found = computed.num_tokens if computed else 0
        lookahead = self._random.randrange(3) if self._shape.use_eagle else 0
        room = self._manager.allocate_slots(
            both.theirs,
            count,
            num_new_computed_tokens=num_found,
            new_computed_blocks=found,
            num_lookahead_tokens=lookahead,
        )
        new = self._pool.allocate(both.ours, count, lookahead, computed, sequence=_STEP)
        expected = None if room is None else [list(ids) for ids in room.get_block_ids()]
        assert (None if new is None else [list(ids) for ids in new]) == expected
        if new is None:
            self.num_refusals += 1
            return False
        both.theirs.num_computed_tokens += num_found + count
        assert both.theirs.num_computed_tokens == both.ours.num_computed_tokens
        return True

    def _preempt(self) -> None:
        if not self._running:
            return
        both = self._running.pop()
        self._manager.free(both.theirs)
        both.theirs.num_computed_tokens = 0
        both.theirs.num_preemptions += 1
        self._pool.preempt(both.ours)
        self._waiting.insert(0, both)

    def _finish(self) -> None:
        if self._running:
            self._free(self._random.choice(self._running))

    def _free(self, both: _Both) -> None:
        self._running.remove(both)
        self._manager.free(both.theirs)
        self._pool.free(both.ours)
        self._session.forget(both.ours)
        if self._random.random() < 0.3:  # a chat that goes on
            self._families[self._random.randrange(len(self._families))] = [
                *both.theirs.all_token_ids,
                *self._tokens(MAX_MODEL_LEN),
            ]

    def _evict(self) -> None:
        num_blocks = self._pool.blocks.num_blocks
        block_ids = set(self._random.sample(range(1, num_blocks), min(5, num_blocks - 1)))
        self._manager.evict_blocks(block_ids)
        self._pool.blocks.evict(map(BlockId, block_ids))

    def _reset(self) -> None:
        if self._random.random() < 0.3:
            for both in [*self._running]:
                self._free(both)
        assert self._pool.reset_prefix_cache() == self._manager.reset_prefix_cache()

    def _compare(self) -> None:
        theirs, ours = self._manager.block_pool, self._pool.blocks
        assert [block.block_id for block in theirs.free_block_queue.get_all_free_blocks()] == list(ours.free_list)
        for block in theirs.blocks:
            block_id = BlockId(block.block_id)
            block_hash, key = ours.prefix_map.hash_of(block_id), None
            if block_hash is not None:
                key = block_hash + ours.prefix_map.group_of(block_id).to_bytes(4, "big")
            assert key == block.block_hash, block_id
        for both in self._running:
            tables = [list(table.block_ids) for table in both.ours.tables]
            assert tables == [list(ids) for ids in self._manager.get_block_ids(both.theirs.request_id)]
