"""The architectures that are known, each with the rules by which its config is read.

What a config states in keys of its own needs no row here: a multimodal model is read by the `model_type` of its
language model. A row says what the name alone decides.
"""

from collections.abc import Mapping
from typing import Final

from kvpool.models import adapt, compressed, whisper
from kvpool.models.family import Family

PLAIN: Final = Family()
_QWEN: Final = Family(defaults={"use_sliding_window": False})
_GEMMA: Final = Family(defaults={"head_dim": 256})
_GEMMA2: Final = Family("SF", defaults={"head_dim": 256})
_GEMMA3: Final = Family("SSSSSF", defaults={"head_dim": 256}, length_counts_scaling=True)
_GEMMA3N: Final = Family("SSSSF", defaults={"head_dim": 256})
_GEMMA4: Final = Family(adapt=adapt.gemma4, defaults={"head_dim": 256, "global_head_dim": 512})
_COHERE2: Final = Family("SSSF", window_offset=1)
_EVERY_4TH: Final = Family("SSSF")
_FIRST_OF_4: Final = Family("FSSS")
_LATENT: Final = Family(is_latent=True)
_SPARSE: Final = Family(is_latent=True, has_indexer=True)
_DELTA_NET: Final = Family("LLLF")
_STATES: Final = Family("L", assumed_length=2048)
_LFM2: Final = Family(kinds_key="layer_types")
_NEMOTRON_H: Final = Family(
    kinds_key="hybrid_override_pattern",
    defaults={"mamba_ssm_cache_dtype": "float32"},
)
_MIMO_V2: Final = Family(has_value_heads=True, kinds_key="hybrid_layer_pattern", ignored=("attention_chunk_size",))
_LLAMA4: Final = Family(adapt=adapt.llama4)
_ZAMBA2: Final = Family(
    kinds_key="layers_block_type",
    adapt=adapt.zamba2,
    ignored=("kv_channels", "num_query_groups"),
)
_WHISPER: Final = Family(
    derive=whisper.whisper,
    count_key="decoder_layers",
    length_key="max_target_positions",
    encoder_length_key="max_source_positions",
)

