"""Converts layer specs between protobuf messages and core values."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.specs.base import AttentionSpec, KVCacheSpec
from kvpool.core.specs.kinds import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvpool.v1 import spec_pb2

_SHARED_FIELDS: Final = tuple(field.name for field in fields(AttentionSpec))
_FULL_FIELDS: Final = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Encoding of a kind of attention.

    Attributes:
        name: Name of its field in `KvCacheSpec`.
        message: Type of its message.
        own_fields: Fields that only this kind has.
        has_full_attention: Whether its message contains a FullAttentionSpec.
    """

    name: str
    message: type[Any]
    own_fields: tuple[str, ...] = ()
    has_full_attention: bool = False


_KINDS: Final[dict[type[AttentionSpec], _Kind]] = {
    FullAttentionSpec: _Kind("full_attention", spec_pb2.FullAttentionSpec, _FULL_FIELDS),
    MLAAttentionSpec: _Kind("mla_attention", spec_pb2.MlaAttentionSpec, ("cache_dtype_str",), has_full_attention=True),
    SinkFullAttentionSpec: _Kind(
        "sink_full_attention", spec_pb2.SinkFullAttentionSpec, ("sink_len",), has_full_attention=True
    ),
    SlidingWindowSpec: _Kind("sliding_window", spec_pb2.SlidingWindowSpec, ("sliding_window",)),
    ChunkedLocalAttentionSpec: _Kind(
        "chunked_local_attention", spec_pb2.ChunkedLocalAttentionSpec, ("attention_chunk_size",)
    ),
    CrossAttentionSpec: _Kind("cross_attention", spec_pb2.CrossAttentionSpec),
    EncoderOnlyAttentionSpec: _Kind("encoder_only_attention", spec_pb2.EncoderOnlyAttentionSpec),
}

_STATE_FIELD: Final = re.compile(r"^(shapes|dtypes)(\[\d+\])?")
_STATE_PARTS: Final = {"shapes": ".shape", "dtypes": ".dtype"}


def spec_from_proto(where: str, message: spec_pb2.KvCacheSpec) -> KVCacheSpec:
    """Decodes a spec.

    Args:
        where: Path of the message, for errors.
        message: The spec.

    Raises:
        InvalidArgumentError: No kind is set, or a number is out of range; names the field.
    """
    name = message.WhichOneof("kind")
    if name is None:
        raise InvalidArgumentError(where, "is not set, or of a kind that this server does not know")
    try:
        if name == "mamba":
            return _mamba_from_proto(message.mamba)
        if name == "uniform_type":
            layers = tuple(_layer_from_proto(i, layer) for i, layer in enumerate(message.uniform_type.layers))
            return UniformTypeKVCacheSpecs(message.uniform_type.block_size, layers)
        return _attention_from_proto(name, getattr(message, name))
    except InvalidArgumentError as error:
        error.rename_field(f"{where}.{name}.{_wire_field(name, error.field)}")
        raise


def _layer_from_proto(i: int, layer: spec_pb2.LayerSpec) -> tuple[str, KVCacheSpec]:
    where = f"layers[{i}].spec"
    if layer.spec.WhichOneof("kind") == "uniform_type":
        raise InvalidArgumentError(where, "must not be of uniform type")
    return layer.layer_name, spec_from_proto(where, layer.spec)


def _wire_field(name: str, field: str) -> str:
    """The path of a spec's field within the message of its kind."""
    if name == "mamba":
        found = _STATE_FIELD.match(field)
        if not found:
            return field
        part, index = found.groups(default="")
        return f"states{index}{_STATE_PARTS[part] if index else ''}{field[found.end() :]}"
    if name == "uniform_type":
        return field.replace("].block_size", "].spec")
    wire = next(wire for wire in _KINDS.values() if wire.name == name)
    if field in wire.own_fields:
        return field
    attention = field if field in _FULL_FIELDS else f"attention.{field}"
    return f"full_attention.{attention}" if wire.has_full_attention else attention


def _attention_from_proto(name: str, part: Any) -> AttentionSpec:  # noqa: ANN401 - one of the kinds' messages
    kind, wire = next((kind, wire) for kind, wire in _KINDS.items() if wire.name == name)
    values = {field: getattr(part, field) for field in wire.own_fields}
    if wire.has_full_attention:
        part = part.full_attention
        values |= {field: getattr(part, field) for field in _FULL_FIELDS}
    return kind(**values, **{field: getattr(part.attention, field) for field in _SHARED_FIELDS})


def _mamba_from_proto(mamba: spec_pb2.MambaSpec) -> MambaSpec:
    return MambaSpec(
        mamba.block_size,
        tuple(tuple(state.shape) for state in mamba.states),
        tuple(state.dtype for state in mamba.states),
        mamba.page_size_padded,
        mamba.mamba_type,
        mamba.num_speculative_blocks,
    )


def spec_to_proto(spec: KVCacheSpec) -> spec_pb2.KvCacheSpec:
    """Encodes a spec."""
    match spec:
        case MambaSpec():
            states = [
                spec_pb2.StateTensor(shape=shape, dtype=dtype)
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            ]
            mamba = spec_pb2.MambaSpec(
                block_size=spec.block_size,
                states=states,
                page_size_padded=spec.page_size_padded,
                mamba_type=spec.mamba_type,
                num_speculative_blocks=spec.num_speculative_blocks,
            )
            return spec_pb2.KvCacheSpec(mamba=mamba)
        case UniformTypeKVCacheSpecs():
            layers = [spec_pb2.LayerSpec(layer_name=name, spec=spec_to_proto(layer)) for name, layer in spec.layers]
            return spec_pb2.KvCacheSpec(
                uniform_type=spec_pb2.UniformTypeSpec(block_size=spec.block_size, layers=layers)
            )
        case AttentionSpec() if type(spec) in _KINDS:
            return _attention_to_proto(spec)
        case _:
            raise InvalidArgumentError("spec", f"{type(spec).__name__} is not a supported kind of attention")


def _attention_to_proto(spec: AttentionSpec) -> spec_pb2.KvCacheSpec:
    def values(names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(spec, name) for name in names}

    wire = _KINDS[type(spec)]
    attention = spec_pb2.AttentionSpec(**values(_SHARED_FIELDS))
    if wire.has_full_attention:
        full = spec_pb2.FullAttentionSpec(attention=attention, **values(_FULL_FIELDS))
        part = wire.message(full_attention=full, **values(wire.own_fields))
    else:
        part = wire.message(attention=attention, **values(wire.own_fields))
    return spec_pb2.KvCacheSpec(**{wire.name: part})
