"""Specs round-trip through protobuf, and refused fields are named by their path."""

from typing import Any

import pytest

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


def attention(**fields: Any) -> spec_pb2.AttentionSpec:
    return spec_pb2.AttentionSpec(**{"block_size": 4, **fields})


BAD: dict[str, spec_pb2.KvCacheSpec] = {
    "spec": spec_pb2.KvCacheSpec(),
    "spec.full_attention.attention.block_size": spec_pb2.KvCacheSpec(full_attention=spec_pb2.FullAttentionSpec()),
    "spec.full_attention.attention.dtype": spec_pb2.KvCacheSpec(
        full_attention=spec_pb2.FullAttentionSpec(attention=attention(dtype="int3"))
    ),
    "spec.sliding_window.sliding_window": spec_pb2.KvCacheSpec(
        sliding_window=spec_pb2.SlidingWindowSpec(attention=attention())
    ),
    "spec.chunked_local_attention.attention_chunk_size": spec_pb2.KvCacheSpec(
        chunked_local_attention=spec_pb2.ChunkedLocalAttentionSpec(attention=attention())
    ),
    "spec.sink_full_attention.sink_len": spec_pb2.KvCacheSpec(
        sink_full_attention=spec_pb2.SinkFullAttentionSpec(
            full_attention=spec_pb2.FullAttentionSpec(attention=attention()), sink_len=3
        )
    ),
    "spec.sliding_window_mla.window.sliding_window": spec_pb2.KvCacheSpec(
        sliding_window_mla=spec_pb2.SlidingWindowMlaSpec(window=spec_pb2.SlidingWindowSpec(attention=attention()))
    ),
    "spec.circular_buffer.attention.tokens_per_state": spec_pb2.KvCacheSpec(
        circular_buffer=spec_pb2.CircularBufferSpec(attention=attention(tokens_per_state=3))
    ),
    "spec.mamba.states[0].shape[1]": spec_pb2.KvCacheSpec(
        mamba=spec_pb2.MambaSpec(block_size=4, states=[spec_pb2.StateTensor(shape=[1, 0], dtype="float32")])
    ),
    "spec.mla_attention.full_attention.attention.block_size": spec_pb2.KvCacheSpec(
        mla_attention=spec_pb2.MlaAttentionSpec()
    ),
    "spec.sink_full_attention.full_attention.attention_chunk_size": spec_pb2.KvCacheSpec(
        sink_full_attention=spec_pb2.SinkFullAttentionSpec(
            full_attention=spec_pb2.FullAttentionSpec(attention=attention(), sliding_window=1, attention_chunk_size=1)
        )
    ),
    "spec.mamba.states[1].dtype": spec_pb2.KvCacheSpec(
        mamba=spec_pb2.MambaSpec(
            block_size=4, states=[spec_pb2.StateTensor(dtype="float32"), spec_pb2.StateTensor(dtype="int3")]
        )
    ),
    "spec.mamba.states[0].shape": spec_pb2.KvCacheSpec(
        mamba=spec_pb2.MambaSpec(block_size=4, states=[spec_pb2.StateTensor(shape=[1] * 9, dtype="float32")])
    ),
    "spec.mamba.states": spec_pb2.KvCacheSpec(
        mamba=spec_pb2.MambaSpec(block_size=4, states=[spec_pb2.StateTensor(dtype="float32")] * 17)
    ),
    "spec.uniform_type.layers[1].spec": spec_pb2.KvCacheSpec(
        uniform_type=spec_pb2.UniformTypeSpec(
            block_size=4,
            layers=[
                spec_pb2.LayerSpec(
                    layer_name=f"{i}", spec=spec_pb2.KvCacheSpec(mamba=spec_pb2.MambaSpec(block_size=4 + i))
                )
                for i in range(2)
            ],
        )
    ),
    "spec.uniform_type.layers": spec_pb2.KvCacheSpec(uniform_type=spec_pb2.UniformTypeSpec(block_size=4)),
    "spec.uniform_type.layers[0].spec": spec_pb2.KvCacheSpec(
        uniform_type=spec_pb2.UniformTypeSpec(block_size=4, layers=[spec_pb2.LayerSpec(layer_name="a")])
    ),
    "spec.uniform_type.layers[0].spec.mamba.block_size": spec_pb2.KvCacheSpec(
        uniform_type=spec_pb2.UniformTypeSpec(
            block_size=4,
            layers=[
                spec_pb2.LayerSpec(layer_name="a", spec=spec_pb2.KvCacheSpec(mamba=spec_pb2.MambaSpec(block_size=0)))
            ],
        )
    ),
}


@pytest.mark.parametrize("field", BAD)
def test_refused_fields_are_named_by_their_path(field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        spec_from_proto("spec", BAD[field])
    assert caught.value.field == field


def test_a_uniform_type_within_another_is_refused() -> None:
    inner = spec_pb2.KvCacheSpec(uniform_type=spec_pb2.UniformTypeSpec(block_size=4))
    layers = [spec_pb2.LayerSpec(layer_name="a", spec=inner)]
    outer = spec_pb2.KvCacheSpec(uniform_type=spec_pb2.UniformTypeSpec(block_size=4, layers=layers))
    with pytest.raises(InvalidArgumentError, match="must not be of uniform type") as caught:
        spec_from_proto("spec", outer)
    assert caught.value.field == "spec.uniform_type.layers[0].spec"


@pytest.mark.parametrize("spec", [KVCacheSpec(4), AttentionSpec(4)])
def test_unsupported_specs_cannot_be_encoded(spec: KVCacheSpec) -> None:
    with pytest.raises(InvalidArgumentError, match="not a supported kind of attention"):
        spec_to_proto(spec)
