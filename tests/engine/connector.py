"""A KV connector that moves nothing: what it finds, when loads end and how, follows from each request's id.

It records the calls that it gets, for comparison.
"""

import zlib
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput

ENDS: Final = ("loaded", "loading", "sent", "kept", "failed", "unknown")
Calls = list[tuple[Any, ...]]


class ScriptedConnector(KVConnectorBase_V1):  # type: ignore[misc] # untyped where vLLM is not installed
    """The scheduler's half of a connector.

    Attributes:
        calls: The end of each request, one of `ENDS` first, and the calls about its blocks.
        hits: Local blocks that each request had hit when it was asked about last.
    """

    fails_cached = False
    """Whether loads also fail in blocks that have a hash already, as those have that are loaded within the step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.calls: Calls = []
        self._block_size = vllm_config.cache_config.block_size
        self.hits: dict[str, int] = {}
        self._asked: dict[str, int] = {}
        self._loading: dict[str, tuple[int, set[int]]] = {}  # steps left, and blocks that will turn out invalid
        self._invalid_at_once: dict[str, set[int]] = {}
        self._sending: dict[str, int] = {}
        self._failed: set[str] = set()

    # ---- the scheduler's half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        times = self._asked[request.request_id] = self._asked.get(request.request_id, 0) + 1
        self.hits[request.request_id] = num_computed_tokens // self._block_size
        draw = _draw(request.request_id)
        left = request.num_tokens - num_computed_tokens
        aligned = min(draw // 7 % 5, (left - 1) // self._block_size) * self._block_size
        if draw % 6 == 0 and times == 1:
            self.calls.append(("unknown", request.request_id, num_computed_tokens))
            return None, False
        if draw % 6 in (0, 1):
            return aligned, False
        if draw % 6 in (2, 3) and times <= 2:
            return aligned, aligned > 0
        if draw % 6 == 4 and times == 1:  # all of the prompt
            return left, left > 0
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        is_late = num_external_tokens and _draw(request.request_id) % 6 in (2, 3, 4)
        (ids,) = blocks.get_block_ids()
        unhashed = blocks.get_unhashed_block_ids()
        assert unhashed == [block.block_id for block in blocks.blocks[0] if block.block_hash is None]
        self.calls.append(
            ("loading" if is_late else "loaded", request.request_id, num_external_tokens, list(ids), unhashed)
        )
        if not num_external_tokens:
            return
        draw = _draw(f"{request.request_id} {self._asked[request.request_id]}")
        first = (request.num_tokens - 1) // self._block_size // 2
        invalid = set(ids[first : first + 1]) if draw % 3 == 0 and set(ids[first:]) & set(unhashed) else set()
        if invalid and not invalid & set(unhashed):
            invalid = set(unhashed[:1])
        if self.fails_cached and draw % 3:
            hits = self.hits[request.request_id]
            invalid = set(ids[hits : hits + num_external_tokens // self._block_size][:1])
        if invalid:
            self._failed.add(request.request_id)
            self.calls.append(("failed", request.request_id, sorted(invalid)))
        if is_late:
            self._loading[request.request_id] = (draw % 4 + 1, invalid)
        elif invalid:
            self._invalid_at_once[request.request_id] = invalid

    def build_connector_meta(self, _: Any) -> KVConnectorMetadata:
        self._loading = {each: (steps - 1, invalid) for each, (steps, invalid) in self._loading.items()}
        self._sending = {each: steps - 1 for each, steps in self._sending.items()}
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        is_whole = request.request_id not in self._failed and request.request_id not in self._loading
        is_kept = _draw(request.request_id) % 3 == 0 and bool(block_ids) and is_whole
        self.calls.append(("kept" if is_kept else "sent", request.request_id, list(block_ids)))
        if is_kept:
            self._sending[request.request_id] = _draw(request.request_id) % 5 + 1
        return is_kept, None

    # ---- what a worker would say

    def take_output(self, scheduled: set[str]) -> KVConnectorOutput:
        """What came of the loads and sends of a step."""
        loaded = {each for each, (steps, _) in self._loading.items() if steps <= 0}
        sent = {each for each, steps in self._sending.items() if steps <= 0}
        invalid: set[int] = set().union(*[self._loading.pop(each)[1] for each in sorted(loaded)])
        for each in scheduled & set(self._invalid_at_once):
            invalid |= self._invalid_at_once.pop(each)
        for each in sent:
            del self._sending[each]
        return KVConnectorOutput(finished_recving=loaded, finished_sending=sent, invalid_block_ids=invalid)

    # ---- the worker's half, abstract in vLLM's class; nothing calls it where no model runs

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


def _draw(text: str) -> int:
    return zlib.crc32(text.encode())
