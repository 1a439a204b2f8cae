"""What is refused, and that the error names the key or the option."""

from collections.abc import Iterator

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.plan import PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.models.config import FAMILIES, ModelOptions, derive_model
from support.models import DEFAULT_OPTIONS, changed, config, derive
from support.paths import MODEL_CONFIGS


def refusal(data: dict[str, object], options: ModelOptions = DEFAULT_OPTIONS) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        derive_model(data, options)
    return caught.value


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama-3.1-8b", "num_hidden_layers"),
        ("llama-3.1-8b", "num_attention_heads"),
        ("llama-3.1-8b", "hidden_size"),
        ("llama-3.1-8b", "max_position_embeddings"),
        ("gemma-2-9b", "sliding_window"),
        ("gpt-oss-20b", "sliding_window"),
        ("deepseek-v3", "kv_lora_rank"),
        ("deepseek-v3", "qk_rope_head_dim"),
        ("deepseek-v3.2", "index_head_dim"),
        ("glm-4.7-flash", "kv_lora_rank"),
        ("phi-4", "num_attention_heads"),
        ("mamba-2.8b", "state_size"),
        ("mamba-2.8b", "conv_kernel"),
        ("mamba-codestral-7b", "num_heads"),
        ("mamba-codestral-7b", "n_groups"),
        ("jamba-v0.1", "attn_layer_period"),
        ("jamba-v0.1", "attn_layer_offset"),
        ("jamba-v0.1", "mamba_d_state"),
        ("bamba-9b", "attn_layer_indices"),
        ("bamba-9b", "mamba_n_heads"),
        ("granite-4.0-h-small", "layer_types"),
        ("nemotron-h-8b", "hybrid_override_pattern"),
        ("nemotron-h-8b", "mamba_num_heads"),
        ("qwen3-next-80b-a3b", "linear_num_value_heads"),
        ("whisper-large-v3", "decoder_layers"),
        ("whisper-large-v3", "d_model"),
        ("whisper-large-v3", "max_source_positions"),
        ("whisper-large-v3", "max_target_positions"),
    ],
)
@pytest.mark.parametrize("absent", [..., None], ids=["left-out", "null"])
def test_a_missing_key_is_named(name: str, key: str, absent: object) -> None:
    error = refusal(changed(name, **{key: absent}))
    assert (error.field, error.reason) == (key, "MISSING")


def test_a_missing_key_of_a_nested_config_is_named_by_its_path() -> None:
    data = config("mistral-small-3.1-24b")
    section = data["text_config"]
    assert isinstance(section, dict)
    del section["num_attention_heads"]
    assert any("num_attention_heads = 32" in note for note in derive_model(data, ModelOptions()).notes)
    del section["model_type"]
    assert refusal(data).field == "text_config.num_attention_heads"


@pytest.mark.parametrize(
    ("name", "key", "value", "field"),
    [
        ("llama-3.1-8b", "num_hidden_layers", "32", "num_hidden_layers"),
        ("llama-3.1-8b", "num_hidden_layers", 32.0, "num_hidden_layers"),
        ("llama-3.1-8b", "num_hidden_layers", True, "num_hidden_layers"),
        ("llama-3.1-8b", "num_hidden_layers", 0, "num_hidden_layers"),
        ("llama-3.1-8b", "num_hidden_layers", 10**9, "num_hidden_layers"),
        ("llama-3.1-8b", "num_key_value_heads", -8, "num_key_value_heads"),
        ("llama-3.1-8b", "num_attention_heads", 8192, "hidden_size"),
        ("llama-3.1-8b", "head_dim", [128], "head_dim"),
        ("llama-3.1-8b", "torch_dtype", 16, "torch_dtype"),
        ("llama-3.1-8b", "torch_dtype", "bfloat17", "torch_dtype"),
        ("llama-3.1-8b", "architectures", "LlamaForCausalLM", "architectures"),
        ("llama-3.1-8b", "architectures", [7], "architectures[0]"),
        ("llama-3.1-8b", "model_type", 7, "model_type"),
        ("llama-3.1-8b", "text_config", "llama", "text_config"),
        ("qwen2.5-7b", "use_sliding_window", 1, "use_sliding_window"),
        ("gpt-oss-20b", "layer_types", ["full_attention"], "layer_types"),
        ("gpt-oss-20b", "layer_types", ["full_attention"] * 23 + ["linear_attention"], "layer_types"),
        ("gpt-oss-20b", "layer_types", ["full_attention"] * 23 + ["attn"], "layer_types[23]"),
        ("gpt-oss-20b", "layer_types", ["full_attention"] * 23 + [0], "layer_types[23]"),
        ("jamba-v0.1", "attn_layer_offset", 8, "attn_layer_offset"),
        ("bamba-9b", "attn_layer_indices", [9, 32], "attn_layer_indices[1]"),
        ("bamba-9b", "attn_layer_indices", [-1], "attn_layer_indices[0]"),
        ("nemotron-h-8b", "hybrid_override_pattern", "M*", "hybrid_override_pattern"),
        ("nemotron-h-8b", "hybrid_override_pattern", "X" * 52, "hybrid_override_pattern[0]"),
        ("nemotron-h-8b", "layers_block_type", ["mamba", "attn"], "layers_block_type[1]"),
        ("nemotron-h-8b", "mamba_ssm_cache_dtype", "float8", "mamba_ssm_cache_dtype"),
        ("whisper-large-v3", "d_model", 10, "d_model"),
        ("mamba-2.8b", "conv_kernel", 1, 'layers["model.layers.0.mixer"].shapes[0][0]'),
    ],
)
def test_a_malformed_key_is_named(name: str, key: str, value: object, field: str) -> None:
    assert refusal(changed(name, **{key: value})).field == field


