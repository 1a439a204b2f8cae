"""KV connectors, which bring blocks of requests from elsewhere: which are served, and what the scheduler asks for them.

They are told ids, and which blocks of a request are cached. What they bring counts as filled by the step that admits
the request or, where that is not waited for, by the step that caches it.
"""

from collections.abc import Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.utils.math_utils import cdiv

from kvpool.client.request import Request
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.specs.pool_config import KVCacheGroup

_BINDS: Final = ("bind_kv_cache_manager", "bind_gpu_block_pool")


def lacking(scheduler: Any, groups: tuple[KVCacheGroup, ...]) -> str | None:
    """What the service lacks that the scheduler's KV connectors need; None if it serves them."""
    if len(groups) > 1 or not isinstance(groups[0].spec, FullAttentionSpec):
        return "KV connectors beside other groups than one of full attention"
    if getattr(scheduler, "needs_kv_cache_zeroing", False):
        return "KV connectors where blocks are zeroed"
    if getattr(scheduler, "defer_block_free", False):
        return "KV connectors that load, with async scheduling"
    connector = scheduler.connector
    for each in getattr(connector, "_connectors", (connector,)):  # those of a MultiConnector
        kind = type(each)
        if any(getattr(kind, name, None) is not getattr(KVConnectorBase_V1, name, None) for name in _BINDS):
            return f"{kind.__name__}, which works on vLLM's own block pool"
    return None


class Coordinator:
    """What the scheduler asks of each group.

    Attributes:
        single_type_managers: Each group's block size and spec.
    """

    enable_partial_hash_hits = False

    def __init__(self, single_type_managers: list[Any], requests: Mapping[str, Request]) -> None:
        self.single_type_managers = single_type_managers
        self._requests = requests

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, **_: object) -> int:
        """Blocks that a request beside a connector has yet to be given to hold so many tokens."""
        (manager,) = self.single_type_managers
        known = self._requests.get(request_id)  # none where nothing that was loaded was valid
        num_blocks: int = cdiv(num_tokens, manager.block_size)
        return max(num_blocks - (len(known.block_ids[0]) if known else 0), 0)
