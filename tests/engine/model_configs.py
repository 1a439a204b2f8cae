"""Configs of many architectures: what config classes of transformers make of their defaults, and of public sizes.

Classes that transformers does not have stand for a config of the usual keys, in `MADE`.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_SMALL: Final[Mapping[str, object]] = {"num_hidden_layers": 6, "vocab_size": 512}
"""For models that compute numbers from tensors as they are built, which need memory: see `ON_CPU`."""
_MOE: Final[Mapping[str, object]] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}

CLASSES: Final[Mapping[str, tuple[str, Mapping[str, object]]]] = {
    "AfmoeForCausalLM": ("afmoe", {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}),
    "ApertusForCausalLM": (
        "apertus",
        {**_SMALL, "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8},
    ),
    "ArceeForCausalLM": ("arcee", {"num_key_value_heads": 4}),
    "AXK1ForCausalLM": ("axk1", {}),
    "BambaForCausalLM": ("bamba", {"attn_layer_indices": [9, 18, 27]}),
    "BloomForCausalLM": ("bloom", {**_SMALL, "n_layer": 6, "hidden_size": 512, "n_head": 8, "seq_length": 2048}),
    "CohereForCausalLM": ("cohere", {}),
    "Cohere2ForCausalLM": ("cohere2", {"num_key_value_heads": 8}),
    "Cohere2MoeForCausalLM": ("cohere2_moe", {}),
    "CwmForCausalLM": ("cwm", {}),
    "DeepseekV2ForCausalLM": ("deepseek_v2", {}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", {}),
    "DeepseekV32ForCausalLM": ("deepseek_v32", {}),
    "Ernie4_5ForCausalLM": ("ernie4_5", {}),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", {}),
    "Exaone4ForCausalLM": ("exaone4", {"num_key_value_heads": 8}),
    "ExaoneMoeForCausalLM": ("exaone_moe", {}),
    "FalconForCausalLM": ("falcon", {}),
    "FalconH1ForCausalLM": ("falcon_h1", {}),
    "FalconMambaForCausalLM": ("falcon_mamba", {}),
    "FlexOlmoForCausalLM": ("flex_olmo", {}),
    "GemmaForCausalLM": ("gemma", {}),
    "Gemma2ForCausalLM": ("gemma2", {}),
    "Gemma3ForCausalLM": ("gemma3_text", {}),
    "Gemma3nForCausalLM": ("gemma3n_text", {}),
    "Gemma4ForCausalLM": ("gemma4_text", {"num_kv_shared_layers": 10}),
    "GlmForCausalLM": ("glm", {}),
    "Glm4ForCausalLM": ("glm4", {}),
    "Glm4MoeForCausalLM": ("glm4_moe", {"head_dim": 128}),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", {"first_k_dense_replace": 1}),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", {}),
    "GPT2LMHeadModel": ("gpt2", {}),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", {}),
    "GPTJForCausalLM": ("gptj", {}),
    "GPTNeoXForCausalLM": ("gpt_neox", {}),
    "GptOssForCausalLM": ("gpt_oss", {}),
    "GraniteForCausalLM": ("granite", {"num_key_value_heads": 8}),
    "GraniteMoeForCausalLM": ("granitemoe", {}),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", {"layer_types": [_LINEAR] * 5 + [_FULL] + [_LINEAR] * 26}),
    "GraniteMoeSharedForCausalLM": ("granitemoeshared", {}),
    "GraniteMoeSWAForCausalLM": ("granitemoe_swa", {}),
    "GraniteSWAForCausalLM": ("granite_swa", {}),
    "HrmTextForCausalLM": ("hrm_text", {}),
    "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense", {"head_dim": 128}),
    "HyperCLOVAXForCausalLM": ("hyperclovax", {}),
    "HYV3ForCausalLM": ("hy_v3", {"first_k_dense_replace": 1, "expert_hidden_dim": 1536, "route_norm": True}),
    "Jais2ForCausalLM": ("jais2", {}),
    "JambaForCausalLM": ("jamba", {}),
    "KimiLinearForCausalLM": (
        "kimi_linear",
        {
            "linear_attn_config": {
                "full_attn_layers": [i for i in range(1, 28) if i % 4 == 0] + [27],
                "kda_layers": [i for i in range(1, 27) if i % 4],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
            "num_hidden_layers": 27,
        },
    ),
    "LagunaForCausalLM": ("laguna", {"layer_types": [_FULL, _SLIDING, _SLIDING, _SLIDING] * 10, "sliding_window": 512}),
    "Lfm2ForCausalLM": (
        "lfm2",
        {
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "block_dim": 2048,
            "block_ff_dim": 12_288,
            "conv_dim": 2048,
            "conv_dim_out": 2048,
        },
    ),
    "Lfm2MoeForCausalLM": ("lfm2_moe", {"layer_types": (["conv", "conv", _FULL] * 11)[:32]}),
    "LlamaForCausalLM": ("llama", {"num_key_value_heads": 8}),
    "Llama4ForCausalLM": ("llama4_text", {}),
    "LongcatFlashForCausalLM": (
        "longcat_flash",
        {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity", "moe_topk": 12},
    ),
    "MambaForCausalLM": ("mamba", {}),
    "Mamba2ForCausalLM": ("mamba2", {}),
    "MellumForCausalLM": ("mellum", {"layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL] * 7, "sliding_window": 1024}),
    "MiMoV2FlashForCausalLM": (
        "mimo_v2_flash",
        {
            "num_hidden_layers": 48,
            "hybrid_layer_pattern": [0, *([1, 1, 1, 1, 0, 1] * 8)[:46], 0],
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 8,
            "swa_head_dim": 192,
            "swa_v_head_dim": 128,
            "sliding_window": 128,
            "sliding_window_size": 128,
            "attention_chunk_size": 128,
            "moe_layer_freq": [0] + [1] * 47,
            "layernorm_epsilon": 1e-5,
        },
    ),
    "MiniCPM3ForCausalLM": ("minicpm3", {}),
    "MiniMaxM2ForCausalLM": ("minimax_m2", {"rotary_dim": 64, "scoring_func": "sigmoid"}),
    "Ministral3ForCausalLM": ("ministral3", {}),
    "MistralForCausalLM": ("mistral", {}),
    "MixtralForCausalLM": ("mixtral", {}),
    "NemotronForCausalLM": ("nemotron", {"num_key_value_heads": 8}),
    "NemotronHForCausalLM": (
        "nemotron_h",
        {"layer_types": [_LINEAR, "mlp", _LINEAR, "mlp", _LINEAR, "mlp", _FULL] * 4},
    ),
    "OlmoForCausalLM": ("olmo", {}),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "Olmo3ForCausalLM": ("olmo3", {}),
    "OlmoeForCausalLM": ("olmoe", {}),
    "OlmoHybridForCausalLM": ("olmo_hybrid", {}),
    "OPTForCausalLM": ("opt", {}),
    "PhiForCausalLM": ("phi", {}),
    "Phi3ForCausalLM": ("phi3", {"sliding_window": 2047}),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", {}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {}),
    "Qwen3NextForCausalLM": ("qwen3_next", {}),
    "SeedOssForCausalLM": ("seed_oss", {}),
    "SmolLM3ForCausalLM": ("smollm3", {}),
    "StableLmForCausalLM": ("stablelm", {}),
    "Starcoder2ForCausalLM": ("starcoder2", {"sliding_window": 4096}),
    "VaultGemmaForCausalLM": ("vaultgemma", {}),
    "Zamba2ForCausalLM": ("zamba2", {}),
    "AriaForConditionalGeneration": ("aria", {}),
    "AudioFlamingo3ForConditionalGeneration": ("audioflamingo3", {}),
    "Blip2ForConditionalGeneration": ("blip-2", {}),
    "GlmAsrForConditionalGeneration": ("glmasr", {}),
    "GraniteSpeechForConditionalGeneration": ("granite_speech", {}),
    "Idefics3ForConditionalGeneration": ("idefics3", {}),
    "PaddleOCRVLForConditionalGeneration": ("paddleocr_vl", {}),
    "PaliGemmaForConditionalGeneration": ("paligemma", {}),
    "Qwen2AudioForConditionalGeneration": ("qwen2_audio", {}),
    "SmolVLMForConditionalGeneration": ("smolvlm", {}),
    "WhisperForConditionalGeneration": ("whisper", {}),
}
"""By architecture: model type, and what differs from the defaults of its class."""

_COMMON: Final[Mapping[str, object]] = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_BAILING: Final[Mapping[str, object]] = {
    **_MOE,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "use_bias": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "norm_head": False,
}
_LATENT: Final[Mapping[str, object]] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_STEP_MOE: Final[Mapping[str, object]] = {
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "norm_expert_weight": False,
}
_GEMMA4: Final[Mapping[str, object]] = {
    **dict.fromkeys(("rope_theta", "rope_parameters")),
    "hidden_size": 2560,
    "hidden_size_per_layer_input": 0,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": False,
    "num_attention_heads": 8,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 512,
    "sliding_window": 512,
}
_DEEPSEEK_V4: Final[Mapping[str, object]] = {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160_000,
    "rope_parameters": None,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65_536},
    "max_position_embeddings": 1_048_576,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
}
MADE: Final[Mapping[str, tuple[str, Mapping[str, object]]]] = {
    "BailingMoeForCausalLM": ("bailing_moe", {**_BAILING, "head_dim": 128}),
    "BailingMoeV2ForCausalLM": ("bailing_moe_v2", {**_BAILING, "head_dim": 128}),
    "BailingMoeV2_5ForCausalLM": (
        "bailing_hybrid",
        {
            **_BAILING,
            **_LATENT,
            "layer_group_size": 8,
            "head_dim": 128,
            "num_key_value_heads": 32,
            "group_norm_size": 4,
            "linear_silu": False,
        },
    ),
    "ChatGLMModel": (
        "chatglm",
        {
            **dict.fromkeys(("num_hidden_layers", "num_key_value_heads", "max_position_embeddings")),
            "num_layers": 28,
            "original_rope": True,
            "padded_vocab_size": 65_024,
            "seq_length": 32_768,
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "ffn_hidden_size": 13_696,
            "layernorm_epsilon": 1e-5,
            "rmsnorm": True,
            "add_qkv_bias": True,
        },
    ),
    "DbrxForCausalLM": (
        "dbrx",
        {
            **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")),
            "max_position_embeddings": None,
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "max_seq_len": 32_768,
            "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500_000},
            "ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4},
        },
    ),
    "DeepseekV4ForCausalLM of Flash": ("deepseek_v4", _DEEPSEEK_V4),
    "DeepseekV4ForCausalLM of Pro": (
        "deepseek_v4",
        {
            **_DEEPSEEK_V4,
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "o_groups": 16,
            "q_lora_rank": 1536,
            "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
        },
    ),
    "Gemma4ForCausalLM of 12B": (
        "gemma4_unified_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
        },
    ),
    "Gemma4ForCausalLM of 31B": (
        "gemma4_text",
        {
            **_GEMMA4,
            "hidden_size": 5376,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "max_position_embeddings": 262_144,
        },
    ),
    "Gemma4ForCausalLM of 26B-A4B": (
        "gemma4_text",
        {
            **_GEMMA4,
            "hidden_size": 2816,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 704,
        },
    ),
    "Gemma4ForCausalLM of E2B": (
        "gemma4_text",
        {
            **_GEMMA4,
            "hidden_size": 1536,
            "hidden_size_per_layer_input": 256,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "layer_types": [_SLIDING, _SLIDING, _SLIDING, _SLIDING, _FULL] * 7,
            "use_double_wide_mlp": True,
        },
    ),
    "Gemma4ForCausalLM of E4B": (
        "gemma4_text",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 256,
            "num_hidden_layers": 42,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
        },
    ),
    "Gemma4ForCausalLM with two-sided windows": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 8,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "layer_types": [_SLIDING] * 8,
            "use_bidirectional_attention": "all",
        },
    ),
    "DeciLMForCausalLM": (
        "nemotron-nas",
        {
            "num_hidden_layers": 4,
            "block_configs": [
                {"attention": {"no_op": False, "n_heads_in_group": 8}, "ffn": {"no_op": False, "ffn_mult": 2.6}},
                {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"no_op": False, "ffn_mult": 1.3}},
                {"attention": {"no_op": False, "n_heads_in_group": 16}, "ffn": {"no_op": True, "ffn_mult": None}},
                {"attention": {"no_op": False, "n_heads_in_group": 8}, "ffn": {"no_op": False, "ffn_mult": 2.6}},
            ],
        },
    ),
    "DeepseekForCausalLM": (
        "deepseek",
        {
            "num_key_value_heads": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
        },
    ),
    "ExaoneForCausalLM": (
        "exaone",
        {"num_layers": 32, "activation_function": "silu", "layer_norm_epsilon": 1e-5, "head_dim": 128},
    ),
    "InternLM2ForCausalLM": ("internlm2", {"bias": False}),
    "InternLM3ForCausalLM": ("internlm3", {"bias": False, "qkv_bias": False, "head_dim": 128}),
    "IQuestLoopCoderForCausalLM": ("iquestloopcoder", {"loop_num": 2, "loop_window_size": 64}),
    "MiMoForCausalLM": ("mimo", {"head_dim": 128, "attention_bias": True}),
    "MiniCPMForCausalLM": (
        "minicpm",
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "num_experts": 0},
    ),
    "OrionForCausalLM": ("orion", {"num_key_value_heads": 32}),
    "PanguEmbeddedForCausalLM": ("pangu_embedded", {"bias": True}),
    "Param2MoEForCausalLM": (
        "param2moe",
        {**_MOE, "head_dim": 128, "num_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "PhiMoEForCausalLM": (
        "phimoe",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8192, "attention_bias": True},
    ),
    "SarvamMoEForCausalLM": ("sarvam_moe", {**_BAILING, "head_dim": 128}),
    "SolarForCausalLM": (
        "solar",
        {"bskcn_1": [12, 20], "bskcn_2": [14, 22], "bskcn_3": [16], "bskcn_4": [18], "bskcn_tv": [0.9, 0.8]},
    ),
    "Step3p5ForCausalLM": (
        "step3p5",
        {
            "att_impl_type": "GQA",
            "num_hidden_layers": 8,
            "num_key_value_heads": None,
            "max_seq_len": 8192,
            "num_attention_groups": 8,
            "head_dim": 128,
            "layer_types": [_FULL, _SLIDING, _SLIDING, _SLIDING] * 2,
            "sliding_window": 512,
            "attention_other_setting": {
                "attention_type": _SLIDING,
                "num_attention_heads": 96,
                "num_attention_groups": 8,
                "head_dim": 128,
            },
            "moe_layers_enum": "7",
            **_STEP_MOE,
            "partial_rotary_factors": [],
            "use_rope_layers": [],
            "yarn_only_types": [],
        },
    ),
    "Step3TextForCausalLM": (
        "step3_text",
        {"head_dim": 256, "num_attention_groups": 1, "share_q_dim": 2048, "moe_layers_enum": "31", **_STEP_MOE},
    ),
    "TeleChat2ForCausalLM": (
        "telechat2",
        {"num_hidden_layers": None, "n_layer": 30, "n_head": 32, "layer_norm_epsilon": 1e-5, "ffn_hidden_size": 12_288},
    ),
    "TeleFLMForCausalLM": (
        "teleflm",
        {"use_mup": False, "mup_scale_factor": 1.0, "output_mult": 1.0, "input_mult": 1.0},
    ),
}
"""The same for classes that transformers does not have: what differs from `_COMMON`."""
ON_CPU: Final = ("ApertusForCausalLM", "BloomForCausalLM")
"""Architectures that cannot be built on the meta device, with sizes small enough for memory."""


ON_RANKS: Final[Mapping[str, tuple[int, ...]]] = {
    "DeepseekV4ForCausalLM of Flash": (8,),
    "DeepseekV4ForCausalLM of Pro": (16,),
    "FalconH1ForCausalLM": (4,),
    "Gemma4ForCausalLM": (2,),
    "Gemma4ForCausalLM of 31B": (8,),
    "Gemma4ForCausalLM of 26B-A4B": (2, 8),
    "Gemma4ForCausalLM of E2B": (2,),
    "Lfm2ForCausalLM": (2,),
    "LlamaForCausalLM": (16,),
    "LongcatFlashForCausalLM": (8,),
    "Mamba2ForCausalLM": (8,),
    "MiMoV2FlashForCausalLM": (4,),
    "NemotronHForCausalLM": (8,),
    "Qwen3NextForCausalLM": (4,),
    "Zamba2ForCausalLM": (2,),
}
"""Architectures that are also planned for one of several tensor-parallel ranks."""
_RANKS: Final = " on a rank of "


def cases() -> tuple[str, ...]:
    """Returns what is compared: the architectures that have a config here, and those on one of several ranks."""
    return (*CLASSES, *MADE, *(f"{name}{_RANKS}{n}" for name, counts in ON_RANKS.items() for n in counts))


def parts(case: str) -> tuple[str, int]:
    """Returns the config's name, which begins with its architecture, and the number of ranks of a case."""
    name, _, count = case.partition(_RANKS)
    return name, int(count or 1)


def source(architecture: str) -> str:
    """Returns from what the config of an architecture is made."""
    return "defaults of its class" if architecture in CLASSES else "usual keys"


def config_of(architecture: str) -> dict[str, Any]:
    """Makes a config.json."""
    if architecture in CLASSES:
        model_type, changes = CLASSES[architecture]
        made: dict[str, Any] = json.loads(CONFIG_MAPPING[model_type](**changes).to_json_string(use_diff=False))
        made |= {key: value for key, value in changes.items() if key not in made}
    else:
        model_type, changes = MADE[architecture]
        made = {**_COMMON, "model_type": model_type, **changes}
    left_out = ("transformers_version", "id2label", "label2id", "_name_or_path", "torch_dtype")
    stated = {
        key: value
        for key, value in made.items()
        if key not in left_out and not (value is None and architecture in MADE)
    }
    return {**stated, "architectures": [architecture.partition(" ")[0]], "dtype": "bfloat16"}


def register_made_types() -> None:
    """Has transformers read configs of `MADE` with a class that takes any key."""
    for model_type, _ in MADE.values():
        if model_type not in CONFIG_MAPPING:
            AutoConfig.register(model_type, type("Made", (PretrainedConfig,), {"model_type": model_type}))
