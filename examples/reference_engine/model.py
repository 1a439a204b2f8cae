"""A rank's part of the reference model, with its cache in the pool's blocks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from examples.reference_engine.collectives import Collectives
from examples.reference_engine.config import LayerKind, ReferenceConfig
from examples.reference_engine.functional import rms_norm
from examples.reference_engine.layers import Attention, LatentAttention, PagedLayer, StateSpace
from examples.reference_engine.paged import ReferenceBackend
from examples.reference_engine.weights import Placement, embedding_weights, layer_weights, tensor_share
from kvpool.core.specs.base import KVCacheSpec
from kvpool.gpu_worker.attention_metadata import CommonAttentionMetadata
from kvpool.gpu_worker.layouts import default_layout


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The tokens of one step, request by request.

    Attributes:
        token_ids: int64 (num_tokens,).
        positions: int64 (num_tokens,), position of each token in its request.
        metadata: Attention metadata of each layer.
        logits_indices: int64 (num_logits,), indices of the tokens whose next token is sampled.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: Mapping[str, CommonAttentionMetadata]
    logits_indices: torch.Tensor


class ReferenceModel:
    """The layers of one stage, with the heads of one tensor-parallel rank.

    Attributes:
        layers: The layers with a cache, by name, in order.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        device: torch.device,
        collectives: Collectives,
        placement: Placement = Placement(),  # noqa: B008 - frozen
        layout: str = "flash_attn",
    ) -> None:
        """Generates the weights.

        Args:
            config: The model.
            device: Device of the computation.
            collectives: Communication with the other ranks.
            placement: The part of the model on this rank.
            layout: Name of the layout of attention layers.

        Raises:
            InvalidArgumentError: The ranks cannot divide the heads, or the layout is not for keys and values.
        """
        config.check_tp_size(placement.tp_size)
        self._config = config
        self._placement = placement
        self._collectives = collectives
        self._layout = layout
        self._ends = embedding_weights(config, device)
        self.layers: dict[str, PagedLayer] = {}
        self._mlps: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index in placement.layers(config.num_layers):
            weights = tensor_share(layer_weights(config, index, device), placement)
            self._mlps.append((weights["up"], weights["down"]))
            kind = config.layer_kinds[index]
            self.layers[config.layer_name(index)] = (
                StateSpace(config, weights)
                if kind is LayerKind.MAMBA
                else LatentAttention(config, weights)
                if kind is LayerKind.MLA
                else Attention(config, index, weights, layout)
            )

    @property
    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Spec of each layer of this rank."""
        specs = self._config.kv_cache_specs(self._placement.tp_size)
        return {name: specs[name] for name in self.layers}

    @property
    def backends(self) -> dict[str, ReferenceBackend]:
        """The backend of each layer, which specifies its layout."""
        return {
            name: ReferenceBackend(self._layout if isinstance(self.layers[name], Attention) else default_layout(spec))
            for name, spec in self.kv_cache_specs.items()
        }

    @property
    def layouts(self) -> dict[str, str]:
        """Layout name of each layer."""
        return {name: backend.layout for name, backend in self.backends.items()}

    @torch.inference_mode()
    def forward_paged(self, batch: PagedBatch) -> torch.Tensor | None:
        """Computes the tokens of a step. Reads earlier tokens of the requests from blocks and writes new ones there.

        Returns:
            Logits (num_logits, vocab_size) on the last stage; None on others.
        """
        if self._placement.is_first_stage:
            hidden = self._ends["embed"][batch.token_ids]
        else:
            shape = (len(batch.token_ids), self._config.hidden_size)
            hidden = self._collectives.recv(shape, self._ends["embed"])
        for (name, layer), (up, down) in zip(self.layers.items(), self._mlps, strict=True):
            mixed = layer.forward(rms_norm(hidden), batch.positions, batch.metadata[name])
            hidden = hidden + self._collectives.all_reduce(mixed)
            inner = functional.silu(functional.linear(rms_norm(hidden), up))
            hidden = hidden + self._collectives.all_reduce(functional.linear(inner, down))
        if not self._placement.is_last_stage:
            self._collectives.send(hidden)
            return None
        return functional.linear(rms_norm(hidden[batch.logits_indices]), self._ends["head"])
