"""Weights of the models in models.py: with vLLM's dummy weights, most tokens would not depend on what is cached."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def draw_weights(weights: Iterable[torch.Tensor]) -> None:
    """Draws weights that make each token depend on all before it: norms become 1, matrices keep sizes."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in weights:
            if weight.dim() == 1:
                weight.fill_(1)
            else:
                drawn = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
                weight.copy_(drawn.normal_(0, weight[0].numel() ** -0.5, generator=draw))


def write_weights(folder: Path) -> None:
    """Puts weights beside the config.json of a model, for engines that tests cannot give a loader."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    draw_weights(model.parameters())
    model.save_pretrained(folder)
