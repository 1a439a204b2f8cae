"""docs/reference/tensors.md says what is so."""

import re
from dataclasses import replace

import pytest
import torch

from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, MLAAttentionSpec
from kvpool.gpu_worker.layouts import _LAYOUTS, LayerPages, get_layout
from support.paths import DOCS

PAGE = (DOCS / "reference/tensors.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*?) \| .* \|$", PAGE, re.MULTILINE))
STRIDES = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*?) \| .* \|$", PAGE, re.MULTILINE))
FULL = FullAttentionSpec(16, 3, 8, "float16", page_size_padded=2000)
SPECS: dict[str, KVCacheSpec] = {
    "flash_attn_diffkv": replace(FULL, head_size_v=4),
    "packed_nhd": FullAttentionSpec(16, 3, 8, "uint8", page_size_padded=1000, state_content_bytes=6),
    "packed_hnd": FullAttentionSpec(16, 3, 8, "uint8", page_size_padded=1000, state_content_bytes=6),
    "mla": MLAAttentionSpec(16, head_size=8, dtype="float16", page_size_padded=2000),
}


def test_the_table_lists_every_layout() -> None:
    assert set(_LAYOUTS) - {"tokens_last"} == set(ROWS)  # which another test may have registered


@pytest.mark.parametrize("name", [name for name in ROWS if name != "mamba"])
def test_shapes_and_strides_are_those_of_the_table(name: str) -> None:
    spec = SPECS.get(name, FULL)
    pages = LayerPages("a", spec, torch.zeros(4 * spec.page_size_bytes, dtype=torch.int8), 4)
    view = get_layout("a", name).view(pages)
    assert isinstance(view, torch.Tensor)
    symbols = {"B": 4, "T": 16, "H": 3, "D": 8, "Dv": 4, "C": 6, "P": 1000, "K": 16 * 3 * 8}
    assert tuple(view.shape) == eval(ROWS[name], symbols)  # noqa: S307 - our own page
    assert view.stride() == eval(STRIDES[name], symbols)  # noqa: S307 - our own page


def test_states_are_a_page_apart() -> None:
    spec = MambaSpec(16, ((2, 3), (5,)), ("float16", "float16"))
    parts = get_layout("a", "mamba").view(LayerPages("a", spec, torch.zeros(88, dtype=torch.int8), 4))
    assert ROWS["mamba"] == "(B, ...) of each part"
    assert [(part.shape[0], part.stride(0)) for part in parts] == [(4, 11), (4, 11)]
