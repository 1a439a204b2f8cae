"""Weights of the reference model, generated from a seed. They are equal on all ranks and machines.

Each rank cuts out its part. The numbers are uniform, because those are integers scaled by a power of two, which every
CPU generates equally.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch

from examples.reference_engine.config import LayerKind, ReferenceConfig
from kvpool.core.errors import check_range
from kvpool.gpu_worker.layouts import torch_dtype

Weights = dict[str, torch.Tensor]
"""Matrices (outputs, inputs) and vectors, by name in their layer."""

_GAIN: Final = 2.0
"""Above 1, so that attention is sharp enough for distant tokens to change the greedy token."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The part of the model on a rank: rank = pp_rank * tp_size + tp_rank.

    Attributes:
        tp_rank: Index of the share of the heads, [0, tp_size).
        tp_size: Number of ranks that share the heads of a layer.
        pp_rank: Index of the stage, [0, pp_size).
        pp_size: Number of stages of consecutive layers.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        check_range("tp_rank", self.tp_rank, 0, self.tp_size - 1)
        check_range("pp_rank", self.pp_rank, 0, self.pp_size - 1)

    @classmethod
    def of_rank(cls, rank: int, tp_size: int, pp_size: int) -> "Placement":
        """The placement of one of tp_size * pp_size ranks."""
        return cls(rank % tp_size, tp_size, rank // tp_size, pp_size)

    @property
    def is_first_stage(self) -> bool:
        """Whether the rank embeds the tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank computes the logits."""
        return self.pp_rank == self.pp_size - 1

    def layers(self, num_layers: int) -> range:
        """Indices of the layers of this stage."""
        return range(num_layers * self.pp_rank // self.pp_size, num_layers * (self.pp_rank + 1) // self.pp_size)


def embedding_weights(config: ReferenceConfig, device: torch.device) -> Weights:
    """Embedding and head, each (vocab_size, hidden_size); equal on all ranks."""
    generator = _WeightGenerator(config, config.num_layers, device)
    return {
        "embed": generator.matrix(config.vocab_size, config.hidden_size, gain=math.sqrt(config.hidden_size)),
        "head": generator.matrix(config.vocab_size, config.hidden_size),
    }


def layer_weights(config: ReferenceConfig, index: int, device: torch.device) -> Weights:
    """Weights of one layer of the whole model."""
    generator = _WeightGenerator(config, index, device)
    hidden, heads = config.hidden_size, config.num_heads
    kind = config.layer_kinds[index]
    weights: Weights = {}
    if kind is LayerKind.MAMBA:
        inner, state = config.mamba_inner_size, config.mamba_state_size
        weights["in_x"], weights["in_z"] = generator.matrix(inner, hidden), generator.matrix(inner, hidden)
        weights["in_dt"] = generator.matrix(inner, hidden)
        weights["in_b"], weights["in_c"] = generator.matrix(state, hidden), generator.matrix(state, hidden)
        weights["conv"] = generator.matrix(inner, config.mamba_conv_kernel)
        weights["decay"] = (
            generator.vector(inner).abs() / 4
        )  # slow enough for states to keep information over several blocks
        weights["skip"] = generator.vector(inner)
        weights["o"] = generator.matrix(hidden, inner)
    elif kind is LayerKind.MLA:
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        weights["q"] = generator.matrix(heads * (config.head_size + rope), hidden)
        weights["kv_down"], weights["k_rope"] = generator.matrix(rank, hidden), generator.matrix(rope, hidden)
        weights["k_up"] = generator.matrix(heads * config.head_size, rank)
        weights["v_up"] = generator.matrix(heads * config.head_size, rank)
        weights["o"] = generator.matrix(hidden, heads * config.head_size)
    else:
        weights["q"] = generator.matrix(heads * config.head_size, hidden)
        weights["k"] = generator.matrix(config.num_kv_heads * config.head_size, hidden)
        weights["v"] = generator.matrix(config.num_kv_heads * config.head_size, hidden)
        weights["o"] = generator.matrix(hidden, heads * config.head_size)
    weights["up"], weights["down"] = (
        generator.matrix(config.intermediate_size, hidden),
        generator.matrix(hidden, config.intermediate_size),
    )
    return weights


_WHOLE: Final = frozenset(("kv_down", "k_rope", "in_b", "in_c"))
"""Weights that every tensor-parallel rank has completely: latent vectors have one head; all channels share B and C."""
_BY_INPUTS: Final = frozenset(("o", "down"))
"""Weights cut by inputs, so that outputs are summed over the ranks; all others are cut by outputs."""


def tensor_share(weights: Weights, placement: Placement) -> Weights:
    """Cuts out a tensor-parallel rank's part of one layer: whole heads and channels, in order."""
    share = {}
    for name, weight in weights.items():
        dim = 1 if name in _BY_INPUTS else 0
        cut = weight if name in _WHOLE else weight.chunk(placement.tp_size, dim)[placement.tp_rank]
        share[name] = cut.contiguous()
    return share


class _WeightGenerator:
    """Generates the weights of one layer on CPU, always in the same order."""

    def __init__(self, config: ReferenceConfig, index: int, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(config.seed * 1_000_003 + index)
        self._dtype = torch_dtype(f"model.layers.{index}", config.dtype)
        self._device = device

    def matrix(self, outputs: int, inputs: int, gain: float = _GAIN) -> torch.Tensor:
        bound = gain * math.sqrt(3 / inputs)
        return self._uniform(outputs, inputs) * bound

    def vector(self, size: int) -> torch.Tensor:
        return self._uniform(size)

    def _uniform(self, *shape: int) -> torch.Tensor:
        uniform = torch.rand(shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return uniform.to(self._device, self._dtype)
