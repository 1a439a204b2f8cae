"""Block events as the publisher of vLLM 0.24 and later writes them, in msgpack.

1. A payload is an array of three: time in seconds (float), events, data-parallel rank (always an integer).
2. An event is a map with its type under "type". Unset fields after `lora_name` are left out.
3. In one event every hash is unique, the parent's included, and none is 0: consumers drop other events.

Source: the fields, their order and which of them are always present are those of vLLM's KVEventBatch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from kvpool.core.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from kvpool.core.ids import BlockHash
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    KIND_NAMES,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    allocation_spec,
)
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.server.events.config import EventsConfig, HashForm, RemovedForm

MEDIUM: Final = "GPU"
DATA_PARALLEL_RANK: Final = 0

_Event = dict[str, object]


class EventEncoder:
    """Encodes the events of one pool."""

    def __init__(self, settings: EventsConfig) -> None:
        self._hash_as_integer = settings.hashes is HashForm.INTEGER
        self._every_copy = settings.removed is RemovedForm.EVERY_COPY
        self._encode = msgspec.msgpack.Encoder().encode
        self._config: PoolConfig | None = None
        self._groups: list[tuple[str, int | None]] = []

    def encode(self, time_seconds: float, events: Sequence[BlockEvent], config: PoolConfig) -> bytes | None:
        """Encodes a batch.

        Args:
            time_seconds: Time of the events, in seconds since 1970.
            events: The events; none for a heartbeat.
            config: The pool's configuration at that time.

        Returns:
            The payload; None if no event of the batch is to be published.
        """
        if config is not self._config:
            self._config, self._groups = config, [spec_kind(group.spec) for group in config.groups]
        encoded = [each for event in events for each in self._events(event)]
        if events and not encoded:
            return None
        return self._encode([float(time_seconds), encoded, DATA_PARALLEL_RANK])

    def _events(self, event: BlockEvent) -> Iterator[_Event]:
        match event:
            case BlockStored():
                for run in _without_repeats(event):
                    yield self._stored(run)
            case BlockRemoved():
                if self._every_copy or not event.copies_left:
                    yield {
                        "type": "BlockRemoved",
                        "block_hashes": [self._hash(event.block_hash)],
                        "medium": MEDIUM,
                        "group_idx": event.group_id,
                    }
            case AllBlocksCleared():
                yield {"type": "AllBlocksCleared"}

    def _stored(self, event: BlockStored) -> _Event:
        kind, window = self._groups[event.group_id]
        parent = event.parent_block_hash
        stored: _Event = {
            "type": "BlockStored",
            "block_hashes": list(map(self._hash, event.block_hashes)),
            "parent_block_hash": None if parent is None else self._hash(parent),
            "token_ids": event.token_ids.tolist(),
            "block_size": event.block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": event.lora_name,
            "group_idx": event.group_id,
            "kv_cache_spec_kind": kind,
        }
        if event.lookahead_token_ids:
            stored["lookahead_token_ids"] = event.lookahead_by_block
        if window is not None:
            stored["kv_cache_spec_sliding_window"] = window
        return stored

    def _hash(self, block_hash: BlockHash) -> int | bytes:
        return (int.from_bytes(block_hash[-8:], "big") or 1) if self._hash_as_integer else block_hash


def spec_kind(spec: KVCacheSpec) -> tuple[str, int | None]:
    """Returns a group's kind of attention, and its sliding window in tokens if it has one."""
    first = allocation_spec(spec)
    kind = KIND_NAMES[type(first)]
    if isinstance(spec, UniformTypeKVCacheSpecs) and any(type(layer) is not type(first) for _, layer in spec.layers):
        kind = KIND_NAMES[FullAttentionSpec]
    return kind, first.sliding_window if isinstance(first, SlidingWindowSpec) else None


def _without_repeats(event: BlockStored) -> Iterator[BlockStored]:
    """Splits a run of blocks where a hash repeats, which hashes computed by clients can do."""
    hashes, parent = event.block_hashes, event.parent_block_hash
    start = 0
    while start < len(hashes):
        seen = {parent}
        end = start
        while end < len(hashes) and hashes[end] not in seen:
            seen.add(hashes[end])
            end += 1
        if start == 0 and end == len(hashes):
            yield event
            return
        end = max(end, start + 1)
        tokens = event.token_ids[start * event.block_size : end * event.block_size]
        per_block = event.num_lookahead_tokens
        ahead = event.lookahead_token_ids[start * per_block : end * per_block]
        yield replace(
            event, block_hashes=hashes[start:end], parent_block_hash=parent, token_ids=tokens, lookahead_token_ids=ahead
        )
        start, parent = end, hashes[end - 1]
