"""Views of a pool under the names of vLLM's internals, which its tests look at; AdminService answers.

Tests can evict a cached block. The free list, its links and what else changes a block are not there: the service owns
them.
"""

from collections.abc import Mapping
from typing import Any, Final

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import CrossAttentionManager

from engine.own import pools
from kvpool.client.vllm.blocks import KVCacheBlocks
from kvpool.client.vllm.manager import KVCacheManager
from kvpool.core.ids import NULL_BLOCK, BlockHash
from kvpool.core.specs.kinds import CrossAttentionSpec
from kvpool.v1.admin_pb2 import BlockInfo


class BlockView:
    """A block; its state is that of the moment when it is read."""

    def __init__(self, pool: "BlockPoolView", block_id: int) -> None:
        self._pool = pool
        self.block_id = block_id
        self.is_null = block_id == NULL_BLOCK

    def __eq__(self, other: object) -> bool:
        return self.block_id == getattr(other, "block_id", None)

    def __hash__(self) -> int:
        return hash(self.block_id)

    def __repr__(self) -> str:
        return f"<block {self.block_id}>"

    @property
    def ref_cnt(self) -> int:
        info = self._pool.infos().get(self.block_id)
        return info.ref_cnt if info else 0

    @property
    def block_hash(self) -> Any:
        info = self._pool.infos().get(self.block_id)
        return (
            make_block_hash_with_group_id(BlockHash(info.block_hash), info.group_id)
            if info and info.block_hash
            else None
        )

    _block_hash = block_hash

    @property
    def block_hash_num_tokens(self) -> int | None:
        """Length of the prefix that the block's hash stands for, if a request of the engine has it."""
        info = self._pool.infos().get(self.block_id)
        return self._pool.prefix_tokens(BlockHash(info.block_hash)) if info and info.block_hash else None


class BlockPoolView:
    """What vLLM's BlockPool shows, of the pool of a manager."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._infos: Mapping[int, BlockInfo] = {}
        self._sequence = -1
        self.num_gpu_blocks = manager.session.config.num_blocks
        self.hash_block_size = manager.session.config.hash_block_size
        self.free_block_queue = self
        self.free_blocks = manager.block_pool.free_blocks
        self.blocks: Final = [BlockView(self, block_id) for block_id in range(self.num_gpu_blocks)]
        self.null_block = self.blocks[NULL_BLOCK]
        self.kv_event_queue: Final = ()  # the service has them

    def flush(self) -> None:
        """Delivers what the manager would send with its next message."""
        self._manager.calls.settle()
        self._manager.calls.flush()

    def infos(self) -> Mapping[int, BlockInfo]:
        """Returns the state of each block; it is read once after each step."""
        self.flush()
        session = self._manager.session
        if session.sequence != self._sequence:
            self._infos = {info.block_id: info for info in pools.server().admin.blocks(session.config.name)}
            self._sequence = session.sequence
        return self._infos

    def prefix_tokens(self, block_hash: BlockHash) -> int | None:
        """Length of the prefix with this hash, of the requests of the engine."""
        unit = self._manager.session.config.hash_block_size
        known: list[list[bytes]] = [[*each.hashes] for each in self._manager.calls.requests.values()]
        return next(((hashes.index(block_hash) + 1) * unit for hashes in known if block_hash in hashes), None)

    def get_num_free_blocks(self) -> int:
        self.flush()
        return self._manager.session.pool().free_blocks

    num_free_blocks = property(get_num_free_blocks)

    def get_usage(self) -> float:
        return self._manager.usage

    def evict_blocks(self, block_ids: set[int]) -> None:
        self._manager.evict_blocks(block_ids)
        self.flush()

    @property
    def cached_block_hash_to_block(self) -> "CachedBlocks":
        found = CachedBlocks(self)
        for block in self.blocks:
            if block.block_hash is not None:
                found.setdefault(block.block_hash, {})[block.block_id] = block
        return found

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[BlockView] | None:
        cached = self.cached_block_hash_to_block
        found = [cached.get(make_block_hash_with_group_id(block_hash, group)) for group in kv_cache_group_ids]
        return [next(iter(copies.values())) for copies in found if copies] if all(found) else None


class ShownBlocks(KVCacheBlocks):
    """Blocks of a request, as views."""

    def __init__(self, blocks: KVCacheBlocks, pool: BlockPoolView) -> None:
        super().__init__(blocks.block_ids, blocks.computed, blocks.hashes)
        self._pool = pool

    @property
    def blocks(self) -> Any:
        return tuple([self._pool.blocks[block_id] for block_id in ids] for ids in self.block_ids)


class CachedBlocks(dict[Any, dict[int, BlockView]]):
    """Cached blocks by hash. What a test removes is evicted from the pool."""

    def __init__(self, pool: BlockPoolView) -> None:
        super().__init__()
        self._pool = pool

    @property
    def _cache(self) -> "CachedBlocks":
        return self

    def pop(self, block_hash: Any, *block_ids: Any) -> Any:
        """Removes blocks with a hash: the given one if it is cached, or all."""
        copies = self.get(block_hash, {}) if block_ids else self[block_hash]
        removed = {block_id: block for block_id, block in copies.items() if not block_ids or block_id in block_ids}
        self._pool.evict_blocks(set(removed))
        return removed


class _Tables(dict[str, list[BlockView]]):
    def __missing__(self, key: str) -> list[BlockView]:
        return []


class GroupView:
    """What vLLM's manager of one group shows."""

    def __init__(self, manager: KVCacheManager, pool: BlockPoolView, group_id: int) -> None:
        known = manager.coordinator.single_type_managers[group_id]
        self._manager, self._pool, self._group_id = manager, pool, group_id
        self._null_block = pool.null_block
        self.block_size = known.block_size
        self.kv_cache_spec = known.kv_cache_spec
        self.kv_cache_group_id = group_id

    @property
    def req_to_blocks(self) -> dict[str, list[BlockView]]:
        """The blocks of each request that has some."""
        self._pool.flush()
        requests = self._manager.calls.requests.items()
        tables = {name: request.block_ids[self._group_id] for name, request in requests if any(request.block_ids)}
        return _Tables({name: [self._pool.blocks[i] for i in ids] for name, ids in tables.items()})

    @property
    def num_cached_block(self) -> dict[str, int]:
        return {
            name: self._manager._num_cached_blocks(request) for name, request in self._manager.calls.requests.items()
        }


class CrossAttentionView(GroupView, CrossAttentionManager):  # type: ignore[misc]  # vLLM has no types here
    """That of a group with cross attention, which tests find by its class."""


def show_blocks(manager: Any) -> None:
    """Gives a manager the views."""
    manager.block_pool = BlockPoolView(manager)
    manager.coordinator.block_pool = manager.block_pool
    kinds = [
        CrossAttentionView if isinstance(group.spec, CrossAttentionSpec) else GroupView
        for group in manager.session.config.groups
    ]
    manager.coordinator.single_type_managers = [
        kind(manager, manager.block_pool, group_id) for group_id, kind in enumerate(kinds)
    ]
    get_blocks, look_up = manager.get_blocks, manager.get_computed_blocks

    def look_up_shown(request: Any, max_cache_hit_length: None = None) -> tuple[Any, ...]:
        blocks, *rest = look_up(request, max_cache_hit_length)
        return ShownBlocks(blocks, manager.block_pool), *rest

    manager.get_blocks = lambda request_id: ShownBlocks(get_blocks(request_id), manager.block_pool)
    manager.get_computed_blocks = look_up_shown