def test_a_llama_4_that_names_too_few_layers_is_refused() -> None:
    data = config("llama-4-scout")
    section = data["text_config"]
    assert isinstance(section, dict)
    section["no_rope_layers"] = [1, 1, 1, 0]
    assert refusal(data).field == "text_config.no_rope_layers"


@pytest.mark.parametrize(
    "data",
    [
        {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"},
        {"architectures": ["RwkvForCausalLM"], "model_type": "llama"},
        {"model_type": "rwkv"},
        {},
    ],
)
def test_an_unknown_architecture_error_names_known_ones_and_the_alternative(data: dict[str, object]) -> None:
    error = refusal(data)
    assert (error.field, error.reason) == ("architectures", "UNKNOWN_ARCHITECTURE")
    assert f"{len(FAMILIES)} architectures are known, such as " in error.message
    assert "--like ARCHITECTURE" in error.message
    assert "--layers FILE" in error.message
    assert '"type": "FullAttentionSpec"' in error.message


def test_only_a_known_architecture_can_be_likened() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        derive_model(config("llama-3.1-8b"), ModelOptions(), like="llama")
    assert caught.value.field == "like"
    assert "such as LlamaForCausalLM" in caught.value.message


DEEPSEEK_V4: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_groups": 8,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128],
    "max_position_embeddings": 1_048_576,
}
"""The keys of DeepSeek-V4 that say what its layers keep."""


@pytest.mark.parametrize("like", ["DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"])
def test_deepseek_v4_is_not_like_its_predecessors(like: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        derive_model(DEEPSEEK_V4, ModelOptions(), like=like)
    assert (caught.value.field, caught.value.reason) == ("kv_lora_rank", "MISSING")


def test_rules_of_keys_and_values_name_what_they_do_not_read_of_deepseek_v4() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        derive_model(DEEPSEEK_V4, ModelOptions(), like="LlamaForCausalLM")
    assert (caught.value.field, caught.value.reason) == ("qk_rope_head_dim", "IGNORED_KEY")
    assert all(f"{key} = {DEEPSEEK_V4[key]}" in caught.value.message for key in ("index_head_dim", "compress_ratios"))


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("compress_ratios", None, "compress_ratios"),  # as transformers writes it, which vLLM does not read
        ("compress_ratios", [0, 0, 4], "compress_ratios"),
        ("compress_ratios", [0, 0, 4, 8], "compress_ratios[3]"),
        ("compress_ratios", [0, 0, 1, 2], "compress_ratios[2]"),  # of DeepSeek-V4.1
        ("head_dim", 256, "head_dim"),
        ("qk_rope_head_dim", 32, "qk_rope_head_dim"),
        ("index_head_dim", 64, "index_head_dim"),
        ("sliding_window", None, "sliding_window"),
        ("num_kv_shared_layers", 1, "num_kv_shared_layers"),
        ("swa_head_dim", 64, "swa_head_dim"),
    ],
)
def test_a_deepseek_v4_of_another_form_is_refused(key: str, value: object, field: str) -> None:
    assert derive_model(DEEPSEEK_V4, ModelOptions()).layers
    assert refusal({**DEEPSEEK_V4, key: value}).field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (ModelOptions(kv_dtype="bfloat16"), "kv_dtype"),  # of kernels that store plain rows
        (ModelOptions(kv_dtype="fp8_e5m2"), "kv_dtype"),
        (ModelOptions(64), "block_size"),
        (ModelOptions(tensor_parallel_size=16), "tensor_parallel_size"),  # of 8 o_groups
    ],
)
def test_deepseek_v4_is_planned_for_one_layout(options: ModelOptions, field: str) -> None:
    for known in (ModelOptions(256, "fp8"), ModelOptions(kv_dtype="fp8_ds_mla", tensor_parallel_size=8)):
        assert derive_model(DEEPSEEK_V4, known).layers == derive_model(DEEPSEEK_V4, ModelOptions()).layers
    assert refusal(DEEPSEEK_V4, options).field == field


