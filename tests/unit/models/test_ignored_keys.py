"""`like`: keys that change the cache, and that the rules of the named architecture do not read, are refused by name."""

from typing import Any

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.models.config import FAMILIES, ModelOptions, derive_model
from support.models import config
from support.paths import MODEL_CONFIGS

PLAIN: dict[str, Any] = {
    "architectures": ["NewForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
}
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = [SLIDING, SLIDING, SLIDING, FULL]

GEMMA_3N = {
    "layer_types": WINDOWS,
    "sliding_window": 512,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 256,
}
LFM2 = {"layer_types": ["conv", "conv", FULL, "conv"], "conv_L_cache": 3, "block_dim": 2048, "conv_bias": False}
MIMO_V2 = {
    "v_head_dim": 64,
    "swa_head_dim": 192,
    "swa_num_key_value_heads": 8,
    "hybrid_layer_pattern": [0, 1, 1, 1],
    "sliding_window_size": 128,
}
QWEN3_NEXT = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536}
INDEXER = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}


def refusal(keys: dict[str, Any], like: str) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        derive_model(PLAIN | keys, ModelOptions(), like=like)
    return caught.value


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Gemma-3n as Llama": ("LlamaForCausalLM", GEMMA_3N, "layer_types"),
    "Gemma-3n as Gemma 3, which has its windows": ("Gemma3ForCausalLM", GEMMA_3N, "num_kv_shared_layers"),
    "LFM2 as Llama": ("LlamaForCausalLM", LFM2, "layer_types"),
    "LFM2 without kinds of layers": ("MistralForCausalLM", {"conv_L_cache": 3}, "conv_L_cache"),
    "MiMo-V2 as Gemma 2": ("Gemma2ForCausalLM", MIMO_V2 | {"sliding_window": 128}, "v_head_dim"),
    "windows with heads of their own": (
        "GptOssForCausalLM",
        {"sliding_window": 128, "swa_head_dim": 192},
        "swa_head_dim",
    ),
    "a pattern of layers": ("MistralForCausalLM", {"hybrid_layer_pattern": [0, 1, 1, 1]}, "hybrid_layer_pattern"),
    "Qwen3-Next as Qwen3": ("Qwen3ForCausalLM", QWEN3_NEXT, "full_attention_interval"),
    "states next to latent vectors": (
        "DeepseekV3ForCausalLM",
        LATENT | {"linear_attn_config": {"x": 1}},
        "linear_attn_config",
    ),
    "an indexer": ("DeepseekV3ForCausalLM", LATENT | INDEXER, "index_head_dim"),
    "latent vectors": ("LlamaForCausalLM", LATENT, "kv_lora_rank"),
    "a parallel Mamba": ("LlamaForCausalLM", {"mamba_d_ssm": 1024}, "mamba_d_ssm"),
    "a window": ("LlamaForCausalLM", {"sliding_window": 4096}, "sliding_window"),
    "chunks": ("MistralForCausalLM", {"attention_chunk_size": 8192, "sliding_window": None}, "attention_chunk_size"),
    "cross attention": ("LlamaForCausalLM", {"cross_attention_layers": [1, 3]}, "cross_attention_layers"),
    "an encoder": ("LlamaForCausalLM", {"is_encoder_decoder": True}, "is_encoder_decoder"),
    "shared layers": ("LlamaForCausalLM", {"use_cla": True, "cla_share_factor": 2}, "use_cla"),
    "other heads in some layers": ("LlamaForCausalLM", {"num_global_key_value_heads": 1}, "num_global_key_value_heads"),
    "heads under another name": ("LlamaForCausalLM", {"multi_query_group_num": 2}, "multi_query_group_num"),
    "states of MiniMax": ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0, 0, 1]}, "attn_type_list"),
    "nested heads": ("LlamaForCausalLM", {"per_layer_config": {"3": {"head_dim": 256}}}, "per_layer_config.3.head_dim"),
    "nested groups": ("LlamaForCausalLM", {"attn_config": {"kv_n_heads": 8}}, "attn_config.kv_n_heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_key_that_changes_the_cache_is_refused(case: str) -> None:
    like, keys, field = REFUSED[case]
    error = refusal(keys, like)
    assert (error.field, error.reason) == (field, "IGNORED_KEY")
    value: Any = keys
    for key in field.split("."):
        value = value[key]
    assert f"{field} = {str(value)[:64]}" in error.message
    assert like in error.message


def test_all_ignored_keys_are_named_with_their_values() -> None:
    error = refusal(MIMO_V2, "LlamaForCausalLM")
    assert all(f"{key} = {value}" in error.message for key, value in MIMO_V2.items())


def test_the_path_of_a_key_of_the_language_model_is_named() -> None:
    wrapped = {"architectures": ["NewForConditionalGeneration"], "text_config": PLAIN | {"num_kv_shared_layers": 2}}
    with pytest.raises(InvalidArgumentError) as caught:
        derive_model(wrapped, ModelOptions(), like="LlamaForCausalLM")
    assert caught.value.field == "text_config.num_kv_shared_layers"


@pytest.mark.parametrize(
    ("like", "keys"),
    [
        ("LlamaForCausalLM", {"num_kv_shared_layers": 0, "is_encoder_decoder": False, "attention_k_eq_v": False}),
        ("LlamaForCausalLM", {"layer_types": [FULL] * 4, "sliding_window": 4096}),
        ("LlamaForCausalLM", {"use_sliding_window": False, "sliding_window": 131_072, "max_window_layers": 28}),
        ("LlamaForCausalLM", {"v_head_dim": 128, "swa_num_key_value_heads": 4, "swa_head_dim": 128}),
        ("LlamaForCausalLM", {"hybrid_layer_pattern": [0] * 4, "attn_type_list": [1] * 4, "compress_ratios": [0] * 4}),
        ("LlamaForCausalLM", {"mlp_layer_types": ["dense", "sparse"] * 2, "moe_intermediate_size": 768, "n_group": 1}),
        (
            "LlamaForCausalLM",
            {"no_rope_layers": [1, 1, 1, 0], "attention_bias": True, "num_attention_heads_per_layer": [16] * 4},
        ),
        ("LlamaForCausalLM", {"rope_scaling": {"factor": 2.0, "type": "llama3"}, "vision_config": {"window_size": 8}}),
        ("LlamaForCausalLM", {"extra_config": {"head_dim": 128, "num_key_value_heads": 4, "note": "the same"}}),
        ("MistralForCausalLM", {"layer_types": WINDOWS, "sliding_window": 512, "sliding_window_pattern": 4}),
        ("Qwen3NextForCausalLM", QWEN3_NEXT | {"layer_types": ["linear_attention"] * 3 + [FULL]}),
        ("DeepseekV3ForCausalLM", LATENT),
        ("DeepseekV32ForCausalLM", LATENT | INDEXER),
    ],
)
def test_a_key_that_does_not_change_the_cache_is_ignored(like: str, keys: dict[str, Any]) -> None:
    model = derive_model(PLAIN | keys, ModelOptions(), like=like)
    assert model.layers
    if like == "LlamaForCausalLM":
        assert model.layers == derive_model(PLAIN, ModelOptions(), like=like).layers


@pytest.mark.parametrize("name", sorted(path.stem for path in MODEL_CONFIGS.glob("*.json")))
def test_an_architecture_is_like_itself(name: str) -> None:
    own = derive_model(config(name), ModelOptions())
    assert own.architecture in FAMILIES
    assert derive_model(config(name), ModelOptions(), like=own.architecture).layers == own.layers
