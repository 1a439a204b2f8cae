"""Support of KV connectors, which load blocks of requests from other places.

Connectors receive block ids, and which blocks of a request are cached. Loaded blocks count as filled by the step that
admits the request or, for asynchronous loads, by the step that caches them.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.utils.math_utils import cdiv

from kvpool.client.request import Request
from kvpool.client.vllm.engine_calls import EngineCalls
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.specs.pool_config import KVCacheGroup

_BINDS: Final = ("bind_kv_cache_manager", "bind_gpu_block_pool")


def unsupported_connector(scheduler: Any, groups: tuple[KVCacheGroup, ...]) -> tuple[str, str] | None:
    """Returns why the scheduler's KV connectors are not supported, and a remedy; None if they are."""
    if len(groups) > 1 or not isinstance(groups[0].spec, FullAttentionSpec):
        return "KV connectors with groups other than one of full attention", "set no kv_transfer_config"
    if scheduler.needs_kv_cache_zeroing:
        return "KV connectors with zeroing of blocks", "set no kv_transfer_config"
    connector = scheduler.connector
    for each in getattr(connector, "_connectors", (connector,)):  # those of a MultiConnector
        kind = type(each)
        if any(getattr(kind, name) is not getattr(KVConnectorBase_V1, name) for name in _BINDS):
            return f"{kind.__name__}, which uses vLLM's own block pool", "use another connector"
    return None


class UncertainLoads:
    """Loads within steps whose outputs have not arrived, in memory that other engines share.

    1. Other sessions hit a loaded block when its step is reported as executed. What has failed to load, and what was
       computed from it, is evicted with this report.
    2. A request that loses its blocks before the output arrives loses the hashes of those that it has not hit.
    """

    def __init__(self, calls: EngineCalls) -> None:
        self._calls = calls
        self._rounds: deque[dict[str, int]] = deque([{}])
        """By round, the last of which is being scheduled: requests that load, each with the blocks of its hit."""

    def note(self, request_id: str, num_hits: int) -> None:
        """Records that the step of this round loads blocks of a request, which follow those of its hit."""
        self._rounds[-1][request_id] = num_hits

    def end_round(self) -> Mapping[str, int]:
        """Ends the round; returns its loads, for `settle`."""
        self._rounds.append({})
        return self._rounds[-2]

    def settle(self, loads: Mapping[str, int], invalid_block_ids: Collection[int]) -> None:
        """Handles the output of a round: evicts the blocks of each request from the first one that failed to load."""
        while self._rounds.popleft() is not loads:  # of rounds without an output
            pass
        if not invalid_block_ids:
            return
        evicted = set[int]()
        for request in self._calls.requests.values():
            (table,) = request.block_ids
            first = next((i for i, block_id in enumerate(table) if block_id in invalid_block_ids), len(table))
            evicted.update(table[first:])
        self._evict(evicted)

    def forget(self, request: Request) -> None:
        """Evicts the blocks of a request that loses them, if an output that tells about their contents is missing."""
        num_hits = next((each[request.request_id] for each in self._rounds if request.request_id in each), None)
        if num_hits is not None:
            self._evict(request.block_ids[0][num_hits:])

    def _evict(self, block_ids: Iterable[int]) -> None:
        ids = sorted(set(block_ids))
        self._calls.deliver(lambda builder: builder.evict_blocks(ids))


class DeferredFrees:
    """The part of vLLM's block pool that the scheduler uses: frees blocks when no step in flight can write them."""

    @staticmethod
    def free_blocks(frees: Iterable[Callable[[], None]]) -> None:
        """Frees what `KVCacheManager.pop_blocks_for_free` returned."""
        for free in frees:
            free()


class Coordinator:
    """The part of vLLM's coordinator that the scheduler uses.

    Attributes:
        single_type_managers: Block size and spec of each group.
    """

    enable_partial_hash_hits = False

    def __init__(self, spans_tokens: Sequence[int], specs: Sequence[Any], requests: Mapping[str, Request]) -> None:
        self.single_type_managers = [
            SimpleNamespace(block_size=span, kv_cache_spec=spec, kv_cache_group_id=i)
            for i, (span, spec) in enumerate(zip(spans_tokens, specs, strict=True))
        ]
        self._requests = requests

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, **_: object) -> int:
        """Number of blocks that a request with a connector still needs to hold `num_tokens`."""
        (manager,) = self.single_type_managers
        session_request = self._requests.get(request_id)  # None if no loaded block was valid
        num_blocks: int = cdiv(num_tokens, manager.block_size)
        return max(num_blocks - (len(session_request.block_ids[0]) if session_request else 0), 0)
