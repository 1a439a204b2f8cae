"""What vLLM declares and plans for the configs of `model_configs`: one JSON object per line, as soon as it is known.

python -m engine.plans_program OUTPUT [CASE...]
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.environment import VLLM_ENVIRONMENT

os.environ.update(VLLM_ENVIRONMENT, VLLM_LOGGING_LEVEL="ERROR")

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models import registry
from vllm.triton_utils import triton
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, get_max_concurrency_for_kv_cache_config

from engine.model_configs import ON_CPU, cases, config_of, parts, register_made_types, source
from kvpool.client.vllm import model_layers
from kvpool.client.vllm.pool_config import spec_of
from kvpool.client.vllm.versions import VERSION
from support.plans import MEMORY_BYTES, described


def answer(case: str) -> dict[str, Any]:
    """Returns the config of a case, and vLLM's plan or why there is none."""
    architecture, ranks = parts(case)
    config = config_of(architecture)
    known = {"case": case, "source": source(architecture), "config": config, "ranks": ranks, "vllm": VERSION}
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            return {**known, **_plan(folder, ranks, on_cpu=architecture in ON_CPU)}
        except Exception as error:  # noqa: BLE001 - what vLLM's models raise is the answer
            last = [line for line in str(error).splitlines() if line.strip()] or [""]
            return {**known, "error": f"{type(error).__name__}: {last[0][:160]}"}


def _plan(folder: str, ranks: int, *, on_cpu: bool) -> dict[str, Any]:
    arguments = {"dtype": "bfloat16", "enable_prefix_caching": False, "tensor_parallel_size": ranks}
    device = torch.device
    torch.cpu._is_amx_tile_supported = lambda: False  # else plans depend on the machine
    if on_cpu:
        torch.device = lambda *_: device("cpu")  # type: ignore[assignment,misc]
    try:
        built = model_layers.build(folder, arguments)
    finally:
        torch.device = device  # type: ignore[misc]
    theirs = model_layers.specs(built)
    # The engine chooses it, from what the backends can read: those of DeepSeek-V4 read pages that lie side by side.
    built.cache_config.kv_cache_layout = _layout(built)
    [plan] = get_kv_cache_configs(built, [dict(theirs)], [MEMORY_BYTES])
    return {
        "max_model_len": built.model_config.max_model_len,
        "max_in_flight_tokens": built.max_in_flight_tokens,
        "max_encoder_tokens": built.scheduler_config.max_num_encoder_input_tokens,
        "backend": "CPU_MLA" if built.model_config.use_mla else "CPU_ATTN",
        "layers": described(map(spec_of, theirs.values())),
        "num_blocks": plan.num_blocks,
        "groups": sorted([len(group.layer_names), group.kv_cache_spec.block_size] for group in plan.kv_cache_groups),
        "concurrency": round(get_max_concurrency_for_kv_cache_config(built, plan), 2),
    }


def _layout(built: Any) -> str:
    layers = get_layers_from_vllm_config(built, AttentionLayerBase)
    layouts = get_supported_kv_cache_layouts({layer.get_attn_backend() for layer in layers.values()})
    return "BLHNC" if all(layout.is_block_outermost for layout in layouts) else "LBNHC"


if __name__ == "__main__":
    triton.set_allocator = lambda *_: None  # no kernel runs here
    # With these instructions, vLLM keeps states in float32: the answers would depend on the machine.
    torch.cpu._is_avx512_bf16_supported = lambda: False
    registry._run_in_subprocess = lambda function: function()  # a process for each model takes minutes
    register_made_types()
    with Path(sys.argv[1]).open("a") as output:
        for name in sys.argv[2:] or cases():
            output.write(json.dumps(answer(name)) + "\n")
            output.flush()
