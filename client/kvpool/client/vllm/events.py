"""Publishes the block events of an engine's pool through vLLM's event publisher.

1. A thread that watches the pool publishes events as they occur, even while the engine is idle.
2. At the start, and after a gap in the events, an AllBlocksCleared event is published, then all cached blocks.
3. The removal of a prefix is published when its last copy is removed. If the events of the vLLM version have no group,
   the removal of each copy is published, as in vLLM.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvpool.client.connection import Client
from kvpool.client.transports.transport import EventBatch, WatchKind
from kvpool.client.vllm.versions import EVENTS_HAVE_GROUPS, SPECS
from kvpool.core.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from kvpool.core.ids import BlockHash
from kvpool.core.specs.pool_config import PoolConfig

_MEDIUM: Final = "GPU"

_log = logging.getLogger("kvpool.client.vllm")


class EventForwarder:
    """Publishes a pool's events through an engine's publisher until it is closed."""

    def __init__(self, client: Client, config: PoolConfig, specs: Iterable[Any], publisher: Any) -> None:
        """Starts to publish; `specs` are vLLM's, by group."""
        self._pool = config.name
        self._converter = EventConverter(specs)
        self._hash_block_size, self._spans_tokens = config.hash_block_size, config.spans_tokens
        self._num_lookahead_tokens = config.hash_scheme.num_lookahead_tokens
        self._publisher = publisher
        self._is_closed = False
        batches = client.watch(config.name, snapshot=True)
        threading.Thread(target=self._forward, args=(batches,), name="kvpool-events", daemon=True).start()

    def close(self) -> None:
        """Stops publishing; the thread ends with the connection."""
        self._is_closed = True

    def publish_hit(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Publishes the hit of a request that enables it with `kv_cache_report_mode`."""
        found = [
            _make_event(
                kv_events.BlockStored,
                block_hashes=self._hashes(request, size)[: len(ids)],
                parent_block_hash=None,
                token_ids=list(request.all_token_ids[: len(ids) * size]),
                lookahead_token_ids=self._lookahead_token_ids(request, size, len(ids)),
                block_size=size,
                lora_name=request.lora_request.lora_name if request.lora_request else None,
                group_idx=group_id,
                session_id=getattr(request, "session_id", None),
                **self._converter.spec_fields[group_id],
            )
            for group_id, (ids, size) in enumerate(zip(block_ids, self._spans_tokens, strict=True))
            if ids
        ]
        self._publish(time.time(), found)

    def _hashes(self, request: Any, size: int) -> Sequence[BlockHash]:
        """Hashes of the request's blocks of `size` tokens, each the last hash that it covers."""
        per_block = size // self._hash_block_size
        hashes: Sequence[BlockHash] = request.block_hashes[per_block - 1 :: per_block]
        return hashes

    def _lookahead_token_ids(self, request: Any, size: int, count: int) -> list[list[int]] | None:
        """The tokens after each of a request's first `count` blocks that the block's hash covers; None for none."""
        ahead = self._num_lookahead_tokens
        ends = range(size, (count + 1) * size, size)
        return [list(request.all_token_ids[end : end + ahead]) for end in ends] if ahead else None

    def _forward(self, batches: Iterator[EventBatch]) -> None:
        try:
            for batch in batches:
                events = self._converter.convert(batch.events)
                if batch.kind is WatchKind.START:
                    events.insert(0, kv_events.AllBlocksCleared())
                self._publish(batch.time_seconds, events)
        except Exception as error:  # noqa: BLE001 - the engine can run without events, so any error is only logged
            if not self._is_closed:
                _log.error("events no longer published", extra={"pool": self._pool, "error": str(error)})

    def _publish(self, time_seconds: float, events: list[Any]) -> None:
        if events and not self._is_closed:
            self._publisher.publish(kv_events.KVEventBatch(ts=time_seconds, events=events))


class EventConverter:
    """Converts a pool's events to those of vLLM.

    Attributes:
        spec_fields: What the events of each group say of its spec.
    """

    def __init__(self, specs: Iterable[Any]) -> None:
        """Reads vLLM's specs, by group."""
        self.spec_fields = [_spec_fields(spec) for spec in specs]

    def convert(self, events: Iterable[BlockEvent]) -> list[Any]:
        """Converts events; leaves out a removed copy while other copies are left."""
        return [made for event in events if (made := self._converted(event)) is not None]

    def _converted(self, event: BlockEvent) -> Any:
        match event:
            case AllBlocksCleared():
                return kv_events.AllBlocksCleared()
            case BlockRemoved():
                if event.copies_left and EVENTS_HAVE_GROUPS:
                    return None
                return _make_event(kv_events.BlockRemoved, block_hashes=[event.block_hash], group_idx=event.group_id)
            case BlockStored():
                parent = event.parent_block_hash
                return _make_event(
                    kv_events.BlockStored,
                    block_hashes=event.block_hashes,
                    parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                    token_ids=event.token_ids.tolist(),
                    block_size=event.block_size,
                    lora_name=event.lora_name,
                    group_idx=event.group_id,
                    lookahead_token_ids=event.lookahead_by_block,
                    **self.spec_fields[event.group_id],
                )


def _spec_fields(spec: Any) -> Mapping[str, Any]:
    if not hasattr(SPECS, "get_kv_cache_spec_kind"):  # events of older versions do not have these
        return {}
    return {
        "kv_cache_spec_kind": SPECS.get_kv_cache_spec_kind(spec).value,
        "kv_cache_spec_sliding_window": SPECS.get_kv_cache_spec_sliding_window(spec),
    }


def _make_event(kind: Any, *, block_hashes: Sequence[BlockHash], **fields: object) -> Any:
    """Makes an event with the fields that this version of vLLM has."""
    hashes = list(map(maybe_convert_block_hash, block_hashes))
    given = {"block_hashes": hashes, "lora_id": None, "medium": _MEDIUM, **fields}
    return kind(**{name: value for name, value in given.items() if name in kind.__struct_fields__})
