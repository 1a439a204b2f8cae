"""Converts typed values to plain ones and back: commands, snapshots, headers of files, records of the directory.

1. The declared types decide the form. A dataclass is a map of its fields. A value of a union, or of a class with
   subclasses, is a pair: the name of its class, and the value.
2. Only values of the declared types are made, with exactly the fields that they have in this version. Anything else is
   refused completely (`DamageError`). So it is safe to decode any bytes.
3. Plain values consist of what CBOR has. A column is encoded apart from the value that has it, slice by slice.
"""

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from reprlib import repr as short_repr
from types import NoneType, UnionType
from typing import Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import cbor2

from kvpool.core.errors import KvpoolError
from kvpool.core.snapshots import LEFT_OUT, Column

_T = TypeVar("_T")
_ATOMS: Final[dict[Any, frozenset[type]]] = {
    **{kind: frozenset((kind,)) for kind in (NoneType, bool, int, str, bytes)},
    None: frozenset((NoneType,)),
    float: frozenset((float, int)),
}
_COLUMN_TAG: Final = 0x6B76
"""CBOR tag of the number of a column."""
MALFORMED: Final = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Exceptions raised when plain values are malformed."""


class DamageError(Exception):
    """Stored or received bytes are nothing that a server of this version writes."""


class Form(NamedTuple):
    """The form of the values of one type.

    Attributes:
        encode: Makes a plain value.
        decode: Makes a value of a plain value.
        atoms: Types of the values, if they are plain already.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    atoms: frozenset[type] = frozenset()


@dataclass(frozen=True, slots=True)
class EncodedColumn:
    """A column in place of its plain values, and the form of its values."""

    column: Column[Any]
    form: Form

    def slices(self) -> Iterator[Any]:
        """Yields plain slices. Ints are packed, which is many times faster than one by one."""
        for piece in self.column.slices():
            if self.form.atoms != _ATOMS[int]:
                yield _encode_all(self.form, piece)
                continue
            try:
                yield ["i", array("i", piece).tobytes()]
            except OverflowError:
                yield ["q", array("q", piece).tobytes()]


def values_of_slice(plain: Any) -> list[Any]:  # noqa: ANN401 - checked here, and with the column
    """The plain values of a slice of a column."""
    match plain:
        case ["i" | "q" as code, bytes(packed)]:
            return array(code, packed).tolist()
        case list():
            return plain
    raise TypeError("not a slice of a column")


def encode(kind: type[_T], value: _T) -> bytes:
    """Encodes a value without columns."""
    return cbor2.dumps(form_of(kind).encode(value))  # type: ignore[arg-type]  # every type is hashable


def encode_apart(kind: type[_T], value: _T) -> tuple[bytes, list[EncodedColumn]]:
    """Encodes a value with numbers in place of its columns. Returns the columns too."""
    columns: list[EncodedColumn] = []

    def number(encoder: Any, column: EncodedColumn) -> None:  # noqa: ANN401 - CBOREncoder has another name in cbor2 5
        columns.append(column)
        encoder.encode(cbor2.CBORTag(_COLUMN_TAG, len(columns) - 1))

    return cbor2.dumps(to_plain(kind, value), default=number), columns


def decode(kind: type[_T], encoded: bytes, columns: Mapping[int, list[Any]] | None = None) -> _T:
    """Decodes a value, of which the columns have these plain values.

    Raises:
        DamageError: The bytes are not a value of this type in this version.
    """
    plain = loads(encoded)
    try:
        plain = plain if columns is None else _with_columns(plain, columns)
    except MALFORMED as error:
        raise DamageError("has other columns") from error
    return from_plain(kind, plain)


def to_plain(kind: type[_T], value: _T) -> Any:  # noqa: ANN401 - any plain value
    """Makes a plain value."""
    return form_of(kind).encode(value)  # type: ignore[arg-type]  # every type is hashable


def from_plain(kind: type[_T], plain: object) -> _T:
    """Makes a value of a plain one.

    Raises:
        DamageError: The plain value is not one of this type in this version.
    """
    try:
        value: _T = form_of(kind).decode(plain)  # type: ignore[arg-type]  # every type is hashable
    except (*MALFORMED, KvpoolError) as error:
        raise DamageError(f"is not a {kind.__name__} of this version: {error}") from error
    return value


def dumps(plain: object) -> bytes:
    """Encodes a plain value as CBOR."""
    return cbor2.dumps(plain)


def loads(encoded: bytes) -> Any:  # noqa: ANN401 - any plain value
    """Decodes a plain value from CBOR.

    Raises:
        DamageError: The bytes are not CBOR.
    """
    try:
        return cbor2.loads(encoded)
    except (cbor2.CBORDecodeError, *MALFORMED) as error:
        raise DamageError("is not CBOR") from error


def _with_columns(plain: Any, columns: Mapping[int, list[Any]]) -> Any:  # noqa: ANN401 - any plain value
    match plain:
        case cbor2.CBORTag(tag=tag, value=int(number)) if tag == _COLUMN_TAG:
            return columns[number]
        case dict():
            return {key: _with_columns(value, columns) for key, value in plain.items()}
        case list():
            return [_with_columns(value, columns) for value in plain]
    return plain


