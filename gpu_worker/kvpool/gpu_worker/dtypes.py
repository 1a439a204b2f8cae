"""Element types: the names that specs spell, as types of the installed torch."""

import torch

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import DTYPE_SIZES_BYTES, dtype_size_bytes


def torch_dtype(layer_name: str, dtype: str) -> torch.dtype:
    """The type of a layer's elements.

    Args:
        layer_name: The layer, for the error.
        dtype: One of `DTYPE_SIZES_BYTES`.

    Raises:
        InvalidArgumentError: The name is not known, this torch has no such type, or one of another size.
    """
    try:
        size_bytes = dtype_size_bytes("dtype", dtype)
    except InvalidArgumentError as error:
        raise InvalidArgumentError("dtype", f"layer {layer_name!r}: {error.message}") from None
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or found.itemsize != size_bytes:
        known = ", ".join(name for name in DTYPE_SIZES_BYTES if isinstance(getattr(torch, name, None), torch.dtype))
        raise InvalidArgumentError(
            "dtype", f"layer {layer_name!r}: torch {torch.__version__} has no {dtype!r}; it has {known}"
        )
    return found
