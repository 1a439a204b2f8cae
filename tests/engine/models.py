"""Models so small that a CPU runs them: no more than a config.json; drawn_weights.py draws their weights.

`LLAMA` has one group of full attention, and so has `MIXTRAL`, with experts. `GEMMA` has five of a sliding window and
one of full attention. `GEMMA4` has the same kinds, and heads twice as large in full attention: vLLM gives its windows
blocks of twice the tokens. Its last two layers have no cache and read those of earlier ones. `LLAMA4` has three groups
of chunks and one of full attention.
`LFM2` has three groups of short convolutions, `QWEN3_NEXT` three of gated delta networks, which need bfloat16 on a CPU;
vLLM keeps the states of both in blocks as it does those of Mamba. Both have one group of full attention, too.

vLLM 0.32.0 on a CPU computes none of Mamba's own layers with prefix caching. Mamba's, also Jamba's, need the
operator selective_scan_fwd, which its build for CPUs has not. Mamba2's, also Granite's and Falcon-H1's, fail where a
state is kept in the middle of a prefill. The delta networks of Olmo need a newer Triton.
"""

import json
from collections.abc import Mapping
from pathlib import Path

VOCABULARY = 512
WINDOW_TOKENS = 64

_COMMON = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA: Mapping[str, object] = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
MIXTRAL: Mapping[str, object] = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GEMMA: Mapping[str, object] = _COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA4: Mapping[str, object] = _COMMON | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": False,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}
LLAMA4: Mapping[str, object] = _COMMON | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "head_dim": 64,
    "intermediate_size_mlp": 256,
    "moe_layers": [],
    "interleave_moe_layer_step": 0,
    "num_local_experts": 2,
    "attention_chunk_size": WINDOW_TOKENS,
    "no_rope_layers": [1, 1, 1, 0],
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}
LFM2: Mapping[str, object] = _COMMON | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_dim": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_use_xavier_init": True,
    "block_dim": 256,
    "block_ff_dim": 256,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
QWEN3_NEXT: Mapping[str, object] = _COMMON | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def write_model(config: Mapping[str, object], folder: Path) -> None:
    """Writes a folder that vLLM takes for a model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
