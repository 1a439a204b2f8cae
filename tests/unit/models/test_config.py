"""How configs are read, family by family."""

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import AttentionSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvpool.models.config import ModelOptions, derive_model
from kvpool.models.families import ARCHITECTURES, FAMILIES
from support.models import changed, config, derive, full_bytes_per_token, kinds, specs_of
from support.paths import MODEL_CONFIGS

NAMES = sorted(path.stem for path in MODEL_CONFIGS.glob("*.json"))


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


@pytest.mark.parametrize("section", ["text_config", "language_config", "llm_config"])
@pytest.mark.parametrize("named_by", ["architectures", "model_type"])
def test_an_unknown_wrapper_is_read_by_its_language_model(section: str, named_by: str) -> None:
    inner = config("llama-3.1-8b")
    del inner["architectures" if named_by == "model_type" else "model_type"]
    wrapper: dict[str, object] = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    model = derive_model(wrapper | {section: inner}, ModelOptions())
    assert model.layers == derive("llama-3.1-8b").layers
    assert (model.architecture, model.model_type) == ("LlavaForConditionalGeneration", "llava")


def test_an_unknown_architecture_is_read_as_a_known_one_on_request() -> None:
    data = changed("llama-3.1-8b", architectures=["NobodyForCausalLM"], model_type="nobody")
    model = derive_model(data, ModelOptions(), like="LlamaForCausalLM")
    assert model.layers == derive("llama-3.1-8b").layers
    assert (model.architecture, model.model_type) == ("NobodyForCausalLM", "nobody")
    assert model.notes == ("the config is read as that of LlamaForCausalLM, as requested",)
    nameless = changed("llama-3.1-8b", architectures=..., model_type=...)
    assert derive_model(nameless, ModelOptions(), like="LlamaForCausalLM").architecture == "LlamaForCausalLM"


def test_llama() -> None:
    model = derive("llama-3.1-8b")
    assert (model.architecture, model.model_type, model.max_model_len) == ("LlamaForCausalLM", "llama", 131_072)
    assert model.layers[31] == ("model.layers.31.self_attn.attn", FullAttentionSpec(16, 8, 128, "bfloat16"))
    assert model.layer_indices == tuple(range(32))
    assert model.notes == ()


def test_llama_without_kv_heads_has_one_for_each_head() -> None:
    model = derive_model(changed("llama-2-7b", num_key_value_heads=None), ModelOptions())
    assert model.layers == derive("llama-2-7b").layers


def test_the_class_of_a_config_defines_heads_that_it_leaves_out() -> None:
    model = derive_model(changed("mistral-7b-v0.1", num_key_value_heads=...), ModelOptions())
    assert model.layers == derive("mistral-7b-v0.1").layers
    (note,) = model.notes
    assert note == "the config leaves out what its class in transformers defines: num_key_value_heads = 8"
    nulled = derive_model(changed("mistral-7b-v0.1", num_key_value_heads=None), ModelOptions())
    assert specs_of(nulled, SlidingWindowSpec)[0] == SlidingWindowSpec(16, 32, 128, "bfloat16", sliding_window=4096)


def test_a_window_of_no_tokens_is_none() -> None:
    model = derive_model(changed("mistral-7b-v0.1", sliding_window=0), ModelOptions())
    assert kinds(model) == {"FullAttentionSpec": 32}


def test_head_dim_goes_before_hidden_size() -> None:
    assert specs_of(derive("qwen3-8b"), FullAttentionSpec)[0] == FullAttentionSpec(16, 8, 128, "bfloat16")
    assert specs_of(derive("mistral-small-3.1-24b"), FullAttentionSpec)[0] == FullAttentionSpec(16, 8, 128, "bfloat16")


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_kv_heads_are_divided_and_then_replicated(ranks: int, heads: int) -> None:
    model = derive("llama-3.1-8b", ModelOptions(tensor_parallel_size=ranks))
    assert specs_of(model, FullAttentionSpec) == [FullAttentionSpec(16, heads, 128, "bfloat16")] * 32


@pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    [
        ("", "bfloat16"),
        ("auto", "bfloat16"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("float16", "float16"),
    ],
)
def test_kv_dtype(kv_dtype: str, dtype: str) -> None:
    spec = specs_of(derive("llama-3.1-8b", ModelOptions(kv_dtype=kv_dtype)), FullAttentionSpec)[0]
    assert isinstance(spec, AttentionSpec)
    assert spec.dtype == dtype


