"""vLLM's own KV cache manager and a pool of the same description, to which the same is done, and all that both show.

Import it where vLLM 0.32 or later is installed.
"""

import math
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, Final

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_manager import KVCacheManager as VllmManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request as VllmRequest

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import NULL_BLOCK, BlockHash, BlockId, RequestId, RequestNumber, SessionNumber, StepNumber
from kvpool.core.sessions.request import Request
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    has_gaps,
)
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig

BLOCK_SIZE: Final = 4
SESSION_NUMBER: Final = SessionNumber(1)
_HASH: Final = get_hash_fn_by_name("sha256_cbor")
init_none_hash(_HASH)


def make_groups(specs: Iterable[KVCacheSpec], undrafted: Container[int] = ()) -> tuple[KVCacheGroup, ...]:
    """A group of one layer for each."""
    return tuple(KVCacheGroup(spec, (f"layer.{i}",), i in undrafted) for i, spec in enumerate(specs))


def _vllm_spec(spec: KVCacheSpec) -> Any:
    """The same for vLLM."""
    dtype = kv_cache_interface.torch.float32
    shape = {"block_size": spec.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": dtype}
    match spec:
        case MambaSpec():
            return kv_cache_interface.MambaSpec(
                block_size=spec.block_size,
                shapes=((1,),),
                dtypes=(dtype,),
                mamba_cache_mode="align",
                num_speculative_blocks=spec.num_speculative_blocks,
                num_prefill_checkpoint_blocks=spec.num_prefill_checkpoint_blocks,
                prefill_checkpoint_alignment=spec.prefill_checkpoint_alignment or None,
            )
        case ChunkedLocalAttentionSpec():
            return kv_cache_interface.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=spec.attention_chunk_size)
        case SlidingWindowMLASpec():
            replay = {"sliding_window": spec.sliding_window, "bounded_replay": spec.bounded_replay}
            return kv_cache_interface.SlidingWindowMLASpec(**shape, **replay)
        case SlidingWindowSpec():
            return kv_cache_interface.SlidingWindowSpec(**shape, sliding_window=spec.sliding_window)
        case FullAttentionSpec():
            return kv_cache_interface.FullAttentionSpec(**shape)
    raise TypeError(type(spec))


def _lookahead(config: PoolConfig) -> dict[str, int]:
    """Arguments of vLLM's manager and hasher for hashes that cover later tokens; 0.32 has none."""
    num_tokens = config.hash_scheme.num_lookahead_tokens
    return {"num_hash_lookahead_tokens": num_tokens} if num_tokens else {}


def _manager(config: PoolConfig) -> Any:
    """vLLM's, with what a pool is made with.

    Without an interval vLLM keeps windows wherever a hit can end. Pools keep all of a window then. They are declared
    with the hit alignment as the interval if that is more than a block.
    """
    common_tokens = math.lcm(*config.spans_tokens)
    has_sizes = len({*config.spans_tokens}) > 1 and not config.partial_hits
    retention_tokens = config.retention_tokens
    if has_sizes and retention_tokens == common_tokens and not any(has_gaps(g.spec) for g in config.groups):
        retention_tokens = None
    groups = [
        kv_cache_interface.KVCacheGroupSpec([*group.layer_names], _vllm_spec(group.spec)) for group in config.groups
    ]
    if config.use_eagle:  # vLLM flags the groups with layers of the drafter, which has no states
        for made, group in zip(groups, config.groups, strict=True):
            made.is_eagle_group = not (group.has_no_draft or isinstance(group.spec, MambaSpec))
    return VllmManager(
        kv_cache_interface.KVCacheConfig(
            num_blocks=config.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=retention_tokens,
        ),
        max_model_len=config.max_model_len,
        scheduler_block_size=common_tokens,
        hash_block_size=config.hash_block_size,
        max_in_flight_tokens=config.max_in_flight_tokens or None,
        enable_caching=config.enable_caching,
        enable_kv_cache_events=config.enable_events,
        use_eagle=config.use_eagle,
        **_lookahead(config),
        **({"num_prefill_lookahead": config.num_reprefillable_tokens + 1} if config.num_reprefillable_tokens else {}),
    )


