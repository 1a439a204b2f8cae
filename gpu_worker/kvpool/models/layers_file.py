"""Reads specs from a file that lists them by layer, for models whose config.json is not supported.

{"layers": {"model.layers.0.self_attn.attn": {"type": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 8, ...}}}

Keys other than `type` are the attributes of the spec; null stands for the default. `page_size_bytes` is
optional and checked.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Final, cast

from kvpool.core.errors import InvalidArgumentError, check_range, fields_renamed
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import SPEC_KINDS
from kvpool.models.context import Model
from kvpool.models.reader import MAX_LAYERS, typed

_TYPE: Final = "type"
_PAGE_SIZE: Final = "page_size_bytes"
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


def read_layers(data: object) -> dict[str, KVCacheSpec]:
    """Reads the specs of all layers, in file order.

    Args:
        data: The parsed JSON file.

    Raises:
        InvalidArgumentError: The file has another form; names the path of the error.
    """
    top = typed("$", data, dict)
    for key in top:
        if key != "layers":
            raise InvalidArgumentError(str(key), "is not known in a file of layers; known: layers")
    if "layers" not in top:
        raise InvalidArgumentError("layers", "is missing", reason="MISSING")
    layers = typed("layers", top["layers"], dict)
    if not layers:
        raise InvalidArgumentError("layers", "names no layer")
    return {name: spec_from_json(f'layers["{name}"]', value) for name, value in layers.items()}


def model_of_layers(layers: Mapping[str, KVCacheSpec], max_model_len: int) -> Model:
    """Makes a model of a file's layers. A layer's number is the first number in its name, or 0.

    Raises:
        InvalidArgumentError: A number is too large.
    """
    indices = tuple(map(_layer_number, layers))
    return Model(
        architecture="layers of a file",
        model_type="",
        max_model_len=max_model_len,
        layers=tuple(layers.items()),
        layer_indices=indices,
        num_hidden_layers=max(indices, default=0) + 1,
        notes=(),
    )


def _layer_number(name: str) -> int:
    found = _NUMBER.search(name)
    if not found:
        return 0
    if len(found[0]) > len(str(MAX_LAYERS)):
        raise InvalidArgumentError(f'layers["{name[:256]}"]', f"its number is not in [0, {MAX_LAYERS})")
    return check_range(f'layers["{name}"]', int(found[0]), 0, MAX_LAYERS - 1)


def spec_from_json(where: str, value: object) -> KVCacheSpec:
    """Reads one spec.

    Args:
        where: Path of the spec, for errors.
        value: The parsed JSON of the spec.

    Raises:
        InvalidArgumentError: The value has another form, or the spec rejects its numbers.
    """
    given = typed(where, value, dict)
    stated = {key: item for key, item in given.items() if item is not None}
    if _TYPE not in stated:
        raise InvalidArgumentError(f"{where}.{_TYPE}", "is missing", reason="MISSING")
    name = typed(f"{where}.{_TYPE}", stated.pop(_TYPE), str)
    if name not in SPEC_KINDS:
        raise InvalidArgumentError(f"{where}.{_TYPE}", f"{name!r} is not known; known: {', '.join(SPEC_KINDS)}")
    kind = SPEC_KINDS[name]
    page_size = stated.pop(_PAGE_SIZE, None)
    defaults = {field.name: field.default for field in fields(kind)}
    for key in given:
        if key not in (*defaults, _TYPE, _PAGE_SIZE):
            raise InvalidArgumentError(f"{where}.{key}", f"is not known; known: {', '.join(defaults)}")
    if "block_size" not in stated:
        raise InvalidArgumentError(f"{where}.block_size", "is missing", reason="MISSING")
    attributes = {key: _attribute(f"{where}.{key}", key, item, defaults[key]) for key, item in stated.items()}
    make = cast(Callable[..., KVCacheSpec], kind)  # each kind has its own attributes
    with fields_renamed(lambda field: f"{where}.{field}"):
        spec = make(**attributes)
    if page_size is not None and typed(f"{where}.{_PAGE_SIZE}", page_size, int) != spec.page_size_bytes:
        raise InvalidArgumentError(
            f"{where}.{_PAGE_SIZE}", f"{page_size} differs from the spec's {spec.page_size_bytes}"
        )
    return spec


def _attribute(field: str, key: str, item: object, default: object) -> object:
    if key == "shapes":
        return tuple(_integers(f"{field}[{i}]", shape) for i, shape in enumerate(typed(field, item, list)))
    if key == "dtypes":
        return tuple(typed(f"{field}[{i}]", dtype, str) for i, dtype in enumerate(typed(field, item, list)))
    kind = type(default) if isinstance(default, str | bool) else int
    return typed(field, item, kind)


def _integers(field: str, value: object) -> tuple[int, ...]:
    return tuple(typed(f"{field}[{i}]", size, int) for i, size in enumerate(typed(field, value, list)))