def test_block_size_and_max_model_len_are_as_requested() -> None:
    model = derive("llama-3.1-8b", ModelOptions(block_size=64, max_model_len=1000))
    assert model.max_model_len == 1000
    assert {spec.block_size for _, spec in model.layers} == {64}


@pytest.mark.parametrize(("key", "dtype"), [("dtype", "float16"), ("torch_dtype", "torch.float16")])
def test_the_models_dtype_may_be_spelled_in_two_ways(key: str, dtype: str) -> None:
    data = changed("llama-3.1-8b", torch_dtype=...) | {key: dtype}
    assert derive_model(data, ModelOptions()).layers[0][1] == FullAttentionSpec(16, 8, 128, "float16")


def test_float32_and_no_dtype_are_noted() -> None:
    assert derive("gemma-2-9b").notes == ("torch_dtype is float32; bfloat16 is assumed",)
    (note,) = derive("gpt-oss-20b").notes
    assert "no torch_dtype" in note


def test_qwen_uses_its_window_only_if_enabled() -> None:
    used = {"use_sliding_window": True, "sliding_window": 4096}
    model = derive_model(changed("qwen2.5-7b", max_window_layers=20, **used), ModelOptions())
    assert [isinstance(spec, SlidingWindowSpec) for _, spec in model.layers] == [False] * 20 + [True] * 8
    types = ["full_attention", "sliding_attention"] * 14
    model = derive_model(changed("qwen2.5-7b", layer_types=types, **used), ModelOptions())
    assert [isinstance(spec, SlidingWindowSpec) for _, spec in model.layers] == [False, True] * 14
    model = derive_model(changed("qwen2.5-7b", layer_types=types), ModelOptions())
    assert kinds(model) == {"FullAttentionSpec": 28}


def test_phi_has_its_window_on_all_layers_or_on_none() -> None:
    windowed = SlidingWindowSpec(16, 32, 96, "bfloat16", sliding_window=2047)
    assert [spec for _, spec in derive("phi-3-mini-4k").layers] == [windowed] * 32
    assert [spec for _, spec in derive("phi-4").layers] == [FullAttentionSpec(16, 10, 128, "bfloat16")] * 40


@pytest.mark.parametrize(
    ("name", "layers", "heads"), [("glm-4-9b-0414", 40, 2), ("glm-4.5-air", 46, 8), ("minimax-m2", 62, 8)]
)
def test_glm_4_and_minimax_m2_attend_fully(name: str, layers: int, heads: int) -> None:
    assert [spec for _, spec in derive(name).layers] == [FullAttentionSpec(16, heads, 128, "bfloat16")] * layers


@pytest.mark.parametrize(("name", "layers"), [("glm-4.7-flash", 47), ("kimi-k2.5", 61)])
def test_glm_4_7_flash_and_kimi_keep_latent_vectors(name: str, layers: int) -> None:
    specs = [spec for _, spec in derive(name).layers]
    assert specs == [MLAAttentionSpec(16, head_size=576, dtype="bfloat16")] * layers


def test_kimi_states_its_extended_length() -> None:
    model = derive("kimi-k2.5")
    assert (model.max_model_len, model.notes) == (262_144, ())


def test_gemma_3_has_defaults_for_omitted_keys() -> None:
    model = derive("gemma-3-4b-it")
    assert model.max_model_len == 131_072
    assert specs_of(model, FullAttentionSpec)[0] == FullAttentionSpec(16, 4, 256, "bfloat16")
    bare: dict[str, object] = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16"}
    model = derive_model(bare | {"text_config": {"model_type": "gemma3_text"}}, ModelOptions())
    assert kinds(model) == {"SlidingWindowSpec": 22, "FullAttentionSpec": 4}
    assert specs_of(model, SlidingWindowSpec)[0] == SlidingWindowSpec(16, 4, 256, "bfloat16", sliding_window=4096)


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_gemma_3_may_state_its_pattern(key: str) -> None:
    section = {"model_type": "gemma3_text", key: 2}
    data: dict[str, object] = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": section}
    assert kinds(derive_model(data, ModelOptions())) == {"SlidingWindowSpec": 13, "FullAttentionSpec": 13}


