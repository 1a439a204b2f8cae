"""Element types of a model, and of its keys and values."""

from collections.abc import Mapping, Sequence
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import DTYPE_SIZES_BYTES, dtype_size_bytes
from kvpool.models.packing import PACKINGS
from kvpool.models.reader import Reader, typed

_DTYPE_KEYS: Final = ("torch_dtype", "dtype")
_SPELLINGS: Final = {"half": "float16", "float": "float32"}
_KV_DTYPES: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_AUTO: Final = ("", "auto")
_QUANTIZATION_KEYS: Final = ("quantization_config", "compression_config")


def model_dtype(keys: Reader, top: Reader, notes: list[str]) -> str:
    """Element type of activations; as in vLLM, bfloat16 if weights are float32 or no type is stated."""
    for reader in (keys, top):
        for key in _DTYPE_KEYS:
            if not reader.has(key) or reader.values[key] in _AUTO:
                continue
            stated = typed(reader.field(key), reader.values[key], str).removeprefix("torch.")
            dtype = _SPELLINGS.get(stated, stated)
            dtype_size_bytes(reader.field(key), dtype)
            if dtype != "float32":
                return dtype
            notes.append(f"{reader.field(key)} is float32; bfloat16 is assumed")
            return "bfloat16"
    notes.append("the config states no torch_dtype; bfloat16 is assumed")
    return "bfloat16"


def kv_dtype(requested: str, model: str, readers: Sequence[Reader], notes: list[str]) -> str:
    """Element type of keys and values, or a type of `PACKINGS`.

    Args:
        requested: Requested type; empty or "auto" for the type that the checkpoint was quantized to, else the model's.
        model: Element type of the model.
        readers: The whole config, and its section for the language model.
        notes: Notes; a quantized checkpoint adds one.

    Raises:
        InvalidArgumentError: The requested type is unknown.
    """
    name = requested.lower().removeprefix("torch.")
    if name in _AUTO:
        return _quantized(readers, notes) or model
    dtype = _KV_DTYPES.get(name, _SPELLINGS.get(name, name))
    if dtype in PACKINGS:
        return dtype
    if dtype not in DTYPE_SIZES_BYTES:
        known = ["auto", *_KV_DTYPES, *PACKINGS, "bfloat16", "float16", "float32"]
        raise InvalidArgumentError("kv_dtype", f"{requested!r} is not known; known: {', '.join(known)}")
    return dtype


def _quantized(readers: Sequence[Reader], notes: list[str]) -> str:
    """Cache type in the first quantization_config that states a known one; empty if there is none."""
    sections = (reader.section(key) for reader in readers for key in _QUANTIZATION_KEYS if reader.has(key))
    for section in sections:
        scheme = section.values.get("kv_cache_scheme")
        nested = section.values.get("quantization")
        algorithms = [part.get("kv_cache_quant_algo") for part in (section.values, nested) if isinstance(part, Mapping)]
        algorithm = str(next((name for name in algorithms if name), "")).upper()
        eight_bits = isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        if eight_bits or algorithm == "FP8":
            notes.append(f"{section.path} keeps keys and values in fp8, which is assumed; set kv_dtype to override it")
            return _KV_DTYPES["fp8"]
        if scheme or algorithm:
            notes.append(f"{section.path} quantizes keys and values in an unknown format: set kv_dtype")
    return ""
