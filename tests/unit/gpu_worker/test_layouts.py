"""How each backend sees pages: shapes, strides, where each token's key lies, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs import kinds
from kvpool.core.specs.base import DTYPE_SIZES_BYTES, KVCacheSpec
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
from support.transcripts import check

CPU = torch.device("cpu")
HEADS: Final[dict[str, Any]] = {"num_kv_heads": 2, "head_size": 8, "dtype": "float16"}
FULL = kinds.FullAttentionSpec(16, **HEADS)
PACKED = kinds.FullAttentionSpec(16, **HEADS, num_head_slots=4, state_content_bytes=6)
STATE = kinds.MambaSpec(64, ((2, 8), (2, 7), ()), ("bfloat16", "float32", "int8"), page_size_padded=100)
SPECS: Final[dict[str, KVCacheSpec]] = {
    "full": FULL,
    "packed": PACKED,
    "state": STATE,
    "state-at-odd-bytes": replace(STATE, shapes=((3, 5), (2, 7), ())),
    "no-state": kinds.MambaSpec(16),
    "latent": kinds.MLAAttentionSpec(16, head_size=576, dtype="bfloat16"),
    "window-latent": kinds.SlidingWindowMLASpec(16, head_size=576, dtype="bfloat16", sliding_window=9),
    "ring": kinds.CircularBufferSpec(16, 1, 8, "bfloat16"),
    "window": kinds.SlidingWindowSpec(16, **HEADS, sliding_window=9),
    "chunked": kinds.ChunkedLocalAttentionSpec(16, **HEADS, attention_chunk_size=9),
    "sink": kinds.SinkFullAttentionSpec(16, **HEADS, sink_len=16),
    "cross": kinds.CrossAttentionSpec(16, **HEADS),
    "encoder": kinds.EncoderOnlyAttentionSpec(16, **HEADS),
    "uniform": kinds.UniformTypeKVCacheSpecs(16, (("a", FULL),)),
}
NUM_BLOCKS = 4


def view(spec: KVCacheSpec, layout: str = "", device: torch.device = CPU, kernel_block_size: int = 0) -> LayerCache:
    buffer = torch.zeros(NUM_BLOCKS * spec.page_size_bytes, dtype=torch.int8, device=device)
    pages = LayerPages("model.layers.7", spec, buffer, NUM_BLOCKS, kernel_block_size)
    return get_layout("model.layers.7", layout or default_layout(spec)).view(pages)


def tensor(layout: str) -> torch.Tensor:
    seen = view(FULL, layout)
    assert isinstance(seen, torch.Tensor)
    return seen


def shown(name: str, *words: str, device: torch.device) -> list[str]:
    """The view of a spec in a layout, or in its default one; words may change the spec, or name kernel blocks."""
    changes: dict[str, Any] = dict(word.split("=") for word in words if "=" in word)
    changes = {key: int(value) if value.lstrip("-").isdigit() else value for key, value in changes.items()}
    (layout, *_) = [word for word in words if "=" not in word] or [""]
    kernel = changes.pop("kernel", 0)
    try:
        spec = replace(SPECS[name], **changes)
        lines = [] if layout else [f"by default {default_layout(spec)}"]
        seen = view(spec, layout, device, kernel)
    except InvalidArgumentError as error:
        return [f"refused: {error}"]
    parts = (seen,) if isinstance(seen, torch.Tensor) else seen
    assert {part.device for part in parts} == {device}
    for part in parts:
        at = f" at byte {part.storage_offset() * part.itemsize}" if part.storage_offset() else ""
        lines.append(f"{part.dtype} {tuple(part.shape)}, strides {part.stride()}{at}")
    return lines


@on_each_device
def test_views_are_those_of_the_transcript(device: torch.device) -> None:
    check(Path(__file__).with_name("layouts") / "views.txt", lambda *words: shown(*words, device=device))


def test_packed_pages_need_a_layout_of_packed_pages() -> None:
    with pytest.raises(InvalidArgumentError, match="layer 'a': packed keys and values need 'packed_nhd'"):
        check_layouts({"a": "flash_attn"}, {"a": PACKED})
    check_layouts({}, {"a": PACKED})


@pytest.mark.parametrize("layout", ["flash_attn", "flash_attn_hnd", "flashinfer_nhd", "flashinfer_hnd"])
def test_heads_lie_before_tokens_only_where_the_layout_says_so(layout: str) -> None:
    seen = tensor(layout)
    values = seen[1] if layout.startswith("flash_attn") else seen[:, 1]
    values[3, 5, 1] = 1.0  # block 3, token 5, head 1
    raw = torch.zeros(0, dtype=torch.float16).set_(seen.untyped_storage())
    in_page = (1 * 16 + 5) * 8 if layout.endswith("hnd") else (5 * 2 + 1) * 8
    expected = torch.zeros_like(raw)
    expected[3 * 512 + 256 + in_page :][:8] = 1.0
    assert torch.equal(raw, expected)


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
    assert tensor("tokens_last").stride() == (512, 256, 128, 16, 1)
    with pytest.raises(InvalidArgumentError, match="'tokens_last' is registered already"):
        register_layout("tokens_last", KeyValueLayout(("block",), ("block",)))


@pytest.mark.parametrize("dtype", DTYPE_SIZES_BYTES)
def test_types_have_the_size_that_specs_count(dtype: str) -> None:
    assert torch_dtype("a", dtype).itemsize == DTYPE_SIZES_BYTES[dtype]


def test_an_unknown_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match=r"dtype: layer 'a': 'bfloat17' is not known"):
        torch_dtype("a", "bfloat17")
    monkeypatch.delattr(torch, "float8_e4m3fnuz")
    with pytest.raises(InvalidArgumentError, match=r"layer 'a': torch .* has no 'float8_e4m3fnuz'; it has float64"):
        torch_dtype("a", "float8_e4m3fnuz")
