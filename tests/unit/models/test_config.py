"""Configs are read as the transcripts show, and all known configs alike."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.plan import PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, MLAAttentionSpec
from kvpool.models.config import ModelOptions, derive_model, split_stages
from kvpool.models.families import ARCHITECTURES, FAMILIES
from support.model_transcript import ModelTranscript
from support.models import changed, config, derive, full_bytes_per_token, specs_of
from support.paths import MODEL_CONFIGS
from support.transcripts import check

FOLDER: Final = Path(__file__).with_name("transcripts")
NAMES: Final = sorted(path.stem for path in MODEL_CONFIGS.glob("*.json"))
HYBRIDS: Final = (
    "jamba-v0.1", "bamba-9b", "granite-4.0-h-small", "nemotron-h-8b", "qwen3-next-80b-a3b", "qwen3.5-397b-a17b",
)  # fmt: skip


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_models_are_those_of_the_transcript(path: Path) -> None:
    check(path, ModelTranscript(FOLDER).execute)


@pytest.mark.parametrize("name", NAMES)
def test_layers_have_unique_names_and_ascending_indices(name: str) -> None:
    model = derive(name)
    names = [layer for layer, _ in model.layers]
    assert len(set(names)) == len(names) == len(model.layer_indices)
    assert list(model.layer_indices) == sorted(model.layer_indices)
    assert set(model.layer_indices) <= set(range(model.num_hidden_layers))


@pytest.mark.parametrize("name", NAMES)
def test_half_the_heads_are_half_the_bytes(name: str) -> None:
    whole, half = derive(name), derive(name, ModelOptions(tensor_parallel_size=2))
    divisor = 1 if specs_of(whole, MLAAttentionSpec) else 2
    assert full_bytes_per_token(half) * divisor == full_bytes_per_token(whole)


@pytest.mark.parametrize("name", NAMES)
def test_model_type_stands_in_for_a_missing_architecture(name: str) -> None:
    stated = derive(name)
    model_type = next(key for key, architecture in ARCHITECTURES.items() if architecture == stated.architecture)
    data = changed(name, architectures=..., model_type=model_type)
    assert derive_model(data, ModelOptions()).layers == stated.layers
    assert derive_model(data, ModelOptions()).architecture == stated.architecture


def test_model_types_stand_for_known_architectures() -> None:
    assert set(ARCHITECTURES.values()) <= set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_is_like_itself(name: str) -> None:
    own = derive(name)
    assert own.architecture in FAMILIES
    assert derive_model(config(name), ModelOptions(), like=own.architecture).layers == own.layers


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [1, 2, 3, 7])
def test_stages_hold_all_layers_once_and_in_order(name: str, stages: int) -> None:
    model = derive(name)
    held = [item for stage in split_stages(model, stages) for item in stage.items()]
    assert held == list(model.layers)


@pytest.mark.parametrize("section", ["text_config", "language_config", "llm_config"])
@pytest.mark.parametrize("named_by", ["architectures", "model_type"])
def test_an_unknown_wrapper_is_read_by_its_language_model(section: str, named_by: str) -> None:
    inner = config("llama-3.1-8b")
    del inner["architectures" if named_by == "model_type" else "model_type"]
    wrapper: dict[str, object] = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    model = derive_model(wrapper | {section: inner}, ModelOptions())
    assert model.layers == derive("llama-3.1-8b").layers
    assert (model.architecture, model.model_type) == ("LlavaForConditionalGeneration", "llava")


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("block_size", [1, 16, 48, 1024])
@pytest.mark.parametrize("ranks", [1, 4])
def test_pages_of_a_hybrid_have_one_minimal_size(name: str, block_size: int, ranks: int) -> None:
    model = derive(name, ModelOptions(block_size=block_size, tensor_parallel_size=ranks))
    attention, mamba = specs_of(model, FullAttentionSpec)[0], specs_of(model, MambaSpec)[0]
    assert isinstance(attention, FullAttentionSpec)
    assert isinstance(mamba, MambaSpec)
    assert len({spec.page_size_bytes for _, spec in model.layers}) == 1
    least, step = -(-mamba.content_size_bytes // attention.state_size_bytes), max(block_size, 16)
    assert attention.block_size == -(-least // step) * step
    assert mamba.page_size_bytes >= mamba.content_size_bytes


@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
@pytest.mark.parametrize("names", [("mamba", "attention"), ("linear_attention", "full_attention")])
def test_nemotron_h_names_its_layers_or_has_a_letter_for_each(key: str, names: tuple[str, str]) -> None:
    kind_of = {"M": names[0], "*": names[1], "-": "mlp", "E": "moe"}
    letters = str(config("nemotron-h-8b")["hybrid_override_pattern"])
    named = changed("nemotron-h-8b", hybrid_override_pattern=..., num_hidden_layers=...)
    model = derive_model(named | {key: [kind_of[letter] for letter in letters]}, ModelOptions())
    assert (model.layers, model.num_hidden_layers) == (derive("nemotron-h-8b").layers, 52)


def test_windows_of_deepseek_v4_are_not_kept_whole() -> None:
    ranks = [RankMemory(dict(derive_model(config("deepseek-v4", FOLDER), ModelOptions()).layers), 2**40)]
    with pytest.raises(InvalidArgumentError) as caught:
        get_kv_cache_configs(ranks, PlanOptions(8192, disable_hybrid_kv_cache_manager=True))
    assert caught.value.field == "disable_hybrid_kv_cache_manager"


ODD_VALUES = [..., None, 0, -1, 1, 3, 2**24, 2**40, 1.5, True, "", "x", [], [0], ["x"], {}, {"x": 1}]


def with_one_odd_value(name: str) -> Iterator[dict[str, object]]:
    for key in config(name):
        for value in ODD_VALUES:
            yield changed(name, **{key: value})
    section = config(name).get("text_config")
    for key in section if isinstance(section, dict) else ():
        for value in ODD_VALUES:
            data = config(name)
            inner = data["text_config"]
            assert isinstance(inner, dict)
            inner[key] = value
            yield data


@pytest.mark.parametrize("name", NAMES)
def test_any_odd_value_is_read_or_refused_by_the_one_documented_error(name: str) -> None:
    fields: list[str] = []
    for data in with_one_odd_value(name):
        try:
            derive_model(data, ModelOptions(tensor_parallel_size=2))
        except InvalidArgumentError as error:
            fields.append(error.field)
    assert fields
    assert all(fields)
