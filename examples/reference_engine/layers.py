"""Layers with a cache in the pool's blocks: attention, latent attention, state space.

Each takes the normalised hidden states of a step's tokens (num_tokens, hidden_size), and returns its share of the same
shape, to be summed over the tensor-parallel ranks. `kvpool.gpu_worker.tensors.bind_kv_cache` sets `kv_cache`.
"""

from typing import Protocol

import torch
from torch.nn import functional

from examples.reference_engine.config import LayerKind, ReferenceConfig
from examples.reference_engine.functional import heads, rms_norm, rotary
from examples.reference_engine.paged import RequestSpan, attend, gather_tokens, request_spans, write_slots
from examples.reference_engine.weights import Weights
from kvpool.core.errors import InvalidArgumentError
from kvpool.gpu_worker.attention_metadata import CommonAttentionMetadata
from kvpool.gpu_worker.layouts import KeyValueLayout, get_layout, torch_dtype


class PagedLayer(Protocol):
    """A layer with a cache: `kv_cache` is the view of its pages in its layout."""

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, metadata: CommonAttentionMetadata) -> torch.Tensor:
        """Writes the cache of the tokens, and computes their outputs."""


class Attention:
    """Attention over keys and values: full, with a sliding window, or chunked."""

    kv_cache: torch.Tensor

    def __init__(self, config: ReferenceConfig, index: int, weights: Weights, layout: str) -> None:
        """Makes the layer.

        Args:
            config: The model.
            index: Index of the layer.
            weights: Weights of this tensor-parallel rank.
            layout: Name of a layout of keys and values.

        Raises:
            InvalidArgumentError: The layout is not for keys and values.
        """
        name = config.layer_name(index)
        found = get_layout(name, layout)
        if not isinstance(found, KeyValueLayout):
            raise InvalidArgumentError("layout", f"layer {name!r}: {layout!r} is not a layout of keys and values")
        self._kv_axis = found.shape.index("kv")
        self._kind = config.layer_kinds[index]
        self._config = config
        self._weights = weights

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, metadata: CommonAttentionMetadata) -> torch.Tensor:
        """See `PagedLayer`."""
        size, weights = self._config.head_size, self._weights
        query = rotary(heads(functional.linear(hidden, weights["q"]), size), positions)
        key = rotary(heads(functional.linear(hidden, weights["k"]), size), positions)
        value = heads(functional.linear(hidden, weights["v"]), size)
        key_pages, value_pages = self.kv_cache.unbind(self._kv_axis)
        write_slots(key_pages, metadata.slot_mapping, key)
        write_slots(value_pages, metadata.slot_mapping, value)
        attended = torch.empty_like(query)
        for request in request_spans(metadata):
            first = self._first_seen(request.start)
            attended[request.rows] = attend(
                query[request.rows],
                gather_tokens(key_pages, request.blocks, first, request.end),
                gather_tokens(value_pages, request.blocks, first, request.end),
                self._mask(request, first, hidden.device),
                size**-0.5,
            )
        return functional.linear(attended.flatten(1), weights["o"])

    def _first_seen(self, position: int) -> int:
        """Position of the first token that the token at `position` attends to."""
        if self._kind is LayerKind.SLIDING:
            return max(position - self._config.sliding_window + 1, 0)
        if self._kind is LayerKind.CHUNKED:
            return position - position % self._config.attention_chunk_size
        return 0

    def _mask(self, request: RequestSpan, first: int, device: torch.device) -> torch.Tensor:
        """Attention mask: bool (num_queries, num_keys), for the keys of tokens [first, end)."""
        bounds = [self._first_seen(position) for position in range(request.start, request.end)]
        key = torch.arange(first, request.end, device=device)
        query = torch.arange(request.start, request.end, device=device)[:, None]
        return (key <= query) & (key >= torch.tensor(bounds, device=device)[:, None])


