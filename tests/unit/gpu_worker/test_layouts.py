"""How each backend sees pages: shapes, strides, where each token's key lies, and what it refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import DTYPE_SIZES_BYTES, KVCacheSpec
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
)
from kvpool.gpu_worker.layouts import (
    KeyValueLayout,
    LayerCache,
    LayerPages,
    check_layouts,
    default_layout,
    get_layout,
    register_layout,
    torch_dtype,
)
from support.torch import on_each_device

CPU = torch.device("cpu")
HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": "float16"}
FULL = FullAttentionSpec(16, **HEADS)  # 1024 bytes a page: 256 elements of keys, 256 of values
STATE = MambaSpec(64, ((3, 5), (2, 7)), ("bfloat16", "float32"), page_size_padded=100)
NUM_BLOCKS = 4


def view(spec: KVCacheSpec, layout: str = "", device: torch.device = CPU, kernel_block_size: int = 0) -> LayerCache:
    buffer = torch.zeros(NUM_BLOCKS * spec.page_size_bytes, dtype=torch.int8, device=device)
    pages = LayerPages("model.layers.7", spec, buffer, NUM_BLOCKS, kernel_block_size)
    return get_layout("model.layers.7", layout or default_layout(spec)).view(pages)


def tensor(*args: Any, **options: Any) -> torch.Tensor:
    seen = view(*args, **options)
    assert isinstance(seen, torch.Tensor)
    return seen


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        view(*args, **options)
    assert "layer 'model.layers.7'" in caught.value.message
    return str(caught.value)


@on_each_device
@pytest.mark.parametrize(
    ("layout", "shape", "strides"),
    [
        ("flash_attn", (2, 4, 16, 2, 8), (256, 512, 16, 8, 1)),
        ("flash_attn_hnd", (2, 4, 16, 2, 8), (256, 512, 8, 128, 1)),
        ("flashinfer_nhd", (4, 2, 16, 2, 8), (512, 256, 16, 8, 1)),
        ("flashinfer_hnd", (4, 2, 16, 2, 8), (512, 256, 8, 128, 1)),
        ("triton", (4, 2, 16, 2, 8), (512, 256, 16, 8, 1)),
        ("flex", (4, 2, 16, 2, 8), (512, 256, 16, 8, 1)),
        ("flash_attn_diffkv", (4, 16, 2, 16), (512, 32, 16, 1)),
    ],
)
def test_keys_and_values(device: torch.device, layout: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    seen = tensor(FULL, layout, device)
    assert (seen.dtype, seen.device, tuple(seen.shape), seen.stride()) == (torch.float16, device, shape, strides)


@pytest.mark.parametrize("layout", ["flash_attn", "flash_attn_hnd", "flashinfer_nhd", "flashinfer_hnd", "triton"])
def test_padding_moves_blocks_apart_and_nothing_else(layout: str) -> None:
    plain, padded = tensor(FULL, layout), tensor(replace(FULL, page_size_padded=1200), layout)
    assert padded.shape == plain.shape
    assert [s for s in padded.stride() if s != 600] == [s for s in plain.stride() if s != 512]
    assert 600 in padded.stride()


def test_keys_and_values_of_different_size_are_joined() -> None:
    seen = tensor(replace(FULL, head_size_v=4))
    assert (tuple(seen.shape), seen.stride()) == ((4, 16, 2, 12), (384, 24, 12, 1))


@pytest.mark.parametrize("layout", ["flash_attn", "flash_attn_hnd", "flashinfer_nhd", "flashinfer_hnd", "flex"])
def test_other_layouts_refuse_values_of_another_size(layout: str) -> None:
    assert refusal(replace(FULL, head_size_v=4), layout).startswith("head_size_v: ")


def test_latent_vectors() -> None:
    seen = tensor(MLAAttentionSpec(16, head_size=576, dtype="bfloat16"))
    assert (tuple(seen.shape), seen.stride(), seen.dtype) == ((4, 16, 576), (9216, 576, 1), torch.bfloat16)
    packed = tensor(MLAAttentionSpec(64, head_size=576, dtype="bfloat16", cache_dtype_str="fp8_ds_mla"))
    assert (tuple(packed.shape), packed.stride(), packed.dtype) == ((4, 64, 656), (41_984, 656, 1), torch.uint8)
    blocks = tensor(MLAAttentionSpec(128, head_size=576, dtype="bfloat16"), kernel_block_size=64)
    assert (tuple(blocks.shape), blocks.stride()) == ((8, 64, 576), (36_864, 576, 1))
    assert "num_kv_heads" in refusal(MLAAttentionSpec(16, 2, 576, "bfloat16"))


def test_parts_of_a_state_follow_each_other_in_a_page() -> None:
    parts = view(replace(STATE, shapes=((2, 8), (2, 7), ()), dtypes=("bfloat16", "float32", "int8")))
    assert isinstance(parts, tuple)
    assert [(p.dtype, tuple(p.shape), p.stride(), p.storage_offset() * p.itemsize) for p in parts] == [
        (torch.bfloat16, (4, 2, 8), (50, 8, 1), 0),
        (torch.float32, (4, 2, 7), (25, 7, 1), 32),
        (torch.int8, (4,), (100,), 88),
    ]


def test_a_state_whose_parts_do_not_lie_on_elements_is_refused() -> None:
    assert refusal(STATE).startswith("dtypes[1]: ")  # 15 bfloat16 elements end at byte 30
    assert "102 bytes" in refusal(replace(STATE, shapes=((2, 8), (2, 7)), page_size_padded=102))
    assert refusal(MambaSpec(16)).startswith("shapes: ")


@pytest.mark.parametrize(
    ("spec", "kernel_block_size", "why"),
    [
        (FULL, 5, "5 does not divide blocks of 16 tokens"),
        (FULL, 32, "32 does not divide"),
        (FULL, -16, "-16 does not divide"),
        (replace(FULL, page_size_padded=2048), 8, "padded to 2048 bytes"),
        (replace(STATE, shapes=((2, 8), (2, 7))), 16, "keeps states"),
    ],
)
def test_kernel_blocks_that_do_not_fill_pages_are_refused(spec: KVCacheSpec, kernel_block_size: int, why: str) -> None:
    assert why in refusal(spec, kernel_block_size=kernel_block_size)


@on_each_device
@pytest.mark.parametrize("layout", ["flash_attn", "flash_attn_hnd", "flashinfer_nhd", "flashinfer_hnd"])
def test_a_page_is_its_kernel_blocks_one_after_the_other(device: torch.device, layout: str) -> None:
    spec = replace(FULL, block_size=528)
    seen = tensor(spec, layout, device, kernel_block_size=16)
    plain = tensor(FULL, layout, device)
    assert (seen.numel(), seen.stride()) == (NUM_BLOCKS * 528 * 32, plain.stride())
    assert tuple(seen.shape) == tuple(size if size != NUM_BLOCKS else NUM_BLOCKS * 33 for size in plain.shape)


def test_a_kernel_block_of_the_pools_size_may_be_padded() -> None:
    assert tensor(replace(FULL, page_size_padded=2048), kernel_block_size=16).stride()[1] == 1024


@pytest.mark.parametrize("layout", ["flash_attn", "flash_attn_hnd", "flashinfer_nhd", "flashinfer_hnd"])
def test_heads_lie_before_tokens_only_where_the_layout_says_so(layout: str) -> None:
    seen = tensor(FULL, layout)
    values = seen[1] if layout.startswith("flash_attn") else seen[:, 1]
    values[3, 5, 1] = 1.0  # block 3, token 5, head 1
    raw = torch.zeros(0, dtype=torch.float16).set_(seen.untyped_storage())
    in_page = (1 * 16 + 5) * 8 if layout.endswith("hnd") else (5 * 2 + 1) * 8
    expected = torch.zeros_like(raw)
    expected[3 * 512 + 256 + in_page :][:8] = 1.0
    assert torch.equal(raw, expected)


PACKED = FullAttentionSpec(16, **HEADS, num_head_slots=4, state_content_bytes=6)  # 384 bytes a page


@pytest.mark.parametrize(("layout", "strides"), [("packed_nhd", (384, 6, 24, 1)), ("packed_hnd", (384, 96, 6, 1))])
def test_packed_pages_are_seen_as_bytes_of_each_head_and_state(layout: str, strides: tuple[int, ...]) -> None:
    seen = tensor(PACKED, layout)
    assert (seen.dtype, tuple(seen.shape), seen.stride()) == (torch.uint8, (4, 4, 16, 6), strides)
    padded = tensor(replace(PACKED, page_size_padded=500), layout)
    assert (tuple(padded.shape), padded.stride()) == ((4, 4, 16, 6), (500, *strides[1:]))
    split = tensor(PACKED, layout, kernel_block_size=8)
    assert (tuple(split.shape), split.stride()[0]) == ((8, 4, 8, 6), 192)


def test_a_latent_state_may_stand_for_several_tokens() -> None:
    spec = MLAAttentionSpec(16, head_size=8, dtype="bfloat16", tokens_per_state=4)
    assert (tuple(tensor(spec).shape), tensor(spec).stride()) == ((4, 4, 8), (32, 8, 1))
    assert tuple(tensor(spec, kernel_block_size=8).shape) == (8, 2, 8)
    assert "2 is not a multiple of the 4 tokens of a state" in refusal(spec, kernel_block_size=2)
    packed = replace(spec, state_content_bytes=10)
    assert (tensor(packed).dtype, tuple(tensor(packed).shape)) == (torch.uint8, (4, 4, 10))


@pytest.mark.parametrize("layout", ["flash_attn", "flashinfer_hnd", "flash_attn_diffkv"])
def test_layouts_of_elements_refuse_packed_pages(layout: str) -> None:
    assert "state_content_bytes: " in refusal(PACKED, layout)
    with pytest.raises(InvalidArgumentError, match="layer 'a': packed keys and values need 'packed_nhd'"):
        check_layouts({"a": layout}, {"a": PACKED})
    check_layouts({}, {"a": PACKED})


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (FULL, "flash_attn"),
        (replace(FULL, head_size_v=4), "flash_attn_diffkv"),
        (SlidingWindowSpec(16, **HEADS, sliding_window=9), "flash_attn"),
        (ChunkedLocalAttentionSpec(16, **HEADS, attention_chunk_size=9), "flash_attn"),
        (SinkFullAttentionSpec(16, **HEADS, sink_len=16), "flash_attn"),
        (CrossAttentionSpec(16, **HEADS), "flash_attn"),
        (MLAAttentionSpec(16, head_size=576, dtype="bfloat16"), "mla"),
        (SlidingWindowMLASpec(16, head_size=576, dtype="bfloat16", sliding_window=9), "mla"),
        (CircularBufferSpec(16, 1, 8, "bfloat16"), "mla"),
        (PACKED, "packed_nhd"),
        (STATE, "mamba"),
    ],
)
def test_each_kind_has_a_default(spec: KVCacheSpec, name: str) -> None:
    assert default_layout(spec) == name


@pytest.mark.parametrize("spec", [EncoderOnlyAttentionSpec(16, **HEADS), UniformTypeKVCacheSpecs(16, (("a", FULL),))])
def test_what_keeps_nothing_of_its_own_has_none(spec: KVCacheSpec) -> None:
    with pytest.raises(InvalidArgumentError, match=f"a {type(spec).__name__} has no tensors of its own"):
        default_layout(spec)


@pytest.mark.parametrize(
    ("spec", "layout"),
    [(STATE, "triton"), (FULL, "mla"), (FULL, "mamba"), (EncoderOnlyAttentionSpec(16), "flex"), (STATE, "packed_nhd")],
)
def test_a_layout_refuses_other_kinds(spec: KVCacheSpec, layout: str) -> None:
    assert f"a {type(spec).__name__} keeps no" in refusal(spec, layout)


def test_sizes_must_be_declared_and_whole() -> None:
    assert refusal(FullAttentionSpec(16, 2, 8), "flash_attn").startswith("dtype: ")
    assert "does not declare" in refusal(FullAttentionSpec(16, 2, 0, "float16"), "flash_attn")
    assert "1025 bytes is not a whole number" in refusal(replace(FULL, page_size_padded=1025))


def test_a_buffer_cut_from_a_larger_one_must_begin_on_an_element() -> None:
    larger = torch.zeros(NUM_BLOCKS * 1024 + 3, dtype=torch.int8)
    pages = LayerPages("a", FULL, larger[2:-1], NUM_BLOCKS)
    assert get_layout("a", "flex").view(pages)[0].storage_offset() == 1
    with pytest.raises(InvalidArgumentError, match="layer 'a': the buffer is not aligned"):
        get_layout("a", "flex").view(replace(pages, buffer=larger[3:]))


def test_a_layout_of_ones_own() -> None:
    tokens_last = KeyValueLayout(
        ("block", "kv", "head", "element", "token"), ("block", "kv", "head", "element", "token")
    )
    register_layout("tokens_last", tokens_last)
    register_layout("tokens_last", tokens_last)
    assert tensor(FULL, "tokens_last").stride() == (512, 256, 128, 16, 1)
    with pytest.raises(InvalidArgumentError, match="'tokens_last' is registered already"):
        register_layout("tokens_last", KeyValueLayout(("block",), ("block",)))
    assert "known: flash_attn, " in refusal(FULL, "vertical")


@pytest.mark.parametrize("dtype", DTYPE_SIZES_BYTES)
def test_types_have_the_size_that_specs_count(dtype: str) -> None:
    assert torch_dtype("a", dtype).itemsize == DTYPE_SIZES_BYTES[dtype]


def test_an_unknown_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match=r"dtype: layer 'a': 'bfloat17' is not known"):
        torch_dtype("a", "bfloat17")
    monkeypatch.delattr(torch, "float8_e4m3fnuz")
    with pytest.raises(InvalidArgumentError, match=r"layer 'a': torch .* has no 'float8_e4m3fnuz'; it has float64"):
        torch_dtype("a", "float8_e4m3fnuz")