def test_windows_of_deepseek_v4_are_not_kept_whole() -> None:
    ranks = [RankMemory(dict(derive_model(DEEPSEEK_V4, ModelOptions()).layers), 2**40)]
    with pytest.raises(InvalidArgumentError) as caught:
        get_kv_cache_configs(ranks, PlanOptions(8192, disable_hybrid_kv_cache_manager=True))
    assert caught.value.field == "disable_hybrid_kv_cache_manager"


def test_deepseek_v4_1_is_unknown() -> None:
    data = {**DEEPSEEK_V4, "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
    assert refusal(data).reason == "UNKNOWN_ARCHITECTURE"


@pytest.mark.parametrize(
    ("name", "ranks", "what"),
    [
        ("llama-3.1-8b", 3, "num_attention_heads is 32"),
        ("llama-3.1-8b", 64, "num_attention_heads is 32"),
        ("qwen2.5-7b", 28, None),
        ("mistral-small-3.1-24b", 3, "text_config.num_attention_heads is 32"),
        ("llama-4-scout", 5, "text_config.num_key_value_heads is 8"),
        ("llama-4-scout", 20, "text_config.num_key_value_heads is 8"),
        ("deepseek-v3", 3, "num_attention_heads is 128"),
        ("mamba-2.8b", 3, "intermediate_size is 5120"),
        ("mamba-codestral-7b", 3, "num_heads is 128"),
        ("mamba-codestral-7b", 16, "n_groups is 8"),
        ("nemotron-h-8b", 3, "num_attention_heads is 32"),
        ("bamba-9b", 3, "num_attention_heads is 32"),
        ("jamba-v0.1", 3, "num_attention_heads is 32"),
        ("qwen3-next-80b-a3b", 3, "is 16"),
        ("whisper-large-v3", 8, "encoder_attention_heads is 20"),
    ],
)
def test_ranks_that_cannot_share_the_heads_are_refused(name: str, ranks: int, what: str | None) -> None:
    options = ModelOptions(tensor_parallel_size=ranks)
    if what is None:
        derive(name, options)
        return
    error = refusal(config(name), options)
    assert error.field == "tensor_parallel_size"
    assert what in error.message
    assert "--tp" in error.message


@pytest.mark.parametrize(
    ("name", "kv_dtype", "words"),
    [
        ("llama-3.1-8b", "nvfp4_ds_mla", "for multi-head latent attention only"),
        ("deepseek-v3", "nvfp4", "for keys and values only"),
        ("deepseek-v3", "turboquant_k8v4", "for keys and values only"),
        ("phi-3-mini-4k", "ultraquant_4bit", ""),
    ],
)
def test_a_packed_type_is_for_one_kind_of_attention(name: str, kv_dtype: str, words: str) -> None:
    if not words:
        derive(name, ModelOptions(kv_dtype=kv_dtype))
        return
    error = refusal(config(name), ModelOptions(kv_dtype=kv_dtype))
    assert error.field == "kv_dtype"
    assert words in error.message


@pytest.mark.parametrize("kv_dtype", ["nvfp4", "ultraquant_4bit", "int4_per_token_head"])
def test_a_packed_type_takes_whole_groups_of_elements(kv_dtype: str) -> None:
    error = refusal(changed("llama-3.1-8b", head_dim=121), ModelOptions(kv_dtype=kv_dtype))
    assert error.field == "kv_dtype"
    assert "elements at a time, and heads have 121" in error.message


@pytest.mark.parametrize("kv_dtype", ["fp4", "bf16", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_an_unknown_kv_dtype_is_refused(kv_dtype: str) -> None:
    assert refusal(config("llama-3.1-8b"), ModelOptions(kv_dtype=kv_dtype)).field == "kv_dtype"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("block_size", 2**20 + 1),
        ("tensor_parallel_size", 0),
        ("max_model_len", -1),
        ("num_speculative_tokens", -1),
    ],
)
def test_options_out_of_range_are_refused(field: str, value: int) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ModelOptions(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_request_too_long_for_one_mamba_block_is_refused() -> None:
    options = ModelOptions(max_model_len=2**20 + 1)
    assert refusal(config("jamba-v0.1"), options).field == "max_model_len"
    derive("jamba-v0.1", ModelOptions(max_model_len=2**20 + 1, mamba_caching=True))


def test_an_attention_block_that_cannot_hold_a_state_is_refused() -> None:
    data = changed("jamba-v0.1", mamba_d_state=2**22)
    assert refusal(data).field == "block_size"


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


@pytest.mark.parametrize("name", sorted(path.stem for path in MODEL_CONFIGS.glob("*.json")))
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_odd_value_is_read_or_refused_by_the_one_documented_error(name: str, ranks: int) -> None:
    fields: list[str] = []
    for data in with_one_odd_value(name):
        try:
            derive_model(data, ModelOptions(tensor_parallel_size=ranks))
        except InvalidArgumentError as error:
            fields.append(error.field)
    assert fields
    assert all(fields)
