"""Published payloads, compared byte for byte with msgpack that is written by hand in vLLM's field order."""

import struct
from array import array
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvpool.core.events import AllBlocksCleared, BlockRemoved, BlockStored, packed_token_ids
from kvpool.core.ids import BlockHash, GroupId, PoolName
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig
from kvpool.server.events.config import EventsConfig, HashForm, RemovedForm
from kvpool.server.events.vllm_format import EventEncoder, spec_kind

TIME = 1.5
TIME_BYTES = b"\xcb" + struct.pack(">d", TIME)  # float 64
ONE = BlockHash(b"x" * 24 + b"\x00\x00\x00\x00\x00\x00\x00\x07")
TWO = BlockHash(b"x" * 24 + b"\xff\xff\xff\xff\xff\xff\xff\xff")
ZERO = BlockHash(b"x" * 24 + bytes(8))
TWO_BYTES = b"\xcf" + b"\xff" * 8  # uint 64
FULL, WINDOW = FullAttentionSpec(2), SlidingWindowSpec(2, sliding_window=5)


def text(value: str) -> bytes:
    """A msgpack string of up to 255 bytes."""
    raw = value.encode()
    return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else b"\xd9" + bytes([len(raw)])) + raw


def pool_config(*specs: KVCacheSpec) -> PoolConfig:
    groups = tuple(KVCacheGroup(spec, (f"layer.{i}",)) for i, spec in enumerate(specs or (FULL, WINDOW)))
    return PoolConfig(PoolName("m"), 10, 100, groups, enable_events=True)


def encode(*events: Any, **options: Any) -> bytes | None:
    return EventEncoder(EventsConfig(**options)).encode(TIME, events, pool_config())


def decode(*events: Any, **options: Any) -> Any:
    payload = encode(*events, **options)
    assert payload is not None
    return msgspec.msgpack.decode(payload)[1]


def stored(
    *hashes: BlockHash, parent: BlockHash | None = None, group: int = 0, lora_name: str | None = None
) -> BlockStored:
    return BlockStored(hashes, parent, packed_token_ids(range(5, 5 + 2 * len(hashes))), 2, lora_name, GroupId(group))


def test_a_stored_run_as_a_map() -> None:
    expected = (
        b"\x93" + TIME_BYTES + b"\x91"  # [ts, [event], rank]
        b"\x8a" + text("type") + text("BlockStored")
        + text("block_hashes") + b"\x92\x07" + TWO_BYTES
        + text("parent_block_hash") + b"\xc0"
        + text("token_ids") + b"\x94\x05\x06\x07\x08"
        + text("block_size") + b"\x02"
        + text("lora_id") + b"\xc0"
        + text("medium") + text("GPU")
        + text("lora_name") + b"\xc0"
        + text("group_idx") + b"\x00"
        + text("kv_cache_spec_kind") + text("full_attention")
        + b"\x00"
    )  # fmt: skip
    assert encode(stored(ONE, TWO)) == expected


def test_a_stored_run_of_a_window_as_a_map() -> None:
    (event,) = decode(stored(TWO, parent=ONE, group=1, lora_name="adapter"))
    assert event == {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1],
        "parent_block_hash": 7,
        "token_ids": [5, 6],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "adapter",
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 5,
    }


def test_removals_clears_and_heartbeats() -> None:
    head = b"\x93" + TIME_BYTES
    removed = BlockRemoved(ONE, GroupId(1))
    as_map = (
        b"\x92\x84" + text("type") + text("BlockRemoved") + text("block_hashes") + b"\x91\x07"
        + text("medium") + text("GPU") + text("group_idx") + b"\x01"
        + b"\x81" + text("type") + text("AllBlocksCleared")
    )  # fmt: skip
    assert encode(removed, AllBlocksCleared()) == head + as_map + b"\x00"
    assert encode() == head + b"\x90\x00"


def test_a_hash_is_removed_with_its_last_copy_or_with_every_copy() -> None:
    copy, last = BlockRemoved(ONE, GroupId(0), 1), BlockRemoved(ONE, GroupId(0), 0)
    assert encode(copy) is None, "no event must mean no message: an empty one is a heartbeat"
    assert len(decode(copy, last)) == 1
    assert len(decode(copy, last, removed=RemovedForm.EVERY_COPY)) == 2


def test_hashes_are_nonzero_integers_or_all_bytes() -> None:
    (event,) = decode(stored(ONE, parent=ZERO))
    assert (event["block_hashes"], event["parent_block_hash"]) == ([7], 1)
    (event,) = decode(stored(ONE, parent=ZERO), hashes=HashForm.BYTES)
    assert (event["block_hashes"], event["parent_block_hash"]) == ([ONE], ZERO)


def test_a_repeated_hash_begins_another_event() -> None:
    events = decode(stored(ONE, TWO, ONE, ONE))
    assert [(event["block_hashes"], event["parent_block_hash"], event["token_ids"]) for event in events] == [
        ([7, 2**64 - 1], None, [5, 6, 7, 8]),
        ([7], 2**64 - 1, [9, 10]),
        ([7], 7, [11, 12]),
    ]


def test_tokens_that_hashes_look_ahead_are_listed_by_block() -> None:
    event = replace(stored(ONE, TWO, ONE), lookahead_token_ids=array("I", [7, 70, 9, 90, 11, 110]))
    ahead = [each["lookahead_token_ids"] for each in decode(event)]
    assert ahead == [[[7, 70], [9, 90]], [[11, 110]]]
    assert all("lookahead_token_ids" not in each for each in decode(stored(ONE)))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (FULL, ("full_attention", None)),
        (FullAttentionSpec(2, sliding_window=8), ("full_attention", None)),
        (MLAAttentionSpec(2), ("mla_attention", None)),
        (SinkFullAttentionSpec(2, sink_len=2), ("sink_full_attention", None)),
        (WINDOW, ("sliding_window", 5)),
        (ChunkedLocalAttentionSpec(2, attention_chunk_size=4), ("chunked_local_attention", None)),
        (MambaSpec(2), ("mamba", None)),
        (UniformTypeKVCacheSpecs(2, (("a", WINDOW), ("b", WINDOW))), ("sliding_window", 5)),
        (UniformTypeKVCacheSpecs(2, (("a", MLAAttentionSpec(2)), ("b", FULL))), ("full_attention", None)),
    ],
)
def test_attention_kinds_have_the_names_of_vllm(spec: KVCacheSpec, expected: tuple[str, int | None]) -> None:
    assert spec_kind(spec) == expected
