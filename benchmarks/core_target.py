"""The core in process, called directly, as vLLM's scheduler calls its manager."""

import secrets
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.workloads import BLOCK_SIZE, MAX_MODEL_LEN, WINDOW_TOKENS, NewBlocks, Task, WorkloadError
from kvpool.client.hashing import BlockHasher
from kvpool.core import ids
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.ids import BlockHash, PoolName, RequestId, RequestNumber, SessionNumber
from kvpool.core.sessions import request as core
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.core.specs.pool_config import HashScheme, KVCacheGroup, PoolConfig

_SESSION: Final = SessionNumber(1)


def pool_config(name: str, task: Task) -> PoolConfig:
    """Returns the configuration of a task's pool."""
    window = SlidingWindowSpec(BLOCK_SIZE, sliding_window=WINDOW_TOKENS)
    specs = (FullAttentionSpec(BLOCK_SIZE), *[window] * task.num_windowed_groups)
    groups = tuple(KVCacheGroup(spec, (f"layer.{i}",)) for i, spec in enumerate(specs))
    scheme = HashScheme(none_hash=secrets.token_bytes(32))
    return PoolConfig(
        PoolName(name), task.num_blocks, MAX_MODEL_LEN, groups, hash_scheme=scheme, allow_too_few_blocks=True
    )


class CoreRequest:
    """A request and the tokens that its scheduler holds.

    Attributes:
        token_ids: Prompt and output.
        known: The core's request.
    """

    __slots__ = ("known", "token_ids")

    def __init__(self, token_ids: list[int], known: core.Request) -> None:
        self.token_ids = list(token_ids)
        self.known = known


class CoreTarget:
    """See `Target`."""

    def __init__(self, task: Task) -> None:
        config = pool_config("bench", task)
        self.pool = KVCacheManager(config)
        self._hasher = BlockHasher(config.hash_scheme, config.hash_block_size)
        self._sequence = ids.StepNumber(1)
        self._count = 0

    def hashing(self, token_ids: list[int]) -> Callable[[], object]:
        """See `Target`."""
        hashes: list[BlockHash] = []
        return lambda: self._hasher.extend(hashes, token_ids)

    def make(self, token_ids: list[int]) -> CoreRequest:
        """See `Target`."""
        self._count += 1
        number, tables = RequestNumber(self._count), self.pool.new_tables()
        known = core.Request(RequestId(f"r{number}"), number, _SESSION, tables, num_tokens=len(token_ids))
        self._hasher.extend(known.hashes, token_ids)
        return CoreRequest(token_ids, known)

    def lookup(self, request: CoreRequest) -> ComputedBlocks:
        """See `Target`."""
        return self.pool.get_computed_blocks(request.known)

    def num_hit_tokens(self, hit: ComputedBlocks) -> int:
        """See `Target`."""
        return hit.num_tokens

    def allocate(
        self, request: CoreRequest, num_new_tokens: int, hit: ComputedBlocks | None = None
    ) -> NewBlocks | None:
        """See `Target`."""
        return self.pool.allocate_slots(request.known, num_new_tokens, computed=hit, sequence=self._sequence)

    def serve(self, token_ids: list[int]) -> CoreRequest:
        """See `Target`."""
        request = self.make(token_ids)
        hit = self.pool.get_computed_blocks(request.known)
        num_new_tokens = len(token_ids) - hit.num_tokens
        if self.pool.allocate_slots(request.known, num_new_tokens, computed=hit, sequence=self._sequence) is None:
            raise WorkloadError("a prompt found too few blocks")
        return request

    def free(self, request: CoreRequest) -> None:
        """See `Target`."""
        self.pool.free(request.known)

    def decode(self, requests: Sequence[CoreRequest], token_ids: Sequence[int]) -> Sequence[NewBlocks | None]:
        """See `Target`."""
        self.settle()
        allocate, sequence = self.pool.allocate_slots, self._sequence
        new = []
        for request, token_id in zip(requests, token_ids, strict=True):
            known, tokens = request.known, request.token_ids
            tokens.append(token_id)
            known.num_tokens += 1
            if not known.num_tokens % BLOCK_SIZE:
                self._hasher.extend(known.hashes, tokens)
            new.append(allocate(known, 1, sequence=sequence))
        return new

    def settle(self) -> None:
        """See `Target`."""
        self.pool.blocks.prefix_map.pending.publish(_SESSION, self._sequence)
        self._sequence = ids.StepNumber(self._sequence + 1)

    def reset(self) -> None:
        """See `Target`."""
        if not self.pool.reset_prefix_cache():
            raise WorkloadError("the cache could not be reset")

    def close(self) -> None:
        """See `Target`."""