def test_gemma_1_and_alternation_without_layer_types() -> None:
    data = changed("gemma-2-9b", architectures=["GemmaForCausalLM"], head_dim=..., sliding_window=...)
    assert derive_model(data, ModelOptions()).layers[0][1] == FullAttentionSpec(16, 8, 256, "bfloat16")
    data = changed("gpt-oss-20b", layer_types=...)
    assert derive_model(data, ModelOptions()).layers == derive("gpt-oss-20b").layers


def test_llama_4_attends_fully_on_layers_without_rotary_embedding() -> None:
    specs = [spec for _, spec in derive("llama-4-scout").layers]
    chunked = ChunkedLocalAttentionSpec(16, 8, 128, "bfloat16", attention_chunk_size=8192)
    assert specs == [chunked, chunked, chunked, FullAttentionSpec(16, 8, 128, "bfloat16")] * 12
    data = config("llama-4-scout")
    section = data["text_config"]
    assert isinstance(section, dict)
    section["no_rope_layers"] = [0] + [1] * 47
    assert kinds(derive_model(data, ModelOptions())) == {"FullAttentionSpec": 1, "ChunkedLocalAttentionSpec": 47}
    section["attention_chunk_size"] = None
    assert kinds(derive_model(data, ModelOptions())) == {"FullAttentionSpec": 48}


def test_latent_vectors_are_whole_on_every_rank() -> None:
    model = derive("deepseek-v3", ModelOptions(tensor_parallel_size=8))
    assert model.layers == derive("deepseek-v3").layers


def test_deepseek_in_the_layouts_of_flash_mla() -> None:
    model = derive("deepseek-v3", ModelOptions(block_size=64, kv_dtype="fp8_ds_mla"))
    spec = MLAAttentionSpec(64, head_size=576, dtype="uint8", cache_dtype_str="fp8_ds_mla")
    assert model.layers[0][1] == spec
    assert spec.page_size_bytes == 64 * 656
    packed = derive("deepseek-v3", ModelOptions(block_size=64, kv_dtype="nvfp4_ds_mla"))
    assert {spec.page_size_bytes for _, spec in packed.layers} == {64 * 352}
    plain = derive("deepseek-v3", ModelOptions(kv_dtype="fp8"))
    assert plain.layers[0][1] == MLAAttentionSpec(16, head_size=576, dtype="float8_e4m3fn")


def test_deepseek_v3_2_has_an_indexer_beside_each_layer() -> None:
    model = derive("deepseek-v3.2", ModelOptions(kv_dtype="fp8"))
    assert [name for name, _ in model.layers[:2]] == [
        "model.layers.0.self_attn.attn",
        "model.layers.0.self_attn.indexer.k_cache",
    ]
    assert model.layers[0][1] == MLAAttentionSpec(16, head_size=576, dtype="uint8", cache_dtype_str="fp8_ds_mla")
    assert model.layers[1][1] == MLAAttentionSpec(16, head_size=132, dtype="uint8")
    assert any("fp8_ds_mla" in note for note in model.notes)


def test_whisper() -> None:
    model = derive("whisper-large-v3", ModelOptions(tensor_parallel_size=4))
    layers = dict(model.layers)
    assert model.max_model_len == 448
    assert layers["model.encoder.layers.31.self_attn.attn"] == EncoderOnlyAttentionSpec(16, 5, 64, "float16")
    assert layers["model.decoder.layers.31.self_attn.attn"] == FullAttentionSpec(16, 5, 64, "float16")
    assert layers["model.decoder.layers.31.encoder_attn.attn"] == CrossAttentionSpec(16, 5, 64, "float16")
    assert model.max_encoder_tokens == 1500


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "fp8"},
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
    ],
)
def test_a_checkpoint_may_quantize_its_cache(quantization: dict[str, object]) -> None:
    data = changed("llama-3.1-8b", quantization_config=quantization)
    model = derive_model(data, ModelOptions())
    assert specs_of(model, FullAttentionSpec) == [FullAttentionSpec(16, 8, 128, "float8_e4m3fn")] * 32
    assert any("fp8" in note for note in model.notes)
    plain = derive_model(data, ModelOptions(kv_dtype="bfloat16"))
    assert specs_of(plain, FullAttentionSpec) == [FullAttentionSpec(16, 8, 128, "bfloat16")] * 32


