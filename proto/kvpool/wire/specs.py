"""Converts layer specs between protobuf messages and core values."""

import re
from typing import Any, Final

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from kvpool.core.errors import InvalidArgumentError, fields_renamed
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import KIND_NAMES, MambaSpec, UniformTypeKVCacheSpecs
from kvpool.v1 import spec_pb2
from kvpool.wire.fields import field_values

_KINDS: Final = {name: kind for kind, name in KIND_NAMES.items()}

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
    with fields_renamed(lambda field: f"{where}.{name}.{_wire_field(getattr(message, name).DESCRIPTOR, field)}"):
        if name == "mamba":
            return _mamba_from_proto(message.mamba)
        if name == "uniform_type":
            layers = tuple(_layer_from_proto(i, layer) for i, layer in enumerate(message.uniform_type.layers))
            return UniformTypeKVCacheSpecs(message.uniform_type.block_size, layers)
        return _KINDS[name](**_flat_values(getattr(message, name)))


def _layer_from_proto(i: int, layer: spec_pb2.LayerSpec) -> tuple[str, KVCacheSpec]:
    where = f"layers[{i}].spec"
    if layer.spec.WhichOneof("kind") == "uniform_type":
        raise InvalidArgumentError(where, "must not be of uniform type")
    return layer.layer_name, spec_from_proto(where, layer.spec)


def _wire_field(message: Descriptor, field: str) -> str:
    """The path of a spec's field within the message of its kind."""
    if message is spec_pb2.MambaSpec.DESCRIPTOR:
        found = _STATE_FIELD.match(field)
        if not found:
            return field
        part, index = found.groups(default="")
        return f"states{index}{_STATE_PARTS[part] if index else ''}{field[found.end() :]}"
    if message is spec_pb2.UniformTypeSpec.DESCRIPTOR:
        return field.replace("].block_size", "].spec")
    if field in message.fields_by_name or not message.fields[0].message_type:
        return field
    return f"{message.fields[0].name}.{_wire_field(message.fields[0].message_type, field)}"


def _flat_values(message: Message) -> dict[str, Any]:
    """The values of an attention message's fields, and of the fields of the message that it contains."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type:
            values |= _flat_values(value)
        else:
            values[field.name] = value
    return values


def _mamba_from_proto(mamba: spec_pb2.MambaSpec) -> MambaSpec:
    return MambaSpec(
        shapes=tuple(tuple(state.shape) for state in mamba.states),
        dtypes=tuple(state.dtype for state in mamba.states),
        **field_values(MambaSpec, mamba, _STATE_PARTS),
    )


def spec_to_proto(spec: KVCacheSpec) -> spec_pb2.KvCacheSpec:
    """Encodes a spec."""
    match spec:
        case MambaSpec():
            states = [
                spec_pb2.StateTensor(shape=shape, dtype=dtype)
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            ]
            mamba = spec_pb2.MambaSpec(states=states, **field_values(MambaSpec, spec, _STATE_PARTS))
            return spec_pb2.KvCacheSpec(mamba=mamba)
        case UniformTypeKVCacheSpecs():
            layers = [spec_pb2.LayerSpec(layer_name=name, spec=spec_to_proto(layer)) for name, layer in spec.layers]
            return spec_pb2.KvCacheSpec(
                uniform_type=spec_pb2.UniformTypeSpec(block_size=spec.block_size, layers=layers)
            )
        case _ if type(spec) in KIND_NAMES:
            message = spec_pb2.KvCacheSpec()
            _write_attention(getattr(message, KIND_NAMES[type(spec)]), spec)
            return message
        case _:
            raise InvalidArgumentError("spec", f"{type(spec).__name__} is not a supported kind of attention")


def _write_attention(message: Message, spec: KVCacheSpec) -> None:
    """Fills a message, and the message that it contains, with the spec's fields of the same names."""
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        if field.message_type:
            _write_attention(getattr(message, field.name), spec)
        else:
            setattr(message, field.name, getattr(spec, field.name))
