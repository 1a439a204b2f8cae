"""A loader that draws the weights of an engine, in place of a checkpoint's. vLLM knows it once this is imported."""

from typing import Final

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from engine.drawn_weights import draw_weights

NAME: Final = "drawn"


@register_model_loader(NAME)
class DrawnWeights(BaseModelLoader):  # type: ignore[misc] # untyped where vLLM is not installed
    """Draws weights."""

    def download_model(self, model_config: object) -> None:
        """There is nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:  # noqa: ARG002 - vLLM's signature
        """See `draw_weights`."""
        draw_weights(model.parameters())
