"""Files that state the specs layer by layer."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import SPEC_KINDS, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.models.layers_file import read_layers
from support.models import derive
from support.paths import MODEL_CONFIGS
from support.transcripts import check

NAME = "model.layers.0.self_attn"
FULL: dict[str, object] = {
    "type": "FullAttentionSpec",
    "block_size": 16,
    "num_kv_heads": 8,
    "head_size": 128,
    "dtype": "bfloat16",
}
MAMBA: dict[str, object] = {
    "type": "MambaSpec",
    "block_size": 64,
    "shapes": [[3, 8], [4, 2]],
    "dtypes": ["bfloat16", "float32"],
}
BASES: dict[str, dict[str, object]] = {"full": FULL, "mamba": MAMBA, "kind": {"block_size": 16}}


def execute(base: str, *changes: str) -> list[str]:
    stated = {key: json.loads(value) for key, _, value in (change.partition("=") for change in changes)}
    try:
        return [repr(read_layers({"layers": {NAME: {**BASES[base], **stated}}})[NAME])]
    except InvalidArgumentError as error:
        return [f"refused: {error}"]


def test_layers_are_read_or_refused_as_the_transcript_shows() -> None:
    path = Path(__file__).with_name("layers") / "layers.txt"
    check(path, execute)
    assert not [kind for kind in SPEC_KINDS if f'type="{kind}"' not in path.read_text()]


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


@pytest.mark.parametrize("name", sorted(path.stem for path in MODEL_CONFIGS.glob("*.json")))
def test_derived_specs_can_be_written_and_read_back(name: str) -> None:
    def written(spec: KVCacheSpec) -> dict[str, object]:
        return {"type": type(spec).__name__, "page_size_bytes": spec.page_size_bytes, **asdict(spec)}

    derived = dict(derive(name).layers)
    text = json.dumps({"layers": {layer: written(spec) for layer, spec in derived.items()}})
    assert read_layers(json.loads(text)) == derived


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
