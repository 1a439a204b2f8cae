"""Layers of models that vLLM cannot build without a GPU, by the formulas of its layers."""

from typing import Any

import pytest

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, MLAAttentionSpec
from kvpool.models.config import Model, ModelOptions, derive_model

COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 2304,
    "num_hidden_layers": 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
KDA = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}


def model_of(architecture: str, keys: dict[str, Any], options: ModelOptions | None = None) -> Model:
    return derive_model({"architectures": [architecture], **COMMON, **keys}, options or ModelOptions())


def kinds_of(model: Model) -> str:
    letters: dict[type[KVCacheSpec], str] = {MambaSpec: "L", MLAAttentionSpec: "F", FullAttentionSpec: "F"}
    return "".join(letters[type(spec)] for _, spec in model.layers)


def test_kimi_linear_numbers_its_layers_from_one() -> None:
    listed = {**KDA, "full_attn_layers": [4, 8, 10], "kda_layers": [1, 2, 3, 5, 6, 7, 9]}
    model = model_of("KimiLinearForCausalLM", {**LATENT, "linear_attn_config": listed})
    assert kinds_of(model) == "LLLFLLLFLF"
    state, latent = model.layers[0][1], model.layers[3][1]
    assert isinstance(state, MambaSpec)
    assert (state.shapes, state.dtypes) == (((3, 3 * 32 * 128), (32, 128, 128)), ("bfloat16", "float32"))
    content = 3 * 3 * 32 * 128 * 2 + 32 * 128 * 128 * 4
    block_size = -(-content // (576 * 2 * 128)) * 128
    assert latent == MLAAttentionSpec(block_size, head_size=576, dtype="bfloat16")
    assert state.page_size_bytes == latent.page_size_bytes
    with pytest.raises(InvalidArgumentError, match=r"11 is not in \[1, 10\]") as caught:
        model_of("KimiLinearForCausalLM", {**LATENT, "linear_attn_config": {**listed, "full_attn_layers": [11]}})
    assert caught.value.field == "linear_attn_config.full_attn_layers"


def test_bailing_attends_at_the_end_of_each_group() -> None:
    keys = {**LATENT, "layer_group_size": 4, "head_dim": 128}
    model = model_of("BailingMoeV2_5ForCausalLM", keys, ModelOptions(tensor_parallel_size=4))
    assert kinds_of(model) == "LLLFLLLFLL"
    state = model.layers[0][1]
    assert isinstance(state, MambaSpec)
    assert (state.shapes, state.dtypes) == (((8, 128, 128),), ("bfloat16",))


def test_bailing_3_attends_after_the_last_whole_group() -> None:
    keys = {**LATENT, "layer_group_size": 4, "head_dim": 128, "short_conv_kernel_size": 4}
    model = model_of("BailingMoeV3ForCausalLM", keys)
    assert kinds_of(model) == "LLLFLLLFFF"
    state = model.layers[0][1]
    assert isinstance(state, MambaSpec)
    assert state.shapes == ((3, 3 * 32 * 128), (32, 128, 128))


def test_nemotron_nas_has_heads_of_its_own_in_each_layer_or_none() -> None:
    attention: list[dict[str, Any]] = [
        {"no_op": False, "n_heads_in_group": 8},
        {"no_op": True, "n_heads_in_group": None},
        {"no_op": False, "n_heads_in_group": 16},
    ]
    blocks = [{"attention": each, "ffn": {"no_op": False}} for each in attention]
    model = model_of("DeciLMForCausalLM", {"num_hidden_layers": 3, "block_configs": blocks})
    assert [spec for _, spec in model.layers] == [FullAttentionSpec(16, count, 72, "bfloat16") for count in (4, 2)]
    assert (model.layer_indices, model.num_hidden_layers) == ((0, 2), 3)
    with pytest.raises(InvalidArgumentError) as caught:
        model_of("DeciLMForCausalLM", {"num_hidden_layers": 3, "block_configs": [*blocks[:2], {"attention": {}}]})
    assert caught.value.field == "block_configs[2].attention.n_heads_in_group"