@cache
def form_of(kind: Any) -> Form:  # noqa: ANN401 - any type
    """The form of the values of a type.

    Raises:
        TypeError: Values of this type cannot be encoded.
    """
    while hasattr(kind, "__supertype__"):  # a NewType
        kind = kind.__supertype__
    if kind in _ATOMS:
        return _atom(_ATOMS[kind])
    origin = get_origin(kind)
    return _container(origin, *get_args(kind)) if origin else _class(kind)


def _container(origin: Any, *arguments: Any) -> Form:  # noqa: ANN401 - any types
    if origin in {Union, UnionType}:
        return _union(arguments)
    if origin is tuple and arguments[1:] != (...,):
        return _tuple(arguments)
    if origin in {list, set, tuple}:
        return _list(origin, form_of(arguments[0]))
    if origin in {dict, Mapping}:
        return _map(*map(form_of, arguments))
    if origin is Column:
        form = form_of(arguments[0])
        return Form(lambda column: EncodedColumn(column, form), lambda plain: Column(_decode_all(form, plain)))
    return _class(origin)


def _class(kind: Any) -> Form:  # noqa: ANN401 - any class
    if Enum in kind.__mro__:
        return Form(lambda member: member.name, lambda name: kind[name])
    family = _family(kind) if kind.__module__ != "builtins" else {}
    if not family:
        raise TypeError(f"{kind} cannot be encoded")
    return _record(kind) if list(family) == [kind.__name__] else _one_of(lambda name: _record(family[name]))


def _atom(kinds: frozenset[type]) -> Form:
    def check(plain: object) -> object:
        if type(plain) not in kinds:
            raise TypeError(f"{short_repr(plain)} is not of type {' or '.join(sorted(k.__name__ for k in kinds))}")
        return plain

    return Form(lambda value: value, check, kinds)


def _union(members: tuple[Any, ...]) -> Form:
    forms = {member: form_of(member) for member in members}
    atoms = _atom(frozenset().union(*(form.atoms for form in forms.values())))
    by_name = {member.__name__: form for member, form in forms.items() if not form.atoms}
    if not by_name:
        return atoms
    other = _one_of(lambda name: by_name[name])
    return Form(
        lambda value: value if type(value) in atoms.atoms else other.encode(value),
        lambda plain: (other if type(plain) is list else atoms).decode(plain),
    )


def _one_of(form: Callable[[str], Form]) -> Form:
    """A pair of a class's name and a value."""

    def decode_pair(plain: Any) -> Any:  # noqa: ANN401 - any value
        name, value = plain
        return form(name).decode(value)

    return Form(lambda value: [(name := type(value).__name__), form(name).encode(value)], decode_pair)


def _list(make: Callable[[Any], Any], form: Form) -> Form:
    return Form(
        lambda values: _encode_all(form, sorted(values) if make is set else values),
        lambda plain: make(_decode_all(form, plain)),
    )


def _encode_all(form: Form, values: Collection[Any]) -> list[Any]:
    return list(values) if form.atoms else [form.encode(value) for value in values]


def _decode_all(form: Form, plain: Any) -> list[Any]:  # noqa: ANN401 - checked here
    if type(plain) is not list:
        raise TypeError(f"{short_repr(plain)} is not a list")
    if form.atoms and form.atoms.issuperset(map(type, plain)):
        return plain
    return [form.decode(value) for value in plain]


def _tuple(arguments: tuple[Any, ...]) -> Form:
    forms = [form_of(argument) for argument in arguments]
    return Form(
        lambda values: [form.encode(value) for form, value in zip(forms, values, strict=True)],
        lambda plain: tuple(form.decode(value) for form, value in zip(forms, plain, strict=True)),
    )


def _map(keys: Form, values: Form) -> Form:
    return Form(
        lambda mapped: dict(zip(_encode_all(keys, mapped.keys()), _encode_all(values, mapped.values()), strict=True)),
        lambda plain: dict(
            zip(_decode_all(keys, list(plain.keys())), _decode_all(values, list(plain.values())), strict=True)
        ),
    )


@cache
def _record(kind: Any) -> Form:  # noqa: ANN401 - any dataclass
    """A dataclass: its fields by name, except those left out."""
    hints = get_type_hints(kind)
    kept = [field for field in fields(kind) if LEFT_OUT not in field.metadata]
    forms = {field.name: form_of(hints[field.name]) for field in kept}
    late = {field.name for field in kept if not field.init}

    def decode_record(plain: Any) -> Any:  # noqa: ANN401 - an object of this class
        if type(plain) is not dict:
            raise TypeError(f"{short_repr(plain)} is not a {kind.__name__}")
        if plain.keys() != forms.keys():
            raise TypeError(f"{kind.__name__} has other fields: {short_repr(sorted(plain.keys() ^ forms.keys()))}")
        values: dict[str, Any] = {}
        later: dict[str, Any] = {}
        for name, form in forms.items():
            try:
                (later if name in late else values)[name] = form.decode(plain[name])
            except MALFORMED as error:
                raise TypeError(f"{name}: {error}") from error
        made = kind(**values)
        for name, value in later.items():
            setattr(made, name, value)
        return made

    return Form(
        lambda value: {
            name: getattr(value, name) if form.atoms else form.encode(getattr(value, name))
            for name, form in forms.items()
        },
        decode_record,
    )


def _family(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - classes
    """The dataclasses among a class and its subclasses, by name."""
    name = kind.__name__
    found: dict[str, Any] = {name: kind} if is_dataclass(kind) else {}
    for subclass in kind.__subclasses__():  # a class that `dataclass` has replaced comes before its replacement
        found |= _family(subclass)
    return found
