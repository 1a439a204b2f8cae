"""Recurrent states: their shapes, and how they share pages with attention."""

import pytest

from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec
from kvpool.models.config import Model, ModelOptions, derive_model
from support.models import changed, config, derive, kinds, specs_of, state_bytes_per_request

HYBRIDS = ["jamba-v0.1", "bamba-9b", "granite-4.0-h-small", "nemotron-h-8b", "qwen3-next-80b-a3b", "qwen3.5-397b-a17b"]


def state(model: Model) -> MambaSpec:
    spec = specs_of(model, MambaSpec)[0]
    assert isinstance(spec, MambaSpec)
    return spec


@pytest.mark.parametrize(
    ("name", "ranks", "shapes"),
    [
        ("mamba-2.8b", 1, ((3, 5120), (5120, 16))),
        ("mamba-2.8b", 4, ((3, 1280), (1280, 16))),
        ("jamba-v0.1", 1, ((3, 8192), (8192, 16))),
        ("mamba-codestral-7b", 1, ((3, 8192 + 2 * 8 * 128), (128, 64, 128))),
        ("mamba-codestral-7b", 2, ((3, 4096 + 2 * 4 * 128), (64, 64, 128))),
        ("mamba-codestral-7b", 8, ((3, 1024 + 2 * 128), (16, 64, 128))),
        ("bamba-9b", 4, ((3, 2048 + 2 * 128), (32, 64, 128))),
        ("granite-4.0-h-small", 1, ((3, 8192 + 2 * 128), (128, 64, 128))),
        ("nemotron-h-8b", 8, ((3, 1024 + 2 * 128), (16, 64, 128))),
        ("qwen3-next-80b-a3b", 1, ((3, 2 * 16 * 128 + 32 * 128), (32, 128, 128))),
        ("qwen3.5-397b-a17b", 8, ((3, 2 * 2 * 128 + 8 * 128), (8, 128, 128))),
        ("qwen3-next-80b-a3b", 2, ((3, 2 * 8 * 128 + 16 * 128), (16, 128, 128))),
    ],
)
def test_shapes_on_one_rank(name: str, ranks: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    assert state(derive(name, ModelOptions(tensor_parallel_size=ranks))).shapes == shapes


@pytest.mark.parametrize(("name", "kept"), [("mamba-codestral-7b", 3 + 2), ("qwen3-next-80b-a3b", 3 + 2)])
def test_drafts_lengthen_the_convolution_and_take_blocks(name: str, kept: int) -> None:
    spec = state(derive(name, ModelOptions(num_speculative_tokens=2)))
    assert (spec.shapes[0][0], spec.num_speculative_blocks) == (kept, 2)


@pytest.mark.parametrize("key", ["mamba_ssm_cache_dtype", "mamba_ssm_dtype"])
def test_the_recurrence_is_in_the_type_that_the_config_states(key: str) -> None:
    model = derive_model(changed("bamba-9b", **{key: "float32"}), ModelOptions())
    assert state(model).dtypes == ("bfloat16", "float32")
    assert state_bytes_per_request(model) == 29 * (3 * 8448 * 2 + 128 * 64 * 128 * 4)
    model = derive_model(changed("bamba-9b", **{key: "auto"}), ModelOptions())
    assert state(model).dtypes == ("bfloat16", "bfloat16")


def test_nemotron_h_keeps_its_recurrence_in_float32_unless_the_config_states_another_type() -> None:
    assert state(derive("nemotron-h-8b")).dtypes == ("bfloat16", "float32")
    model = derive_model(changed("nemotron-h-8b", mamba_ssm_cache_dtype="auto"), ModelOptions())
    assert state(model).dtypes == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("key", ["layers_block_type", "layer_types", "hybrid_override_pattern"])
def test_the_kinds_of_nemotron_h_count_its_layers(key: str) -> None:
    letters = str(config("nemotron-h-8b")["hybrid_override_pattern"])
    kind_of = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    value: object = letters if key == "hybrid_override_pattern" else [kind_of[letter] for letter in letters]
    data = changed("nemotron-h-8b", hybrid_override_pattern=..., num_hidden_layers=...) | {key: value}
    model = derive_model(data, ModelOptions())
    assert (model.layers, model.num_hidden_layers) == (derive("nemotron-h-8b").layers, 52)


@pytest.mark.parametrize("names", [("mamba", "attention"), ("linear_attention", "full_attention")])
def test_nemotron_h_names_its_layers_or_has_a_letter_for_each(names: tuple[str, str]) -> None:
    mamba, attention = names
    letters = config("nemotron-h-8b")["hybrid_override_pattern"]
    kind_of = {"M": mamba, "*": attention, "-": "mlp", "E": "moe"}
    named = changed(
        "nemotron-h-8b",
        layers_block_type=[kind_of[letter] for letter in str(letters)],
        hybrid_override_pattern=...,
        num_hidden_layers=...,
    )
    assert derive_model(named, ModelOptions()).layers == derive("nemotron-h-8b").layers


@pytest.mark.parametrize("architecture", ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"])
def test_qwen3_5_keeps_its_recurrence_in_float32(architecture: str) -> None:
    model = derive_model(changed("qwen3.5-397b-a17b", architectures=[architecture]), ModelOptions())
    assert state(model).dtypes == ("bfloat16", "float32")
    assert kinds(model) == {"MambaSpec": 45, "FullAttentionSpec": 15}


def test_an_fp8_cache_does_not_change_states() -> None:
    model = derive("jamba-v0.1", ModelOptions(kv_dtype="fp8"))
    assert state(model).dtypes == ("bfloat16", "bfloat16")
    attention = specs_of(model, FullAttentionSpec)[0]
    assert attention.block_size == 160
    assert attention.page_size_bytes == state(model).page_size_bytes


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("block_size", [1, 16, 48, 1024])
@pytest.mark.parametrize("ranks", [1, 4])
def test_pages_of_a_hybrid_have_one_minimal_size(name: str, block_size: int, ranks: int) -> None:
    model = derive(name, ModelOptions(block_size=block_size, tensor_parallel_size=ranks))
    attention, mamba = specs_of(model, FullAttentionSpec)[0], state(model)
    assert isinstance(attention, FullAttentionSpec)
    assert len({spec.page_size_bytes for _, spec in model.layers}) == 1
    least, step = -(-mamba.content_size_bytes // attention.state_size_bytes), max(block_size, 16)
    assert attention.block_size == -(-least // step) * step
    assert mamba.page_size_bytes >= mamba.content_size_bytes


@pytest.mark.parametrize(
    ("name", "block_size"),
    [("jamba-v0.1", 80), ("nemotron-h-8b", 1040), ("qwen3-next-80b-a3b", 544), ("bamba-9b", 528)],
)
def test_the_grown_block_is_noted(name: str, block_size: int) -> None:
    model = derive(name)
    assert {spec.block_size for spec in specs_of(model, FullAttentionSpec)} == {block_size}
    assert any(note.startswith(f"attention block size: {block_size} tokens") for note in model.notes)
    assert any(note.startswith("Mamba block size") for note in model.notes)


def test_a_state_covers_the_request_unless_states_are_cached() -> None:
    assert state(derive("jamba-v0.1")).block_size == 262_144
    assert state(derive("jamba-v0.1", ModelOptions(max_model_len=5000))).block_size == 5000
    assert state(derive("jamba-v0.1", ModelOptions(mamba_caching=True))).block_size == 80
    assert state(derive("mamba-codestral-7b", ModelOptions(max_model_len=5000))).block_size == 5000
    assert state(derive("mamba-codestral-7b", ModelOptions(mamba_caching=True))).block_size == 16


def test_a_mamba_without_a_length_is_noted() -> None:
    model = derive("mamba-2.8b")
    assert model.max_model_len == 2048
    assert any("max_position_embeddings" in note for note in model.notes)


def test_a_page_that_fits_exactly_is_not_padded() -> None:
    data = changed("jamba-v0.1", mamba_d_conv=5, mamba_d_state=16, num_key_value_heads=8)
    spec = state(derive_model(data, ModelOptions()))
    assert spec.content_size_bytes == 80 * 4096
    assert (spec.page_size_padded, spec.page_size_bytes) == (0, 80 * 4096)


def test_names() -> None:
    assert derive("mamba-2.8b").layers[0][0] == "model.layers.0.mixer"
    names = [name for name, _ in derive("jamba-v0.1").layers]
    assert names[3:5] == ["model.layers.3.mixer", "model.layers.4.self_attn.attn"]
    names = [name for name, _ in derive("nemotron-h-8b").layers]
    assert names[:5] == [*(f"model.layers.{i}.mixer" for i in (0, 2, 4, 6)), "model.layers.7.self_attn.attn"]
    names = [name for name, _ in derive("qwen3-next-80b-a3b").layers]
    assert names[2:4] == ["model.layers.2.mixer", "model.layers.3.self_attn.attn"]


def test_qwen3_next_may_name_its_layers() -> None:
    types = ["linear_attention", "full_attention"] * 24
    model = derive_model(changed("qwen3-next-80b-a3b", layer_types=types), ModelOptions())
    assert kinds(model) == {"MambaSpec": 24, "FullAttentionSpec": 24}


def test_hybrids_of_one_kind_only() -> None:
    model = derive_model(changed("granite-4.0-h-small", layer_types=["attention"] * 40), ModelOptions())
    assert specs_of(model, FullAttentionSpec) == [FullAttentionSpec(16, 8, 128, "bfloat16")] * 40
    model = derive_model(changed("granite-4.0-h-small", layer_types=["mamba"] * 40), ModelOptions())
    assert kinds(model) == {"MambaSpec": 40}
    assert state(model).page_size_padded == 0


def test_bamba_may_omit_the_head_size() -> None:
    for head_size in ("auto", ...):
        model = derive_model(changed("bamba-9b", mamba_d_head=head_size), ModelOptions())
        assert model.layers == derive("bamba-9b").layers
