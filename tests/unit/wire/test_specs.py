"""Specs round-trip through protobuf, and refused fields are named by their path."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import AttentionSpec, KVCacheSpec
from kvpool.core.specs.kinds import (
    SPEC_KINDS,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvpool.v1 import spec_pb2
from kvpool.wire.specs import spec_from_proto, spec_to_proto
from support.transcripts import check

ALL: dict[str, Any] = {
    "num_kv_heads": 8,
    "head_size": 128,
    "dtype": "bfloat16",
    "head_size_v": 64,
    "page_size_padded": 2**33,
    "num_head_slots": 16,
    "state_content_bytes": 72,
    "tokens_per_state": 4,
}
LATENT = MLAAttentionSpec(16, **ALL | {"num_kv_heads": 1}, sliding_window=9, cache_dtype_str="fp8_ds_mla")
SPECS: list[KVCacheSpec] = [
    FullAttentionSpec(16, **ALL, sliding_window=1024),
    FullAttentionSpec(16, **ALL, attention_chunk_size=1024),
    FullAttentionSpec(16),
    LATENT,
    MLAAttentionSpec(16, head_size=576, dtype="bfloat16"),
    SinkFullAttentionSpec(16, **ALL, sink_len=128, sliding_window=7),
    SlidingWindowSpec(16, **ALL, sliding_window=1024, extra_retained_tokens=3),
    SlidingWindowMLASpec(16, **ALL, sliding_window=128, extra_retained_tokens=3),
    SlidingWindowMLASpec(16, sliding_window=128),
    CircularBufferSpec(8, **ALL),
    ChunkedLocalAttentionSpec(16, **ALL, attention_chunk_size=8192),
    MambaSpec(544, ((4, 1024), (32, 64, 128)), ("bfloat16", "float32"), 2**33, "gdn_attention", 3, 2),
    MambaSpec(4),
    CrossAttentionSpec(16, **ALL),
    EncoderOnlyAttentionSpec(16, **ALL),
    UniformTypeKVCacheSpecs(16, (("a", FullAttentionSpec(16, **ALL)), ("b", LATENT))),
    UniformTypeKVCacheSpecs(4, (("a", MambaSpec(4)),)),
]


@pytest.mark.parametrize("spec", SPECS, ids=[f"{type(spec).__name__}-{i}" for i, spec in enumerate(SPECS)])
def test_every_kind_round_trips(spec: KVCacheSpec) -> None:
    sent = spec_to_proto(spec).SerializeToString()
    assert spec_from_proto("spec", spec_pb2.KvCacheSpec.FromString(sent)) == spec


def test_no_kind_is_left_out() -> None:
    assert {type(spec) for spec in SPECS} == {*SPEC_KINDS.values(), UniformTypeKVCacheSpecs}
    wire = {field.name for field in spec_pb2.KvCacheSpec.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert {spec_to_proto(spec).WhichOneof("kind") for spec in SPECS} == wire


def _refusal(encoded: str) -> list[str]:
    with pytest.raises(InvalidArgumentError) as caught:
        spec_from_proto("spec", json_format.Parse(encoded, spec_pb2.KvCacheSpec()))
    return [f"refused: {caught.value}"]


def test_refused_fields_are_named_by_their_path() -> None:
    check(Path(__file__).with_name("transcripts") / "specs.txt", _refusal)


@pytest.mark.parametrize("spec", [KVCacheSpec(4), AttentionSpec(4)])
def test_unsupported_specs_cannot_be_encoded(spec: KVCacheSpec) -> None:
    with pytest.raises(InvalidArgumentError, match="not a supported kind of attention"):
        spec_to_proto(spec)
