"""Weights of the models in models.py: with vLLM's dummy weights, most tokens would not depend on what is cached."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM


def draw_weights(weights: Iterable[torch.Tensor], seed: int = 1) -> None:
    """Draws weights that make each token depend on all before it: norms become 1, matrices keep sizes."""
    draws: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for weight in weights:
            if weight.dim() == 1:
                weight.fill_(1)
            else:
                draw = draws.setdefault(weight.device, torch.Generator(weight.device).manual_seed(seed))
                drawn = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
                weight.copy_(drawn.normal_(0, weight[0].numel() ** -0.5, generator=draw))


def load_other_weights(model: torch.nn.Module) -> None:
    """Draws others for an engine that runs."""
    draw_weights(model.parameters(), seed=2)


def write_weights(folder: Path, seed: int = 1) -> None:
    """Puts weights beside the config.json of a model, for engines that tests cannot give a loader."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    draw_weights(model.parameters(), seed)
    model.save_pretrained(folder)


def write_adapter(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """Writes a LoRA of a model, strong enough to change most tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    hidden, rank = config["hidden_size"], 8
    sizes = {"q_proj": hidden, "v_proj": hidden // config["num_attention_heads"] * config["num_key_value_heads"]}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden, generator=draw) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, rank, generator=draw) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described | {"task_type": "CAUSAL_LM"}))
