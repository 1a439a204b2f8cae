"""Publishes the block events of an engine's pool through vLLM's event publisher.

1. A thread that watches the pool publishes events as they occur, even while the engine is idle.
2. At the start, after a gap in the events and after each subscription, an AllBlocksCleared event is published, then all
   cached blocks. When the pool is lost, AllBlocksCleared is published.
3. A block is published after its parent: see `ParentsFirst`. Blocks of several hash blocks are published by all their
   hashes, as blocks of `hash_block_size` tokens, of which a block of another group can be a child.
4. The removal of a prefix from a tier is published when its last copy there is removed.
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
from kvpool.client.vllm.parents_first import ParentsFirst
from kvpool.client.vllm.versions import SPECS
from kvpool.core.errors import UnavailableError
from kvpool.core.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, Medium
from kvpool.core.ids import BlockHash
from kvpool.core.specs.pool_config import PoolConfig

_MEDIA: Final = {Medium.FIRST_TIER: kv_events.MEDIUM_GPU, Medium.HOST_MEMORY: kv_events.MEDIUM_CPU}
_HEARTBEAT_SECONDS: Final = 1.0
"""A subscriber waits for a heartbeat at most, while the pool does not change."""
_SNAPSHOT_PAUSE_SECONDS: Final = 5.0
"""A subscriber that connects again and again costs all others no more than one snapshot in this time."""

_log = logging.getLogger("kvpool.client.vllm")


class EventForwarder:
    """Publishes a pool's events through an engine's publisher until it is closed."""

    def __init__(self, client: Client, config: PoolConfig, specs: Iterable[Any], publisher: Any) -> None:
        """Starts to publish; `specs` are vLLM's, by group."""
        self._pool = config.name
        self._converter = EventConverter(specs)
        self._block_size, self._spans_tokens = config.hash_block_size, config.spans_tokens
        self._num_lookahead_tokens = config.hash_scheme.num_lookahead_tokens
        self._publisher = publisher
        self._is_closed = False
        self._is_cleared = threading.Event()
        self._client = client
        self._subscribed: threading.Event = getattr(publisher, "subscribed", threading.Event())
        self._subscribed.clear()
        watch = self._watch()
        threading.Thread(target=self._forward, args=(watch,), name="kvpool-events", daemon=True).start()

    def close(self) -> None:
        """Stops publishing; the thread ends with the connection."""
        self._is_closed = True

    def publish_cleared(self) -> None:
        """Publishes with the next batch that the engine no longer hits the blocks that were published before."""
        self._is_cleared.set()

    def publish_hit(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Publishes the hit of a request, if the request enables it with `kv_cache_report_mode`."""
        if getattr(request, "kv_cache_report_mode", "") != "full":
            return
        found = [
            _make_event(
                kv_events.BlockStored,
                block_hashes=request.block_hashes[: len(ids) * span // self._block_size],
                parent_block_hash=None,
                token_ids=list(request.all_token_ids[: len(ids) * span]),
                lookahead_token_ids=self._lookahead_token_ids(request, len(ids) * span),
                block_size=self._block_size,
                lora_name=request.lora_request.lora_name if request.lora_request else None,
                group_idx=group_id,
                session_id=request.session_id,
                **self._converter.spec_fields[group_id],
            )
            for group_id, (ids, span) in enumerate(zip(block_ids, self._spans_tokens, strict=True))
            if ids
        ]
        self._publish(time.time(), found)

    def _lookahead_token_ids(self, request: Any, num_tokens: int) -> list[list[int]] | None:
        """The tokens after each block of a request's first `num_tokens` that its hash covers; None for none."""
        ahead, size = self._num_lookahead_tokens, self._block_size
        ends = range(size, num_tokens + 1, size)
        return [list(request.all_token_ids[end : end + ahead]) for end in ends] if ahead else None

    def _watch(self) -> Iterator[EventBatch]:
        return self._client.watch(self._pool, snapshot=True, heartbeat_seconds=_HEARTBEAT_SECONDS)

    def _batches(self, watch: Iterator[EventBatch]) -> Iterator[EventBatch]:
        """Yields the batches of a watch, and of the next one after a subscription."""
        is_whole, pause_seconds = False, 0.0  # a subscriber of the engine before comes back at once
        while True:
            began_seconds = time.monotonic()
            for batch in watch:
                yield batch
                is_whole = batch.kind is WatchKind.SNAPSHOT_END or (is_whole and batch.kind is not WatchKind.START)
                is_due = self._subscribed.is_set() and time.monotonic() - began_seconds >= pause_seconds
                if is_whole and is_due:  # a snapshot that has begun is completed for the others
                    break
            pause_seconds = _SNAPSHOT_PAUSE_SECONDS
            self._subscribed.clear()
            try:
                watch = self._watch()
            except UnavailableError:
                self._subscribed.set()  # the watch before continues when the service does

    def _forward(self, watch: Iterator[EventBatch]) -> None:
        try:
            for batch in self._batches(watch):
                is_reset = self._is_cleared.is_set()
                if is_reset:  # only then: a reset that comes now must not be lost
                    self._is_cleared.clear()
                starts = [AllBlocksCleared()] if is_reset or batch.kind is WatchKind.START else []
                self._publish(batch.time_seconds, self._converter.convert([*starts, *batch.events]))
        except Exception as error:  # noqa: BLE001 - the engine can run without events, so any error is only logged
            if not self._is_closed:
                _log.error("events no longer published", extra={"pool": self._pool, "error": str(error)})
                self._publish(time.time(), [kv_events.AllBlocksCleared()])

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
        self._parents_first = ParentsFirst()

    def convert(self, events: Iterable[BlockEvent]) -> list[Any]:
        """Converts events; leaves out a removed copy while other copies are left."""
        ordered = self._parents_first.ordered(events)
        return [made for event in ordered if (made := self._converted(event)) is not None]

    def _converted(self, event: BlockEvent) -> Any:
        match event:
            case AllBlocksCleared():
                return kv_events.AllBlocksCleared()
            case BlockRemoved():
                if event.copies_left:
                    return None
                return _make_event(
                    kv_events.BlockRemoved,
                    block_hashes=[event.block_hash],
                    group_idx=event.group_id,
                    medium=_MEDIA[event.medium],
                )
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
                    medium=_MEDIA[event.medium],
                    **self.spec_fields[event.group_id],
                )


def _spec_fields(spec: Any) -> Mapping[str, Any]:
    return {
        "kv_cache_spec_kind": SPECS.get_kv_cache_spec_kind(spec).value,
        "kv_cache_spec_sliding_window": SPECS.get_kv_cache_spec_sliding_window(spec),
    }


def _make_event(kind: Any, *, block_hashes: Sequence[BlockHash], **fields: object) -> Any:
    """Makes an event with the fields that this version of vLLM has."""
    hashes = list(map(maybe_convert_block_hash, block_hashes))
    given = {"block_hashes": hashes, "lora_id": None, "medium": kv_events.MEDIUM_GPU, **fields}
    return kind(**{name: value for name, value in given.items() if name in kind.__struct_fields__})