class LatentAttention:
    """MLA with only latent vectors in the cache: queries are projected down to them, and results up from them."""

    kv_cache: torch.Tensor

    def __init__(self, config: ReferenceConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, metadata: CommonAttentionMetadata) -> torch.Tensor:
        """See `PagedLayer`."""
        config, weights = self._config, self._weights
        size, rank, rope = config.head_size, config.kv_lora_rank, config.qk_rope_head_dim
        latent = rms_norm(functional.linear(hidden, weights["kv_down"]))
        turned = rotary(functional.linear(hidden, weights["k_rope"])[:, None], positions)[:, 0]
        write_slots(self.kv_cache, metadata.slot_mapping, torch.cat([latent, turned], -1))
        query = heads(functional.linear(hidden, weights["q"]), size + rope)
        down = torch.einsum("nhd,hdr->nhr", query[..., :size], weights["k_up"].view(-1, size, rank))
        query = torch.cat([down, rotary(query[..., size:], positions)], -1)
        attended = torch.empty_like(down)
        for request in request_spans(metadata):
            kept = gather_tokens(self.kv_cache, request.blocks, 0, request.end)[:, None]
            keys = torch.arange(request.end, device=hidden.device)
            seen = keys <= torch.arange(request.start, request.end, device=hidden.device)[:, None]
            attended[request.rows] = attend(query[request.rows], kept, kept[..., :rank], seen, (size + rope) ** -0.5)
        value = torch.einsum("nhr,hdr->nhd", attended, weights["v_up"].view(-1, size, rank))
        return functional.linear(value.flatten(1), weights["o"])


class StateSpace:
    """Mamba's selective scan, block by block. A block holds the state after its last computed token.

    Reads the block of the last token computed before the step, and writes each block that the step's tokens reach. A
    request starts from the state in the block, because another request may have computed it.
    """

    kv_cache: tuple[torch.Tensor, ...]

    def __init__(self, config: ReferenceConfig, weights: Weights) -> None:
        self._weights = weights
        self._kept = torch_dtype("mixer", config.mamba_ssm_dtype)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, metadata: CommonAttentionMetadata) -> torch.Tensor:
        """See `PagedLayer`. Handles requests in order: one may start from a state that another writes in this step."""
        del positions  # states already follow token order
        weights = self._weights
        conv_pages, state_pages = self.kv_cache
        scanned = hidden.new_empty(len(hidden), weights["in_x"].shape[0])
        size = metadata.block_size
        for request in request_spans(metadata):
            conv, state = torch.zeros_like(conv_pages[0]), torch.zeros_like(state_pages[0])
            if request.start:
                block = request.blocks[(request.start - 1) // size]
                conv, state = conv_pages[block], state_pages[block]
            begin = request.start
            while begin < request.end:
                end = min(begin - begin % size + size, request.end)
                row = request.rows.start - request.start
                rows = slice(row + begin, row + end)
                scanned[rows], conv, state = self._scan(hidden[rows], conv, state)
                block = request.blocks[begin // size]
                conv_pages[block], state_pages[block] = conv, state
                begin = end
        gate = functional.silu(functional.linear(hidden, weights["in_z"]))
        return functional.linear(scanned * gate, weights["o"])

    def _scan(
        self, hidden: torch.Tensor, conv: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scans several tokens at once, over all pairs with the decay between them.

        Args:
            hidden: (num_tokens, hidden_size).
            conv: Inputs before the tokens (channels, kernel - 1).
            state: State before the tokens (channels, state_size).

        Returns:
            Outputs (num_tokens, channels), and conv and state after the tokens.
        """
        weights = self._weights
        inputs = torch.cat([conv, functional.linear(hidden, weights["in_x"]).T.to(conv.dtype)], 1)
        windows = inputs.to(hidden.dtype).unfold(1, weights["conv"].shape[1], 1)
        mixed = functional.silu(torch.einsum("ctk,ck->tc", windows, weights["conv"]))
        step = functional.softplus(functional.linear(hidden, weights["in_dt"]))
        into = functional.linear(hidden, weights["in_b"]).to(self._kept)
        out = functional.linear(hidden, weights["in_c"]).to(self._kept)
        decay = (
            (-step * weights["decay"]).to(self._kept).cumsum(0)
        )  # logarithm of the remaining factor after each token
        gain = (step * mixed).to(self._kept)
        since = torch.ones(len(hidden), len(hidden), dtype=self._kept, device=hidden.device).tril()
        between = (decay[:, None] - decay[None]).clamp(max=0).exp() * since[..., None]
        outputs = torch.einsum("ts,js,tjc,jc->tc", out, into, between, gain)
        outputs += torch.einsum("ts,cs,tc->tc", out, state, decay.exp())
        state = state * decay[-1].exp()[:, None] + torch.einsum("jc,jc,js->cs", between[-1], gain, into)
        kept_inputs = inputs[:, inputs.shape[1] - conv.shape[1] :]
        return outputs.to(hidden.dtype) + weights["skip"] * mixed, kept_inputs, state