@dataclass(slots=True, eq=False)
class RequestPair:
    """A request of both. vLLM's counts its tokens and hashes them; ours follows."""

    theirs: Any
    ours: Request

    def grow(self, token_ids: list[int]) -> None:
        self.theirs.append_output_token_ids(token_ids)
        self.follow()

    def follow(self) -> None:
        """Ours has vLLM's hashes."""
        self.ours.num_tokens = self.theirs.num_tokens
        self.ours.hashes += map(BlockHash, self.theirs.block_hashes[len(self.ours.hashes) :])

    def compute(self, num_tokens: int) -> None:
        """After an allocation: a pool counts what is computed, of vLLM the scheduler does."""
        self.theirs.num_computed_tokens += num_tokens
        assert self.theirs.num_computed_tokens == self.ours.num_computed_tokens

    def cache(self, manager: Any, pool: KVCacheManager, sequence: StepNumber) -> None:
        """After an output, as the scheduler of vLLM 0.33 does if there are drafts."""
        manager.cache_blocks(self.theirs, self.theirs.num_computed_tokens)
        pool.cache_blocks(self.ours, self.ours.num_computed_tokens, sequence=sequence)

    def keep(self, num_computed_tokens: int) -> None:
        """Drafts after these are thrown away."""
        self.theirs.num_computed_tokens = self.ours.num_computed_tokens = num_computed_tokens


class ManagerPair:
    """vLLM's manager and a pool. What only one of two programs asks, it asks of each itself.

    Attributes:
        config: What both are made with.
        manager: vLLM's.
        pool: Ours.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.manager = _manager(config)
        self.pool = KVCacheManager(config)
        assert getattr(self.manager.coordinator, "enable_partial_hash_hits", False) == config.partial_hits
        self._hasher = None
        if config.enable_caching:
            self._hasher = get_request_block_hasher(config.hash_block_size, _HASH, **_lookahead(config))

    def make_request(self, number: int, prompt: list[int]) -> RequestPair:
        """A request that holds nothing, of WRITER."""
        theirs = VllmRequest(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=self.config.max_model_len),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        ours = Request(RequestId(theirs.request_id), RequestNumber(number), SESSION_NUMBER, self.pool.new_tables())
        ours.num_prompt_tokens = len(prompt)
        both = RequestPair(theirs, ours)
        both.follow()
        return both

    def preempt(self, both: RequestPair) -> None:
        self.manager.free(both.theirs)
        both.theirs.num_computed_tokens = 0
        both.theirs.num_preemptions += 1
        self.pool.preempt(both.ours)

    def free(self, both: RequestPair) -> None:
        self.manager.free(both.theirs)
        self.pool.free(both.ours)

    def compare(self, requests: Iterable[RequestPair]) -> None:
        """Block tables, free blocks in the order in which they are taken, and of each block its owners and its hash."""
        theirs, ours = self.manager.block_pool, self.pool.blocks
        for both in requests:
            tables = [list(table.block_ids) for table in both.ours.tables]
            assert tables == [list(ids) for ids in self.manager.get_block_ids(both.theirs.request_id)]
        assert ours.num_free_blocks == theirs.get_num_free_blocks()
        assert list(ours.free_list) == [block.block_id for block in theirs.free_block_queue.get_all_free_blocks()]
        keys = defaultdict[BlockId, set[bytes]](set)
        for group_id, entry_hash, block_id in ours.prefix_map.entries():
            keys[block_id].add(entry_hash + group_id.to_bytes(4, "big"))
        for block in theirs.blocks:
            block_id = BlockId(block.block_id)
            assert block_id == NULL_BLOCK or ours.ref_cnt(block_id) == block.ref_cnt, block_id
            block_hash, key = ours.block_hash(block_id), None
            if block_hash is not None:  # theirs ends with the group
                key = block_hash + ours.prefix_map.group_id(block_id).to_bytes(4, "big")
            assert key == block.block_hash, block_id
            further = theirs.cached_block_hashes_by_block.get(block_id, set()) if self.config.partial_hits else set()
            expected = {block.block_hash, *further} - {None}
            assert keys[block_id] == expected or not self.config.partial_hits, block_id
