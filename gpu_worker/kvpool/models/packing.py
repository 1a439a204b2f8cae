"""Packed types of keys and values: quantised caches, of which one head stores a token in bytes of its own format.

Source: the sizes are those of vLLM 0.32's attention backends (`customize_spec`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.kinds import DS_MLA_TOKEN_BYTES

DS_MLA_SIZES: Final = (512, 64)
"""Latent and rotary elements of the layouts of FlashMLA."""
_SCALE_BYTES: Final = 4
"""A float32 scale; one for the key, one for the value."""
_FP4_GROUP: Final = 16
"""Elements of nvfp4 that share a scale of one byte."""
_ULTRAQUANT_GROUP: Final = 32
"""Elements of ultraquant that share a scale of one byte."""
_TURBOQUANT_BITS: Final = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}
"""Bits of an element of a key and of a value."""
_FP8_BITS: Final = 8
"""Keys with this number of bits are fp8, and have no norm beside them."""
_KEY_NORM_BYTES: Final = 2
_VALUE_SCALE_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Packing:
    """How a packed type stores a token.

    Attributes:
        dtype: Element type of the tensor.
        head_bytes: Bytes of the key and value of one head, by their size in elements. None if it is for latent vectors
            only.
        latent_bytes: Bytes of a latent vector, by its size. None if it is for keys and values only.
        group_size: A divisor of the number of elements of a head.
        num_slots: Slots that hold the bytes of one head.
        keeps_ends: Whether vLLM keeps the first two and the last two layers in the model's type. It does not in models
            with states.
    """

    dtype: str
    head_bytes: Callable[[int], int] | None
    latent_bytes: Callable[[int], int] | None
    group_size: int = 1
    num_slots: int = 1
    keeps_ends: bool = False


def _turboquant(key_bits: int, value_bits: int) -> Packing:
    def head_bytes(size: int) -> int:
        key = -(-size * key_bits // 8) + (0 if key_bits == _FP8_BITS else _KEY_NORM_BYTES)
        value = -(-size * value_bits // 8) + _VALUE_SCALE_BYTES
        return -(-(key + value) // 2) * 2

    return Packing("uint8", head_bytes, None, keeps_ends=True)


def _per_token_head(dtype: str, elements_per_byte: int) -> Packing:
    return Packing(
        dtype,
        lambda size: 2 * (size // elements_per_byte) + 2 * _SCALE_BYTES,
        lambda size: size // elements_per_byte + 2 * _SCALE_BYTES,
        group_size=elements_per_byte,
    )


def _fixed(size_bytes: int) -> Packing:
    return Packing("uint8", None, lambda _: size_bytes)


_NVFP4: Final = Packing(
    "uint8", lambda size: 2 * (size // 2 + size // _FP4_GROUP), None, group_size=_FP4_GROUP, num_slots=2
)

PACKINGS: Final[dict[str, Packing]] = {
    "int4_per_token_head": _per_token_head("uint8", 2),
    "int8_per_token_head": _per_token_head("int8", 1),
    "fp8_per_token_head": _per_token_head("uint8", 1),
    "nvfp4": _NVFP4,
    "nvfp4_4over6": _NVFP4,
    **{f"turboquant_{name}": _turboquant(*bits) for name, bits in _TURBOQUANT_BITS.items()},
    "ultraquant_4bit": Packing(
        "uint8",
        lambda size: size + 2 * (size // _ULTRAQUANT_GROUP),
        None,
        group_size=_ULTRAQUANT_GROUP,
        keeps_ends=True,
    ),
    **{name: _fixed(size_bytes) for name, size_bytes in DS_MLA_TOKEN_BYTES.items()},
}
"""By name in vLLM."""


def head_content_bytes(kv_dtype: str, head_size: int) -> int:
    """Bytes of one slot of a head; 0 if the type is not packed.

    Raises:
        InvalidArgumentError: The type is for latent vectors only, or not for heads of this size.
    """
    packing = PACKINGS.get(kv_dtype)
    if packing is None:
        return 0
    if packing.head_bytes is None:
        raise InvalidArgumentError("kv_dtype", f"{kv_dtype!r} is for multi-head latent attention only")
    if head_size % packing.group_size:
        message = f"{kv_dtype!r} packs {packing.group_size} elements at a time, and heads have {head_size}"
        raise InvalidArgumentError("kv_dtype", message)
    return packing.head_bytes(head_size) // packing.num_slots


def latent_content_bytes(kv_dtype: str, latent_size: int, rotary_size: int) -> int:
    """Bytes of a latent vector; 0 if the type is not packed.

    Raises:
        InvalidArgumentError: The type is for keys and values only, or not for vectors of this size.
    """
    packing = PACKINGS.get(kv_dtype)
    if packing is None:
        return 0
    if packing.latent_bytes is None:
        raise InvalidArgumentError("kv_dtype", f"{kv_dtype!r} is for keys and values only, not for latent vectors")
    if kv_dtype in DS_MLA_TOKEN_BYTES and (latent_size, rotary_size) != DS_MLA_SIZES:
        raise InvalidArgumentError(
            "kv_dtype", f"{kv_dtype} is for vectors of {DS_MLA_SIZES} elements, not {(latent_size, rotary_size)}"
        )
    return packing.latent_bytes(latent_size + rotary_size)