@pytest.mark.parametrize("path", [("compression_config",), ("text_config", "quantization_config")])
def test_a_quantized_cache_is_found_in_every_known_key(path: tuple[str, ...]) -> None:
    data: dict[str, object] = config("gemma-3-27b-it")
    section = data
    for key in path[:-1]:
        section = section[key]  # type: ignore[assignment]
    section[path[-1]] = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    model = derive_model(data, ModelOptions())
    assert {spec.dtype for _, spec in model.layers if isinstance(spec, AttentionSpec)} == {"float8_e4m3fn"}
    assert any(note.startswith(".".join(path)) for note in model.notes)


def test_llama_4_may_state_its_interval() -> None:
    data = config("llama-4-scout")
    text = data["text_config"]
    assert isinstance(text, dict)
    text |= {"no_rope_layers": [], "no_rope_layer_interval": 2}
    assert kinds(derive_model(data, ModelOptions())) == {"ChunkedLocalAttentionSpec": 24, "FullAttentionSpec": 24}


def test_scaling_by_kind_of_layer_is_that_of_all() -> None:
    scaling = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "linear", "factor": 8.0}}
    model = derive_model(changed("llama-3.1-8b", rope_scaling=None, rope_parameters=scaling), ModelOptions())
    assert model.max_model_len == 8 * 131_072
    assert any("rope_parameters.full_attention.factor extends" in note for note in model.notes)


def test_longrope_leaves_the_original_length() -> None:
    scaling = {"rope_type": "longrope", "factor": 32.0}
    data = changed("llama-3.1-8b", rope_scaling=scaling, original_max_position_embeddings=4096)
    assert derive_model(data, ModelOptions()).max_model_len == 4096
    assert derive_model(data, ModelOptions(max_model_len=8192)).max_model_len == 8192


def test_an_unknown_quantization_is_noted() -> None:
    scheme = {"quant_method": "x", "kv_cache_scheme": {"num_bits": 4, "type": "int"}}
    model = derive_model(changed("llama-3.1-8b", quantization_config=scheme), ModelOptions())
    assert kinds(model) == {"FullAttentionSpec": 32}
    assert any("unknown" in note for note in model.notes)
    assert (
        derive_model(changed("llama-3.1-8b", quantization_config={"quant_method": "awq"}), ModelOptions()).notes == ()
    )


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"type": "linear", "factor": 4.0}, 4 * 131_072),
        ({"rope_type": "dynamic", "factor": 2}, 2 * 131_072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 131_072),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131_072),
        ({"rope_type": "longrope", "factor": 8.0}, 131_072),
        ({}, 131_072),
    ],
)
def test_rotary_scaling_extends_the_length(scaling: dict[str, object], length: int) -> None:
    model = derive_model(changed("llama-3.1-8b", rope_scaling=scaling), ModelOptions())
    assert model.max_model_len == length
    assert bool(model.notes) == (length != 131_072)


def test_gemma_3_counts_its_scaling_already() -> None:
    assert derive("gemma-3-27b-it").max_model_len == 131_072


@pytest.mark.parametrize("factor", ["4", True, -1.0, float("nan"), 1e12])
def test_a_malformed_factor_is_named(factor: object) -> None:
    scaling = {"type": "linear", "factor": factor}
    with pytest.raises(InvalidArgumentError) as caught:
        derive_model(changed("llama-3.1-8b", rope_scaling=scaling), ModelOptions())
    assert caught.value.field == "rope_scaling.factor"


def test_a_length_beyond_the_configs_is_noted() -> None:
    (note,) = derive("llama-3.1-8b", ModelOptions(max_model_len=200_000)).notes
    assert "more than the 131072 tokens" in note


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("llama-3.1-8b", ModelOptions(mamba_caching=True), "mamba_caching has no effect"),
        ("llama-3.1-8b", ModelOptions(num_speculative_tokens=2), "num_speculative_tokens has no effect"),
        ("mamba-codestral-7b", ModelOptions(kv_dtype="fp8"), "kv_dtype has no effect"),
        ("mamba-codestral-7b", ModelOptions(block_size=32), "block_size has no effect"),
        (
            "gemma-3-27b-it",
            ModelOptions(tensor_parallel_size=32, decode_context_parallel_size=2),
            "SlidingWindowSpec is not supported by vLLM",
        ),
    ],
)
def test_options_without_effect_are_noted(name: str, options: ModelOptions, words: str) -> None:
    assert any(words in note for note in derive(name, options).notes)


