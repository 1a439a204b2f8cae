"""Keys that change the cache, and that the rules of the architecture do not read, are refused by name.

What the keys themselves say is read whatever the architecture is.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, SlidingWindowSpec
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
FULL_LAYER = FullAttentionSpec(16, 4, 128, "bfloat16")
WINDOW = SlidingWindowSpec(16, 4, 128, "bfloat16", sliding_window=512)
SHORT = MambaSpec(32_768, ((2, 2048),), ("bfloat16",), 16 * 2048, "short_conv")
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536}
INDEXER = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}


def refusal(keys: dict[str, Any], like: str) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        derive_model(PLAIN | keys, ModelOptions(), like=like)
    return caught.value


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "LFM2 without kinds of layers": ("MistralForCausalLM", {"conv_L_cache": 3}, "conv_L_cache"),
    "MiMo-V2 as Gemma 2": ("Gemma2ForCausalLM", MIMO_V2 | {"sliding_window": 128}, "v_head_dim"),
    "windows whose size differs": ("LlamaForCausalLM", {"rswa_window": 128}, "rswa_window"),
    "a pattern of layers": ("MistralForCausalLM", {"attn_layers_pattern": "FSSS"}, "attn_layers_pattern"),
    "states without a list of kinds": ("Qwen3ForCausalLM", {"linear_num_key_heads": 16}, "linear_num_key_heads"),
    "states next to latent vectors": (
        "DeepseekV3ForCausalLM",
        LATENT | {"linear_attn_config": {"x": 1}},
        "linear_attn_config",
    ),
    "an indexer": ("DeepseekV3ForCausalLM", LATENT | INDEXER, "index_head_dim"),
    "latent vectors": ("LlamaForCausalLM", LATENT, "kv_lora_rank"),
    "a parallel Mamba": ("LlamaForCausalLM", {"mamba_d_ssm": 1024}, "mamba_d_ssm"),
    "chunks": ("MistralForCausalLM", {"attention_chunk_size": 8192, "sliding_window": None}, "attention_chunk_size"),
    "cross attention": ("LlamaForCausalLM", {"cross_attention_layers": [1, 3]}, "cross_attention_layers"),
    "an encoder": ("LlamaForCausalLM", {"is_encoder_decoder": True}, "is_encoder_decoder"),
    "shared layers": ("LlamaForCausalLM", {"use_cla": True, "cla_share_factor": 2}, "use_cla"),
    "other heads in some layers": ("LlamaForCausalLM", {"num_local_key_value_heads": 1}, "num_local_key_value_heads"),
    "heads under another name": ("LlamaForCausalLM", {"multi_query_group_num": 2}, "multi_query_group_num"),
    "states of MiniMax": ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0, 0, 1]}, "attn_type_list"),
    "nested heads": ("LlamaForCausalLM", {"own_config": {"3": {"head_dim": 256}}}, "own_config.3.head_dim"),
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
    error = refusal(LATENT | INDEXER, "LlamaForCausalLM")
    named = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, **INDEXER}  # the sizes of heads are those of head_dim
    assert all(f"{key} = {value}" in error.message for key, value in named.items())


@pytest.mark.parametrize("case", REFUSED)
def test_a_known_architecture_refuses_the_key_without_like(case: str) -> None:
    like, keys, field = REFUSED[case]
    with pytest.raises(InvalidArgumentError) as caught:
        derive_model(PLAIN | keys | {"architectures": [like]}, ModelOptions())
    assert (caught.value.field, caught.value.reason) == (field, "IGNORED_KEY")


READ: dict[str, tuple[str, dict[str, Any], Sequence[KVCacheSpec]]] = {
    "Gemma-3n as Llama": ("LlamaForCausalLM", GEMMA_3N, [WINDOW, WINDOW]),
    "a pattern of windows": ("LlamaForCausalLM", GEMMA_3N | {"num_kv_shared_layers": 0}, [WINDOW] * 3 + [FULL_LAYER]),
    "a window in all layers": ("LlamaForCausalLM", {"sliding_window": 512}, [WINDOW] * 4),
    "LFM2 as Llama": ("LlamaForCausalLM", LFM2, [SHORT, SHORT, FULL_LAYER, SHORT]),
    "MiMo-V2": (
        "MiMoV2ForCausalLM",
        MIMO_V2,
        [replace(FULL_LAYER, head_size_v=64), *[SlidingWindowSpec(16, 8, 192, "bfloat16", 64, sliding_window=128)] * 3],
    ),
    "heads of windows": (
        "GptOssForCausalLM",
        {"sliding_window": 512, "swa_head_dim": 192},
        [replace(WINDOW, head_size=192), FULL_LAYER] * 2,
    ),
    "heads of full attention": (
        "LlamaForCausalLM",
        {"num_global_key_value_heads": 1},
        [replace(FULL_LAYER, num_kv_heads=1)] * 4,
    ),
    "heads of one layer": (
        "LlamaForCausalLM",
        {"per_layer_config": {"03": {"head_dim": 256}}},
        [FULL_LAYER] * 3 + [replace(FULL_LAYER, head_size=256)],
    ),
}


@pytest.mark.parametrize("case", READ)
def test_what_the_keys_say_is_read_whatever_the_architecture_is(case: str) -> None:
    like, keys, specs = READ[case]
    assert [spec for _, spec in derive_model(PLAIN | keys, ModelOptions(), like=like).layers] == list(specs)


def test_a_model_of_the_latent_family_may_have_heads() -> None:
    keys = {"use_mla": False, "qk_rope_head_dim": 0, "v_head_dim": 128}
    model = derive_model(PLAIN | keys, ModelOptions(), like="DeepseekV2ForCausalLM")
    assert [spec for _, spec in model.layers] == [FULL_LAYER] * 4


def test_latents_of_several_layers_and_shared_indexers() -> None:
    keys = PLAIN | LATENT | INDEXER | {"indexer_types": ["full", "shared", "full", "shared"]}
    model = derive_model(keys, ModelOptions(), like="GlmMoeDsaForCausalLM")
    assert [name.rpartition(".self_attn.")[2] for name, _ in model.layers] == [
        "attn", "indexer.k_cache", "attn", "attn", "indexer.k_cache", "attn"
    ]  # fmt: skip
    pattern = PLAIN | LATENT | INDEXER | {"index_topk_pattern": "FSFS"}
    assert derive_model(pattern, ModelOptions(), like="GlmMoeDsaForCausalLM").layers == model.layers
    every = PLAIN | LATENT | INDEXER | {"index_topk_freq": 2, "index_skip_topk_offset": 1}
    assert derive_model(every, ModelOptions(), like="GlmMoeDsaForCausalLM").layers == model.layers
    twice = derive_model(PLAIN | LATENT, ModelOptions(), like="LongcatFlashForCausalLM")
    assert (len(twice.layers), twice.num_hidden_layers, twice.layer_indices[:4]) == (8, 4, (0, 0, 1, 1))


def test_the_path_of_a_key_of_the_language_model_is_named() -> None:
    wrapped = {"architectures": ["NewForConditionalGeneration"], "text_config": PLAIN | {"cla_share_factor": 2}}
    with pytest.raises(InvalidArgumentError) as caught:
        derive_model(wrapped, ModelOptions(), like="LlamaForCausalLM")
    assert caught.value.field == "text_config.cla_share_factor"


@pytest.mark.parametrize(
    ("like", "keys"),
    [
        ("LlamaForCausalLM", {"num_kv_shared_layers": 0, "is_encoder_decoder": False, "attention_k_eq_v": False}),
        ("LlamaForCausalLM", {"layer_types": [FULL] * 4, "sliding_window": 4096}),
        ("LlamaForCausalLM", {"use_cla": False, "cla_share_factor": 2, "full_attn_mod": 1}),
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
