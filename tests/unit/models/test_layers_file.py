"""Files that state the specs layer by layer."""

import json
from dataclasses import asdict

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import SPEC_KINDS, FullAttentionSpec, MambaSpec, SinkFullAttentionSpec, SlidingWindowSpec
from kvpool.models.layers_file import read_layers, spec_from_json
from support.models import derive
from support.paths import MODEL_CONFIGS

NAME = "model.layers.0.self_attn"
FULL = {"type": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
MAMBA = {"type": "MambaSpec", "block_size": 64, "shapes": [[3, 8], [4, 2]], "dtypes": ["bfloat16", "float32"]}


def refused_field(data: object) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        read_layers(data)
    return caught.value.field


def test_layers_are_read_in_order() -> None:
    window = {"type": "SlidingWindowSpec", "block_size": 16, "sliding_window": 128}
    layers = read_layers({"layers": {"b": FULL, "a": window, "c": MAMBA}})
    assert list(layers.items()) == [
        ("b", FullAttentionSpec(16, 8, 128, "bfloat16")),
        ("a", SlidingWindowSpec(16, sliding_window=128)),
        ("c", MambaSpec(64, ((3, 8), (4, 2)), ("bfloat16", "float32"))),
    ]


@pytest.mark.parametrize("kind", SPEC_KINDS)
def test_every_kind_can_be_read(kind: str) -> None:
    needed = {
        "SinkFullAttentionSpec": {"sink_len": 16},
        "SlidingWindowSpec": {"sliding_window": 4},
        "SlidingWindowMLASpec": {"sliding_window": 4},
        "ChunkedLocalAttentionSpec": {"attention_chunk_size": 4},
    }
    spec = spec_from_json("layer", {"type": kind, "block_size": 16, **needed.get(kind, {})})
    assert type(spec).__name__ == kind


@pytest.mark.parametrize("name", sorted(path.stem for path in MODEL_CONFIGS.glob("*.json")))
def test_derived_specs_can_be_written_and_read_back(name: str) -> None:
    def written(spec: KVCacheSpec) -> dict[str, object]:
        return {"type": type(spec).__name__, "page_size_bytes": spec.page_size_bytes, **asdict(spec)}

    derived = dict(derive(name).layers)
    text = json.dumps({"layers": {layer: written(spec) for layer, spec in derived.items()}})
    assert read_layers(json.loads(text)) == derived


def test_null_stands_for_the_default() -> None:
    spec = spec_from_json("layer", {**FULL, "sliding_window": None, "page_size_bytes": None})
    assert spec == FullAttentionSpec(16, 8, 128, "bfloat16")


def test_a_page_size_is_checked() -> None:
    assert spec_from_json("layer", {**FULL, "page_size_bytes": 65_536}).page_size_bytes == 65_536
    field = refused_field({"layers": {NAME: {**FULL, "page_size_bytes": 65_535}}})
    assert field == f'layers["{NAME}"].page_size_bytes'


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ([], "$"),
        ({}, "layers"),
        ({"layers": {}}, "layers"),
        ({"layers": []}, "layers"),
        ({"layers": {"a": FULL}, "model": "x"}, "model"),
        ({"layers": {"a": 7}}, 'layers["a"]'),
    ],
)
def test_a_file_of_another_form_is_refused(data: object, field: str) -> None:
    assert refused_field(data) == field


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"type": None}, "type"),
        ({"type": 7}, "type"),
        ({"type": "PagedSpec"}, "type"),
        ({"type": "UniformTypeKVCacheSpecs"}, "type"),
        ({"block_size": None}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "16"}, "block_size"),
        ({"head_size": 128.0}, "head_size"),
        ({"head_size": True}, "head_size"),
        ({"head_size": -1}, "head_size"),
        ({"head_dim": 128}, "head_dim"),
        ({"head_dim": None}, "head_dim"),
        ({"is_sharded": True}, "is_sharded"),
        ({"dtype": 2}, "dtype"),
        ({"dtype": "bf16"}, "dtype"),
        ({"page_size_padded": 1}, "page_size_padded"),
        ({"page_size_bytes": "65536"}, "page_size_bytes"),
        ({"page_size_bytes": True}, "page_size_bytes"),
    ],
)
def test_a_malformed_attribute_is_named_by_its_path(change: dict[str, object], key: str) -> None:
    assert refused_field({"layers": {NAME: {**FULL, **change}}}) == f'layers["{NAME}"].{key}'


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"shapes": 3}, "shapes"),
        ({"shapes": [3, [4]]}, "shapes[0]"),
        ({"shapes": [[3, 8], [4, "2"]]}, "shapes[1][1]"),
        ({"shapes": [[3, 8], [4, 0]]}, "shapes[1][1]"),
        ({"dtypes": "bfloat16"}, "dtypes"),
        ({"dtypes": ["bfloat16", 4]}, "dtypes[1]"),
        ({"dtypes": ["bfloat16"]}, "dtypes"),
        ({"mamba_type": 2}, "mamba_type"),
    ],
)
def test_a_malformed_state_is_named_by_its_path(change: dict[str, object], key: str) -> None:
    assert refused_field({"layers": {"m": {**MAMBA, **change}}}) == f'layers["m"].{key}'


def test_a_sink_must_be_whole_blocks() -> None:
    sink = {"type": "SinkFullAttentionSpec", "block_size": 16, "sink_len": 32}
    assert spec_from_json("layer", sink) == SinkFullAttentionSpec(16, sink_len=32)
    assert refused_field({"layers": {"s": {**sink, "sink_len": 8}}}) == 'layers["s"].sink_len'