@pytest.mark.parametrize(
    ("spelling", "dtype"), [("half", "float16"), ("torch.float16", "float16"), ("auto", "bfloat16")]
)
def test_spellings_of_the_models_type(spelling: str, dtype: str) -> None:
    model = derive_model(changed("llama-3.1-8b", torch_dtype=spelling), ModelOptions())
    assert {spec.dtype for spec in specs_of(model, FullAttentionSpec) if isinstance(spec, FullAttentionSpec)} == {dtype}


@pytest.mark.parametrize("spelling", ["FP8", "fp8_e4m3", "torch.float8_e4m3fn"])
def test_spellings_of_the_caches_type(spelling: str) -> None:
    model = derive("llama-3.1-8b", ModelOptions(kv_dtype=spelling))
    assert specs_of(model, FullAttentionSpec)[0] == FullAttentionSpec(16, 8, 128, "float8_e4m3fn")


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "slots", "content_bytes"),
    [
        ("int4_per_token_head", "uint8", 0, 128 + 8),
        ("int8_per_token_head", "int8", 0, 256 + 8),
        ("fp8_per_token_head", "uint8", 0, 256 + 8),
        ("nvfp4", "uint8", 16, 64 + 8),
        ("nvfp4_4over6", "uint8", 16, 64 + 8),
    ],
)
def test_packed_types_of_all_layers(kv_dtype: str, dtype: str, slots: int, content_bytes: int) -> None:
    model = derive("llama-3.1-8b", ModelOptions(kv_dtype=kv_dtype))
    packed = FullAttentionSpec(16, 8, 128, dtype, num_head_slots=slots, state_content_bytes=content_bytes)
    assert [spec for _, spec in model.layers] == [packed] * 32
    assert any(note.startswith(f"kv_dtype {kv_dtype}: ") for note in model.notes)


@pytest.mark.parametrize(
    ("kv_dtype", "content_bytes", "block_size"),
    [
        ("turboquant_k8v4", 128 + 64 + 4, 48),
        ("turboquant_4bit_nc", 64 + 2 + 64 + 4, 64),
        ("turboquant_k3v4_nc", 48 + 2 + 64 + 4, 80),
        ("turboquant_3bit_nc", 48 + 2 + 48 + 4, 96),
        ("ultraquant_4bit", 128 + 8, 64),
    ],
)
def test_packed_types_of_all_but_the_first_and_last_layers(kv_dtype: str, content_bytes: int, block_size: int) -> None:
    model = derive("llama-3.1-8b", ModelOptions(kv_dtype=kv_dtype))
    ends = FullAttentionSpec(block_size, 8, 128, "bfloat16")
    packed = FullAttentionSpec(block_size, 8, 128, "uint8", state_content_bytes=content_bytes)
    assert [spec for _, spec in model.layers] == [ends] * 2 + [packed] * 28 + [ends] * 2
    large = derive("llama-3.1-8b", ModelOptions(kv_dtype=kv_dtype, block_size=128))
    assert {spec.block_size for _, spec in large.layers} == {128}


def test_a_hybrid_packs_all_attention_layers() -> None:
    model = derive("qwen3-next-80b-a3b", ModelOptions(kv_dtype="turboquant_k8v4"))
    specs = [spec for spec in specs_of(model, FullAttentionSpec) if isinstance(spec, FullAttentionSpec)]
    assert {spec.state_content_bytes for spec in specs} == {256 + 128 + 4}


@pytest.mark.parametrize(("kv_dtype", "content_bytes"), [("int4_per_token_head", 288 + 8), ("fp8_per_token_head", 584)])
def test_packed_latent_vectors(kv_dtype: str, content_bytes: int) -> None:
    model = derive("deepseek-v3", ModelOptions(kv_dtype=kv_dtype))
    spec = MLAAttentionSpec(16, head_size=576, dtype="uint8", state_content_bytes=content_bytes)
    assert model.layers[0][1] == spec


def test_the_packed_layout_is_of_one_size_only() -> None:
    with pytest.raises(InvalidArgumentError, match=r"\(512, 64\) elements, not \(256, 64\)") as caught:
        derive_model(changed("deepseek-v3", kv_lora_rank=256), ModelOptions(kv_dtype="fp8_ds_mla"))
    assert caught.value.field == "kv_dtype"


@pytest.mark.parametrize("name", ["llama-3.1-8b", "whisper-large-v3"])
def test_context_parallelism_needs_ranks_with_the_same_heads(name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        derive(name, ModelOptions(tensor_parallel_size=2, decode_context_parallel_size=2))
    assert caught.value.field == "decode_context_parallel_size"