_TABLE: Final[tuple[tuple[Family, Mapping[str, tuple[str, ...]]], ...]] = (
    (
        PLAIN,
        {
            "LlamaForCausalLM": ("llama",),
            "ApertusForCausalLM": ("apertus",),
            "ArceeForCausalLM": ("arcee",),
            "AriaForConditionalGeneration": ("aria", "aria_text"),
            "BailingMoeForCausalLM": ("bailing_moe",),
            "BailingMoeV2ForCausalLM": ("bailing_moe_v2",),
            "BloomForCausalLM": ("bloom",),
            "CohereForCausalLM": ("cohere",),
            "DeepseekForCausalLM": ("deepseek",),
            "Ernie4_5ForCausalLM": ("ernie4_5",),
            "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", "ernie4_5_vl_moe_text"),
            "ExaoneForCausalLM": ("exaone",),
            "FlexOlmoForCausalLM": ("flex_olmo",),
            "GlmForCausalLM": ("glm",),
            "Glm4ForCausalLM": ("glm4", "glm4v_text", "glm_ocr_text"),
            "Glm4MoeForCausalLM": ("glm4_moe", "glm4v_moe_text"),
            "GPT2LMHeadModel": ("gpt2",),
            "GPTJForCausalLM": ("gptj",),
            "GPTNeoXForCausalLM": ("gpt_neox",),
            "GraniteForCausalLM": ("granite",),
            "GraniteMoeForCausalLM": ("granitemoe",),
            "GraniteMoeSharedForCausalLM": ("granitemoeshared",),
            "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense",),
            "HunYuanMoEV1ForCausalLM": ("hunyuan_v1_moe",),
            "HYV3ForCausalLM": ("hy_v3",),
            "HyperCLOVAXForCausalLM": ("hyperclovax",),
            "InternLM2ForCausalLM": ("internlm2",),
            "InternLM3ForCausalLM": ("internlm3",),
            "IQuestCoderForCausalLM": ("iquestcoder",),
            "Jais2ForCausalLM": ("jais2",),
            "LLaMAForCausalLM": (),
            "MiMoForCausalLM": ("mimo",),
            "MiniCPMForCausalLM": ("minicpm",),
            "MiniCPMV": ("minicpmv",),
            "MiniMaxM2ForCausalLM": ("minimax_m2",),
            "Ministral3ForCausalLM": ("ministral3",),
            "MistralForCausalLM": ("mistral",),
            "Mistral3ForConditionalGeneration": ("mistral3",),
            "MixtralForCausalLM": ("mixtral",),
            "MolmoForCausalLM": ("molmo",),
            "NemotronForCausalLM": ("nemotron",),
            "OlmoForCausalLM": ("olmo",),
            "Olmo2ForCausalLM": ("olmo2",),
            "OlmoeForCausalLM": ("olmoe",),
            "OPTForCausalLM": ("opt",),
            "OrionForCausalLM": ("orion",),
            "PaddleOCRVLForConditionalGeneration": ("paddleocr_vl", "paddleocr_vl_text"),
            "PanguEmbeddedForCausalLM": ("pangu_embedded",),
            "Param2MoEForCausalLM": ("param2moe",),
            "PhiForCausalLM": ("phi",),
            "Phi3ForCausalLM": ("phi3",),
            "Phi3VForCausalLM": ("phi3_v",),
            "PhiMoEForCausalLM": ("phimoe",),
            "SarvamMoEForCausalLM": ("sarvam_moe",),
            "SeedOssForCausalLM": ("seed_oss",),
            "SmolLM3ForCausalLM": ("smollm3",),
            "SmolVLMForConditionalGeneration": ("smolvlm",),
            "SolarForCausalLM": ("solar",),
            "StableLmForCausalLM": ("stablelm",),
            "Starcoder2ForCausalLM": ("starcoder2",),
            "TeleChat2ForCausalLM": ("telechat2",),
            "TeleChat3ForCausalLM": ("telechat3",),
            "TeleFLMForCausalLM": ("teleflm",),
        },
    ),
    (
        _QWEN,
        {
            "Qwen2ForCausalLM": ("qwen2",),
            "Qwen2MoeForCausalLM": ("qwen2_moe",),
            "Qwen2VLForConditionalGeneration": ("qwen2_vl", "qwen2_vl_text"),
            "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "qwen2_5_vl_text"),
            "Qwen2_5OmniForConditionalGeneration": ("qwen2_5_omni", "qwen2_5_omni_text"),
            "Qwen3ForCausalLM": ("qwen3",),
            "Qwen3MoeForCausalLM": ("qwen3_moe",),
            "Qwen3VLForConditionalGeneration": ("qwen3_vl", "qwen3_vl_text"),
            "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "qwen3_vl_moe_text"),
            "Qwen3OmniMoeForConditionalGeneration": ("qwen3_omni_moe", "qwen3_omni_moe_text"),
        },
    ),
    (_GEMMA, {"GemmaForCausalLM": ("gemma",)}),
    (_GEMMA2, {"Gemma2ForCausalLM": ("gemma2",), "VaultGemmaForCausalLM": ("vaultgemma",)}),
    (_GEMMA3, {"Gemma3ForCausalLM": ("gemma3_text",), "Gemma3ForConditionalGeneration": ("gemma3",)}),
    (_GEMMA3N, {"Gemma3nForCausalLM": ("gemma3n_text",), "Gemma3nForConditionalGeneration": ("gemma3n",)}),
    (
        _GEMMA4,
        {
            "Gemma4ForCausalLM": ("gemma4_text",),
            "Gemma4ForConditionalGeneration": ("gemma4",),
            "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", "gemma4_unified_text"),
        },
    ),
    (Family("SF"), {"GptOssForCausalLM": ("gpt_oss",)}),
    (_COHERE2, {"Cohere2ForCausalLM": ("cohere2",), "Cohere2MoeForCausalLM": ("cohere2_moe",)}),
    (
        _EVERY_4TH,
        {
            "AfmoeForCausalLM": ("afmoe",),
            "Exaone4ForCausalLM": ("exaone4",),
            "ExaoneMoeForCausalLM": ("exaone_moe",),
            "ExaoneMoEForCausalLM": (),
            "Olmo3ForCausalLM": ("olmo3",),
        },
    ),
    (
        _FIRST_OF_4,
        {
            "CwmForCausalLM": ("cwm",),
            "GraniteSWAForCausalLM": ("granite_swa",),
            "GraniteMoeSWAForCausalLM": ("granitemoe_swa",),
        },
    ),
    (
        Family("F"),  # a window, only where layer_types says so
        {
            "LagunaForCausalLM": ("laguna",),
            "MellumForCausalLM": ("mellum",),
            "Step3p5ForCausalLM": ("step3p5",),
        },
    ),
    (_MIMO_V2, {"MiMoV2FlashForCausalLM": ("mimo_v2_flash",), "MiMoV2ForCausalLM": ("mimo_v2",)}),
    (_LLAMA4, {"Llama4ForCausalLM": ("llama4_text",), "Llama4ForConditionalGeneration": ("llama4",)}),
    (Family(adapt=adapt.falcon), {"FalconForCausalLM": ("falcon", "RefinedWeb", "RefinedWebModel")}),
    (Family(adapt=adapt.multi_query), {"GPTBigCodeForCausalLM": ("gpt_bigcode",)}),
    (Family(adapt=adapt.one_head), {"Step3TextForCausalLM": ("step3_text",)}),
    (Family(adapt=adapt.dbrx), {"DbrxForCausalLM": ("dbrx",)}),
    (Family(adapt=adapt.chatglm), {"ChatGLMModel": ("chatglm",), "ChatGLMForConditionalGeneration": ()}),
    (Family(adapt=adapt.expanded_latents), {"MiniCPM3ForCausalLM": ("minicpm3",)}),
    (Family(adapt=adapt.loops), {"IQuestLoopCoderForCausalLM": ("iquestloopcoder",)}),
    (Family(adapt=adapt.cycles), {"HrmTextForCausalLM": ("hrm_text",)}),
    (Family(adapt=adapt.blocks), {"DeciLMForCausalLM": ("nemotron-nas",)}),
    (
        _LATENT,
        {
            "DeepseekV2ForCausalLM": ("deepseek_v2",),
            "DeepseekV3ForCausalLM": ("deepseek_v3", "kimi_k2"),
            "AXK1ForCausalLM": ("axk1",),
            "Glm4MoeLiteForCausalLM": ("glm4_moe_lite",),
            "KimiK25ForConditionalGeneration": ("kimi_k25",),
            "MistralLarge3ForCausalLM": ("mistral_large_3",),
            "PanguUltraMoEForCausalLM": ("pangu_ultra_moe",),
            "SarvamMLAForCausalLM": ("sarvam_mla",),
        },
    ),
    (Family(is_latent=True, num_copies=2), {"LongcatFlashForCausalLM": ("longcat_flash",)}),
    (_SPARSE, {"DeepseekV32ForCausalLM": ("deepseek_v32",), "GlmMoeDsaForCausalLM": ("glm_moe_dsa",)}),
    (
        Family(derive=compressed.compressed_layers, count_key="num_hidden_layers", ignored=("layer_types",)),
        {"DeepseekV4ForCausalLM": ("deepseek_v4",), "DeepseekV4ForConditionalGeneration": ()},
    ),
    (Family(is_latent=True, adapt=adapt.kimi_linear), {"KimiLinearForCausalLM": ("kimi_linear",)}),
    (Family(is_latent=True, adapt=adapt.layer_groups), {"BailingMoeV2_5ForCausalLM": ("bailing_hybrid",)}),
    (Family(is_latent=True, adapt=adapt.layer_groups_and_rest), {"BailingMoeV3ForCausalLM": ("bailing_hybrid_v3",)}),
    (
        _STATES,
        {
            "MambaForCausalLM": ("mamba",),
            "Mamba2ForCausalLM": ("mamba2",),
            "FalconMambaForCausalLM": ("falcon_mamba",),
        },
    ),
    (Family(kinds_key="attn_layer_period"), {"JambaForCausalLM": ("jamba",)}),
    (Family(kinds_key="attn_layer_indices"), {"BambaForCausalLM": ("bamba",)}),
    (Family(kinds_key="layer_types"), {"GraniteMoeHybridForCausalLM": ("granitemoehybrid",)}),
    (_NEMOTRON_H, {"NemotronHForCausalLM": ("nemotron_h",), "NemotronHPuzzleForCausalLM": ("nemotron_h_puzzle",)}),
    (Family("B"), {"FalconH1ForCausalLM": ("falcon_h1",)}),
    (_ZAMBA2, {"Zamba2ForCausalLM": ("zamba2",)}),
    (_LFM2, {"Lfm2ForCausalLM": ("lfm2",), "Lfm2MoeForCausalLM": ("lfm2_moe",)}),
    (
        _DELTA_NET,
        {
            "Qwen3NextForCausalLM": ("qwen3_next",),
            "Qwen3_5ForCausalLM": ("qwen3_5_text",),
            "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text",),
            "Qwen3_5ForConditionalGeneration": ("qwen3_5",),
            "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe",),
        },
    ),
    (Family("LLLF", adapt=adapt.olmo_hybrid), {"OlmoHybridForCausalLM": ("olmo_hybrid",)}),
    (_WHISPER, {"WhisperForConditionalGeneration": ("whisper",)}),
)

FAMILIES: Final[Mapping[str, Family]] = {name: family for family, names in _TABLE for name in names}
"""By architecture."""
ARCHITECTURES: Final[Mapping[str, str]] = {
    model_type: name for _, names in _TABLE for name, model_types in names.items() for model_type in model_types
}
"""By `model_type`: the architecture, for configs that name none."""
