"""The reference model without cache, ranks or blocks, against which the paged model is checked.

It shares the weights and the per-token arithmetic with `model`, but no code by which tokens affect each other:
attention is one masked matrix over all tokens, MLA expands latent vectors to keys and values, and states are scanned
from the first token.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from examples.reference_engine.config import LayerKind, ReferenceConfig
from examples.reference_engine.functional import heads, rms_norm, rotary
from examples.reference_engine.weights import Weights, embedding_weights, layer_weights
from kvpool.gpu_worker.layouts import torch_dtype


class DenseModel:
    """The whole model on one device."""

    def __init__(self, config: ReferenceConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._ends = embedding_weights(config, device)
        self._layers = [layer_weights(config, i, device) for i in range(config.num_layers)]

    @torch.inference_mode()
    def forward_dense(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Computes all tokens of one request at once.

        Returns:
            Logits (num_tokens, vocab_size).
        """
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        hidden = self._ends["embed"][tokens]
        for kind, weights in zip(self._config.layer_kinds, self._layers, strict=True):
            hidden = hidden + self._mix(kind, weights, rms_norm(hidden))
            up = functional.linear(rms_norm(hidden), weights["up"])
            hidden = hidden + functional.linear(functional.silu(up), weights["down"])
        return functional.linear(rms_norm(hidden), self._ends["head"])

    def greedy_tokens(self, token_ids: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Returns the greedy next token after each token from the last prompt token on.

        If these equal the tokens that follow the prompt, greedy decoding would have generated them.
        """
        return [int(t) for t in self.forward_dense(token_ids)[num_prompt_tokens - 1 :].argmax(-1).tolist()]

    def _mix(self, kind: LayerKind, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        if kind is LayerKind.MAMBA:
            return self._scan(weights, hidden)
        if kind is LayerKind.MLA:
            return self._latent_attention(weights, hidden)
        return self._attention(kind, weights, hidden)

    def _mask(self, kind: LayerKind, num_tokens: int) -> torch.Tensor:
        """Attention mask: bool (num_tokens, num_tokens), True where row attends to column."""
        position = torch.arange(num_tokens, device=self._device)
        row, column = position[:, None], position[None, :]
        seen = column <= row
        if kind is LayerKind.SLIDING:
            seen &= row - column < self._config.sliding_window
        elif kind is LayerKind.CHUNKED:
            seen &= row // self._config.attention_chunk_size == column // self._config.attention_chunk_size
        return seen

    def _attention(self, kind: LayerKind, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        size, num_tokens = self._config.head_size, len(hidden)
        positions = torch.arange(num_tokens, device=self._device)
        query = rotary(heads(functional.linear(hidden, weights["q"]), size), positions)
        key = rotary(heads(functional.linear(hidden, weights["k"]), size), positions)
        value = heads(functional.linear(hidden, weights["v"]), size)
        shared = self._config.num_heads // self._config.num_kv_heads
        return self._attend(
            query,
            key.repeat_interleave(shared, 1),
            value.repeat_interleave(shared, 1),
            weights,
            self._mask(kind, num_tokens),
        )

    def _latent_attention(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        config, num_tokens = self._config, len(hidden)
        positions = torch.arange(num_tokens, device=self._device)
        query = heads(functional.linear(hidden, weights["q"]), config.head_size + config.qk_rope_head_dim)
        plain, turned = query[..., : config.head_size], query[..., config.head_size :]
        latent = rms_norm(functional.linear(hidden, weights["kv_down"]))
        shared_key = rotary(functional.linear(hidden, weights["k_rope"])[:, None], positions)
        key = heads(functional.linear(latent, weights["k_up"]), config.head_size)
        value = heads(functional.linear(latent, weights["v_up"]), config.head_size)
        return self._attend(
            torch.cat([plain, rotary(turned, positions)], -1),
            torch.cat([key, shared_key.expand(-1, config.num_heads, -1)], -1),
            value,
            weights,
            self._mask(LayerKind.MLA, num_tokens),
        )

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, weights: Weights, seen: torch.Tensor
    ) -> torch.Tensor:
        """Computes attention of (num_tokens, num_heads, size) inputs; returns (num_tokens, hidden_size)."""
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)
        return functional.linear(attended.flatten(1), weights["o"])

    def _scan(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        """Mamba's selective scan, token by token, with a state (mamba_inner_size, mamba_state_size)."""
        config = self._config
        kept = torch_dtype("mixer", config.mamba_ssm_dtype)
        inputs = functional.linear(hidden, weights["in_x"]).to(torch_dtype("mixer", config.mamba_conv_dtype))
        padded = functional.pad(inputs.to(hidden.dtype).T, (config.mamba_conv_kernel - 1, 0))
        mixed = functional.silu(functional.conv1d(padded[None], weights["conv"][:, None], groups=len(padded))[0].T)
        step = functional.softplus(functional.linear(hidden, weights["in_dt"]))
        into, out = functional.linear(hidden, weights["in_b"]), functional.linear(hidden, weights["in_c"])
        state = torch.zeros(config.mamba_inner_size, config.mamba_state_size, dtype=kept, device=self._device)
        outputs = []
        for t in range(len(hidden)):
            decay = torch.exp(-step[t] * weights["decay"]).to(kept)
            state = state * decay[:, None] + torch.outer(step[t] * mixed[t], into[t]).to(kept)
            outputs.append((state @ out[t].to(kept)).to(hidden.dtype))
        gated = (torch.stack(outputs) + weights["skip"] * mixed) * functional.silu(
            functional.linear(hidden, weights["in_z"])
        )
        return functional.linear(gated, weights["o"])
