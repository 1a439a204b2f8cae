"""For each kind: its page, its maximum memory per request, skipped tokens, merging, and validation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import KVCacheSpec, MambaCacheMode, RequestLimits
from kvpool.core.specs.kinds import (
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
    differing_field,
)
from support.refusals import refused

HEADS: dict[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
STATES: dict[str, Any] = {"shapes": ((4, 1024), (32, 64, 128)), "dtypes": ("bfloat16", "float32")}
LIMITS = RequestLimits(8192, max_num_batched_tokens=2048, max_num_encoder_input_tokens=1500)


@pytest.mark.parametrize(
    ("spec", "page_bytes"),
    [
        (FullAttentionSpec(16, **HEADS), 65_536),
        (FullAttentionSpec(16, **HEADS, head_size_v=64), 49_152),
        (FullAttentionSpec(16, **HEADS | {"dtype": "float8_e4m3fn"}), 32_768),
        (FullAttentionSpec(16, **HEADS, page_size_padded=70_000), 70_000),
        (FullAttentionSpec(16, **HEADS, state_content_bytes=136), 17_408),  # a head's key and value, packed
        (FullAttentionSpec(16, **HEADS, num_head_slots=16, state_content_bytes=72), 18_432),
        (FullAttentionSpec(16, **HEADS, state_content_bytes=136, page_size_padded=20_000), 20_000),
        (FullAttentionSpec(16), 0),
        (MLAAttentionSpec(64, head_size=576, dtype="bfloat16"), 73_728),
        (MLAAttentionSpec(64, head_size=576, dtype="uint8", cache_dtype_str="fp8_ds_mla"), 41_984),
        (MLAAttentionSpec(64, head_size=576, dtype="uint8", cache_dtype_str="nvfp4_ds_mla"), 22_528),
        (MLAAttentionSpec(256, head_size=512, dtype="bfloat16", tokens_per_state=4), 65_536),
        (MLAAttentionSpec(256, head_size=512, dtype="uint8", tokens_per_state=128, state_content_bytes=584), 1168),
        (SinkFullAttentionSpec(16, **HEADS, sink_len=128), 65_536),
        (SlidingWindowSpec(16, **HEADS, sliding_window=1024), 65_536),
        (SlidingWindowMLASpec(64, head_size=512, dtype="bfloat16", sliding_window=128), 65_536),
        (CircularBufferSpec(8, num_kv_heads=2, head_size=128, dtype="bfloat16"), 4096),
        (MambaSpec(8192, **STATES), 1_056_768),
        (MambaSpec(8192, **STATES, page_size_padded=2_228_224), 2_228_224),
        (CrossAttentionSpec(16, num_kv_heads=12, head_size=64, dtype="bfloat16"), 49_152),
        (EncoderOnlyAttentionSpec(16, **HEADS), 65_536),
    ],
)
def test_page(spec: KVCacheSpec, page_bytes: int) -> None:
    assert spec.page_size_bytes == page_bytes
    assert UniformTypeKVCacheSpecs(spec.block_size, (("a", spec), ("b", spec))).page_size_bytes == 2 * page_bytes


@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        (FullAttentionSpec(16, **HEADS), 512),
        (MLAAttentionSpec(64), 128),
        (SinkFullAttentionSpec(16, sink_len=128), 512),
        (SlidingWindowSpec(16, sliding_window=1024), 193),
        (SlidingWindowSpec(16, sliding_window=100_000), 513),
        (SlidingWindowSpec(16, sliding_window=1024, extra_retained_tokens=17), 194),
        (CircularBufferSpec(8), 1),
        (ChunkedLocalAttentionSpec(16, attention_chunk_size=1024), 192),
        (ChunkedLocalAttentionSpec(16, attention_chunk_size=8192), 512),
        (ChunkedLocalAttentionSpec(16, attention_chunk_size=1000), 192),
        (ChunkedLocalAttentionSpec(16, attention_chunk_size=8200), 512),
        (MambaSpec(544), 5),
        (MambaSpec(544, num_speculative_blocks=2), 7),
        (MambaSpec(4096), 2),
        (MambaSpec(8192, num_speculative_blocks=2), 3),
        (CrossAttentionSpec(16), 94),
        (EncoderOnlyAttentionSpec(16), 0),
    ],
)
def test_max_blocks_of_one_request(spec: KVCacheSpec, blocks: int) -> None:
    assert spec.max_blocks(LIMITS) == blocks


@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        (FullAttentionSpec(16), 256),
        (SlidingWindowSpec(16, sliding_window=1024), 97),
        (CircularBufferSpec(8), 1),
        (ChunkedLocalAttentionSpec(16, attention_chunk_size=1024), 96),
        (MambaSpec(1024), 3),
        (CrossAttentionSpec(16), 94),
    ],
)
def test_context_parallelism_shards_tokens_not_states(spec: KVCacheSpec, blocks: int) -> None:
    assert spec.max_blocks(RequestLimits(8192, context_parallel_size=2)) == blocks


@pytest.mark.parametrize(("mode", "blocks", "with_checkpoint"), [("all", 7, 7), ("align", 4, 5), ("none", 3, 3)])
def test_the_mode_says_how_many_states_a_request_keeps(mode: str, blocks: int, with_checkpoint: int) -> None:
    limits = RequestLimits(8192, mamba_cache_mode=MambaCacheMode(mode))
    spec = MambaSpec(544, num_speculative_blocks=2)
    assert spec.max_blocks(limits) == blocks
    assert replace(spec, num_prefill_checkpoint_blocks=1).max_blocks(limits) == with_checkpoint


@pytest.mark.parametrize(
    ("spec", "skipped"),
    [
        (FullAttentionSpec(4), [0, 0, 0, 0, 0, 0]),
        (SlidingWindowSpec(4, sliding_window=1), [0, 1, 3, 4, 5, 100]),
        (SlidingWindowSpec(4, sliding_window=4), [0, 0, 0, 1, 2, 97]),
        (SlidingWindowSpec(4, sliding_window=4, extra_retained_tokens=1), [0, 0, 0, 0, 1, 96]),
        (CircularBufferSpec(4), [0, 0, 0, 0, 0, 0]),
        (ChunkedLocalAttentionSpec(4, attention_chunk_size=4), [0, 0, 0, 4, 4, 100]),
        (ChunkedLocalAttentionSpec(4, attention_chunk_size=3), [0, 0, 3, 3, 3, 99]),
        (MambaSpec(4), [0, 0, 2, 3, 4, 99]),
        (CrossAttentionSpec(4), [0, 0, 0, 0, 0, 0]),
    ],
)
def test_skipped_tokens(spec: KVCacheSpec, skipped: list[int]) -> None:
    assert [spec.num_skipped_tokens(n) for n in (0, 1, 3, 4, 5, 100)] == skipped
    assert spec.keeps_all == (not any(skipped))


def test_retained_tokens_are_kept_but_not_read() -> None:
    spec = SlidingWindowSpec(4, sliding_window=4, extra_retained_tokens=3)
    assert [spec.num_unread_tokens(n) for n in (3, 4, 100)] == [0, 1, 97]
    assert [spec.num_skipped_tokens(n) for n in (3, 4, 100)] == [0, 0, 94]
    assert spec.num_computed_to_skip(94) == 100
    assert FullAttentionSpec(4).num_unread_tokens(100) == 0


def test_full_attention_merges_with_one_remembered_window() -> None:
    plain, window = FullAttentionSpec(16, **HEADS), FullAttentionSpec(16, **HEADS, sliding_window=1024)
    chunk = FullAttentionSpec(16, **HEADS, attention_chunk_size=1024)
    assert plain.merged_with([window, plain]) == window
    assert plain.merged_with([chunk]) == chunk
    assert plain.merged_with([FullAttentionSpec(16, **HEADS | {"head_size": 64})]) is None
    assert window.merged_with([FullAttentionSpec(16, **HEADS, sliding_window=512)]) is None
    assert window.merged_with([chunk]) is None
    assert plain.merged_with([SlidingWindowSpec(16, **HEADS, sliding_window=1024)]) is None
    assert FullAttentionSpec(16, **HEADS, head_size_v=128) == plain


@pytest.mark.parametrize(
    ("left", "right", "alike"),
    [
        (FullAttentionSpec(16), FullAttentionSpec(16, **HEADS), True),
        (FullAttentionSpec(16), MLAAttentionSpec(16), True),
        (FullAttentionSpec(16), FullAttentionSpec(32), False),
        (FullAttentionSpec(16), SinkFullAttentionSpec(16, sink_len=16), False),
        (SlidingWindowSpec(16, sliding_window=8), SlidingWindowSpec(16, **HEADS, sliding_window=8), True),
        (SlidingWindowSpec(16, sliding_window=8), SlidingWindowSpec(16, sliding_window=9), False),
        (
            SlidingWindowSpec(16, sliding_window=8),
            SlidingWindowSpec(16, sliding_window=8, extra_retained_tokens=1),
            False,
        ),
        (SlidingWindowSpec(16, sliding_window=8), SlidingWindowMLASpec(16, sliding_window=8), False),
        (MLAAttentionSpec(16, tokens_per_state=4), MLAAttentionSpec(16, tokens_per_state=16), True),
        (CircularBufferSpec(16), CircularBufferSpec(16, **HEADS), True),
        (
            ChunkedLocalAttentionSpec(16, attention_chunk_size=8),
            ChunkedLocalAttentionSpec(16, attention_chunk_size=9),
            False,
        ),
        (MambaSpec(16), MambaSpec(16, **STATES), True),
        (MambaSpec(16), MambaSpec(16, num_speculative_blocks=1), False),
        (MambaSpec(16), MambaSpec(16, num_prefill_checkpoint_blocks=1), False),
        (CrossAttentionSpec(16), CrossAttentionSpec(16, **HEADS), True),
        (CrossAttentionSpec(16), FullAttentionSpec(16), False),
    ],
)
def test_layers_that_can_share_a_block_table(left: KVCacheSpec, right: KVCacheSpec, alike: bool) -> None:  # noqa: FBT001
    assert (left.allocates_like(right), right.allocates_like(left)) == (alike, alike)


def test_no_page_is_smaller_than_its_content() -> None:
    with pytest.raises(InvalidArgumentError, match="page_size_padded"):
        MambaSpec(16, **STATES, page_size_padded=1_056_767)


BAD: dict[str, Callable[[], KVCacheSpec]] = {
    "block_size": lambda: FullAttentionSpec(0),
    "num_kv_heads": lambda: FullAttentionSpec(4, num_kv_heads=-1),
    "head_size": lambda: MLAAttentionSpec(4, head_size=2**25),
    "head_size_v": lambda: SlidingWindowSpec(4, sliding_window=4, head_size_v=-1),
    "dtype": lambda: FullAttentionSpec(4, dtype="int3"),
    "page_size_padded": lambda: FullAttentionSpec(16, **HEADS, page_size_padded=65_535),
    "num_head_slots": lambda: FullAttentionSpec(16, **HEADS, num_head_slots=-1),
    "state_content_bytes": lambda: FullAttentionSpec(16, **HEADS, state_content_bytes=2**25),
    "tokens_per_state": lambda: MLAAttentionSpec(16, tokens_per_state=3),
    "extra_retained_tokens": lambda: SlidingWindowSpec(4, sliding_window=4, extra_retained_tokens=-1),
    "attention_chunk_size": lambda: FullAttentionSpec(4, sliding_window=4, attention_chunk_size=4),
    "cache_dtype_str": lambda: MLAAttentionSpec(4, cache_dtype_str="fp7"),
    "sink_len": lambda: SinkFullAttentionSpec(4, sink_len=0),
    "sliding_window": lambda: SlidingWindowSpec(4, sliding_window=0),
    "dtypes": lambda: MambaSpec(4, ((1,),), ()),
    "dtypes[0]": lambda: MambaSpec(4, ((1,),), ("int3",)),
    "shapes[0][1]": lambda: MambaSpec(4, ((1, 0),), ("float32",)),
    "shapes": lambda: MambaSpec(4, ((1,),) * 17, ("float32",) * 17),
    "shapes[0]": lambda: MambaSpec(4, ((1,) * 9,), ("float32",)),
    "page_size_bytes": lambda: MambaSpec(4, ((2**24,) * 8,), ("float32",)),
    "num_prefill_checkpoint_blocks": lambda: MambaSpec(4, num_prefill_checkpoint_blocks=1025),
    "num_speculative_blocks": lambda: MambaSpec(4, num_speculative_blocks=-1),
    "mamba_type": lambda: MambaSpec(4, mamba_type="x" * 65),
    "layers": lambda: UniformTypeKVCacheSpecs(4),
    "layers[1]": lambda: UniformTypeKVCacheSpecs(4, (("a", FullAttentionSpec(4)), ("a", FullAttentionSpec(4)))),
    "layers[1].block_size": lambda: UniformTypeKVCacheSpecs(4, (("a", MambaSpec(4)), ("b", MambaSpec(8)))),
    "layers[0].block_size": lambda: UniformTypeKVCacheSpecs(4, (("a", MambaSpec(8)),)),
}


@pytest.mark.parametrize("field", BAD)
def test_a_constructor_names_the_invalid_field(field: str) -> None:
    with refused(field=field):
        BAD[field]()


def test_sinks_are_bounded() -> None:
    SinkFullAttentionSpec(4, sink_len=2**16)
    with pytest.raises(InvalidArgumentError, match=r"sink_len: 65540 is not in \[1, 65536\]"):
        SinkFullAttentionSpec(4, sink_len=2**16 + 4)


@pytest.mark.parametrize("make", [lambda: SinkFullAttentionSpec(4, sink_len=6), lambda: ChunkedLocalAttentionSpec(4)])
def test_windows_and_sinks_are_required(make: Callable[[], KVCacheSpec]) -> None:
    with pytest.raises(InvalidArgumentError):
        make()


def test_layers_of_two_kinds_are_not_a_uniform_type() -> None:
    with refused(field="layers[1]", match="cannot share a block table"):
        UniformTypeKVCacheSpecs(4, (("a", FullAttentionSpec(4)), ("b", SlidingWindowSpec(4, sliding_window=8))))


def test_the_error_for_an_unknown_type_lists_known_types() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'bf16' is not known; known: float64, .*bfloat16"):
        FullAttentionSpec(4, dtype="bf16")


def test_long_text_is_not_repeated() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        FullAttentionSpec(4, dtype="x" * 20_000)
    assert len(caught.value.message) < 300
    with pytest.raises(InvalidArgumentError) as caught:
        UniformTypeKVCacheSpecs(4, (("x" * 20_000, MambaSpec(4)), ("x" * 20_000, MambaSpec(4))))
    assert len(caught.value.message) < 300


def test_latent_attention_has_one_head() -> None:
    assert MLAAttentionSpec(4, num_kv_heads=0) == MLAAttentionSpec(4)
    window = SlidingWindowMLASpec(4, sliding_window=9)
    assert SlidingWindowMLASpec(4, num_kv_heads=0, sliding_window=9) == window
    assert window.num_kv_heads == 1


def test_one_token_per_state_has_one_representation() -> None:
    assert FullAttentionSpec(4, tokens_per_state=0) == FullAttentionSpec(4, tokens_per_state=1) == FullAttentionSpec(4)


def test_the_first_difference_is_named() -> None:
    spec = FullAttentionSpec(16, **HEADS)
    assert differing_field(spec, spec) == ""
    assert differing_field(spec, FullAttentionSpec(16, **HEADS | {"num_kv_heads": 4})) == "num_kv_heads"
    assert differing_field(spec, MLAAttentionSpec(16)) == "type"
