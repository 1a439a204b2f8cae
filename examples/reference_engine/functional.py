"""Functions that the paged and the dense model share."""

import torch


def rms_norm(hidden: torch.Tensor) -> torch.Tensor:
    """Scales each token's vector (..., size) to a mean square of 1."""
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)


def rotary(vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Applies rotary embedding (RoFormer, with paired halves): rotates each pair by an angle proportional to position.

    Args:
        vectors: (num_tokens, heads, size), size even.
        positions: int64 (num_tokens,).
    """
    half = vectors.shape[-1] // 2
    steps = torch.arange(half, dtype=vectors.dtype, device=vectors.device) / half
    angles = (positions.to(vectors.dtype)[:, None] * 1000.0**-steps)[:, None, :]
    first, second = vectors[..., :half], vectors[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def heads(flat: torch.Tensor, head_size: int) -> torch.Tensor:
    """Splits (num_tokens, heads * head_size) into (num_tokens, heads, head_size)."""
    return flat.view(*flat.shape[:-1], -1, head_size)
