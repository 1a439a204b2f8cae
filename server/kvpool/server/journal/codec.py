"""Encodes typed values as CBOR, and decodes them: commands, snapshots, the headers of files.

1. The declared types decide the form. A dataclass is a map of its fields. A value of a union, or of a class with
   subclasses, is a pair: the name of its class, and the value.
2. Only values of the declared types are made, with exactly the fields that they have in this version. Anything else is
   refused completely (`DamageError`). So it is safe to decode any bytes.
3. A column is a number. Its values are encoded separately, see `snapshot`.
"""

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import cbor2

from kvpool.core.errors import KvpoolError
from kvpool.core.snapshots import LEFT_OUT, Column
from kvpool.server.journal.frames import MALFORMED, DamageError

_T = TypeVar("_T")
_Columns = Sequence[list[Any]] | Mapping[int, list[Any]]
_ATOMS: Final[dict[Any, frozenset[type]]] = {
    **{kind: frozenset((kind,)) for kind in (NoneType, bool, int, str, bytes)},
    None: frozenset((NoneType,)),
    float: frozenset((float, int)),
}


class Form(NamedTuple):
    """The form of the values of one type.

    Attributes:
        encode: Makes a plain value; adds the columns that it finds to a list.
        decode: Makes a value of a plain value, with the decoded columns.
        atoms: Types of the values, if they are plain already.
    """

    encode: "Callable[[Any, list[FoundColumn]], Any]"
    decode: Callable[[Any, _Columns], Any]
    atoms: frozenset[type] = frozenset()


class FoundColumn(NamedTuple):
    """A column, and the form of its values."""

    column: Column[Any]
    form: Form


def encode(kind: type[_T], value: _T, columns: list[FoundColumn] | None = None) -> bytes:
    """Encodes a value; adds the columns that it finds to `columns`."""
    form = form_of(kind)  # type: ignore[arg-type]  # every type is hashable
    return dumps(form.encode(value, [] if columns is None else columns))


def decode(kind: type[_T], encoded: bytes, columns: _Columns = ()) -> _T:
    """Decodes a value, of which the columns have these plain values.

    Raises:
        DamageError: The bytes are not a value of this type in this version.
    """
    plain = loads(encoded)
    try:
        value: _T = form_of(kind).decode(plain, columns)  # type: ignore[arg-type]  # every type is hashable
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
        return _column(form_of(arguments[0]))
    return _class(origin)


def _class(kind: Any) -> Form:  # noqa: ANN401 - any class
    if Enum in kind.__mro__:
        return Form(lambda member, _: member.name, lambda name, _: kind[name])
    family = _family(kind) if kind.__module__ != "builtins" else {}
    if not family:
        raise TypeError(f"{kind} cannot be encoded")
    return _record(kind) if list(family) == [kind.__name__] else _one_of(lambda name: _record(family[name]))


def _atom(kinds: frozenset[type]) -> Form:
    def check(plain: object, _: _Columns) -> object:
        if type(plain) not in kinds:
            raise TypeError(f"{type(plain).__name__} in place of {' or '.join(sorted(k.__name__ for k in kinds))}")
        return plain

    return Form(lambda value, _: value, check, kinds)


def _union(members: tuple[Any, ...]) -> Form:
    forms = {member: form_of(member) for member in members}
    atoms = _atom(frozenset().union(*(form.atoms for form in forms.values())))
    by_name = {member.__name__: form for member, form in forms.items() if not form.atoms}
    if not by_name:
        return atoms
    other = _one_of(lambda name: by_name[name])
    return Form(
        lambda value, columns: value if type(value) in atoms.atoms else other.encode(value, columns),
        lambda plain, columns: (other if type(plain) is list else atoms).decode(plain, columns),
    )


def _one_of(form: Callable[[str], Form]) -> Form:
    """A pair of a class's name and a value."""

    def decode_pair(plain: Any, columns: _Columns) -> Any:  # noqa: ANN401 - any value
        name, value = plain
        return form(name).decode(value, columns)

    return Form(lambda value, found: [(name := type(value).__name__), form(name).encode(value, found)], decode_pair)


def _list(make: Callable[[Any], Any], form: Form) -> Form:
    return Form(
        lambda values, columns: encode_all(form, sorted(values) if make is set else values, columns),
        lambda plain, columns: make(decode_all(form, plain, columns)),
    )


def encode_all(form: Form, values: Collection[Any], columns: list[FoundColumn]) -> list[Any]:
    """Encodes values of one form."""
    return list(values) if form.atoms else [form.encode(value, columns) for value in values]


def decode_all(form: Form, plain: Any, columns: _Columns = ()) -> list[Any]:  # noqa: ANN401 - checked here
    """Decodes a list of values of one form."""
    if type(plain) is not list or (form.atoms and not form.atoms.issuperset(map(type, plain))):
        raise TypeError("a list of other values")
    return plain if form.atoms else [form.decode(value, columns) for value in plain]


def encode_slice(form: Form, values: list[Any], columns: list[FoundColumn]) -> Any:  # noqa: ANN401 - any plain value
    """Encodes a slice of a column. Ints are packed, which is many times faster than one by one."""
    if form.atoms != _ATOMS[int]:
        return encode_all(form, values, columns)
    try:
        return ["i", array("i", values).tobytes()]
    except OverflowError:
        return ["q", array("q", values).tobytes()]


def decode_slice(plain: Any) -> list[Any]:  # noqa: ANN401 - checked here, and with the column
    """Decodes a slice of a column as plain values."""
    match plain:
        case ["i" | "q" as code, bytes(packed)]:
            return array(code, packed).tolist()
        case list():
            return plain
    raise TypeError("not a slice of a column")


def _tuple(arguments: tuple[Any, ...]) -> Form:
    forms = [form_of(argument) for argument in arguments]
    return Form(
        lambda values, columns: [form.encode(value, columns) for form, value in zip(forms, values, strict=True)],
        lambda plain, columns: tuple(form.decode(v, columns) for form, v in zip(forms, plain, strict=True)),
    )


def _map(keys: Form, values: Form) -> Form:
    def decode_map(plain: Any, columns: _Columns) -> Any:  # noqa: ANN401 - any map
        found = decode_all(keys, list(plain.keys()), columns)
        return dict(zip(found, decode_all(values, list(plain.values()), columns), strict=True))

    return Form(
        lambda mapped, columns: dict(zip(mapped, encode_all(values, mapped.values(), columns), strict=True)),
        decode_map,
    )


def _column(form: Form) -> Form:
    def encode_column(column: Column[Any], found: list[FoundColumn]) -> int:
        found.append(FoundColumn(column, form))
        return len(found) - 1

    def decode_column(number: Any, columns: _Columns) -> Column[Any]:  # noqa: ANN401 - checked here
        if type(number) is not int:
            raise TypeError("not the number of a column")
        return Column(decode_all(form, columns[number], columns))

    return Form(encode_column, decode_column)


@cache
def _record(kind: Any) -> Form:  # noqa: ANN401 - any dataclass
    """A dataclass: its fields by name, except those left out."""
    hints = get_type_hints(kind)
    kept = [field for field in fields(kind) if LEFT_OUT not in field.metadata]
    forms = {field.name: form_of(hints[field.name]) for field in kept}
    late = [field.name for field in kept if not field.init]

    def decode_record(plain: Any, columns: _Columns) -> Any:  # noqa: ANN401 - an object of this class
        if type(plain) is not dict or plain.keys() != forms.keys():
            raise TypeError(f"{kind.__name__} has other fields")
        values = {name: form.decode(plain[name], columns) for name, form in forms.items()}
        later = [(name, values.pop(name)) for name in late]
        made = kind(**values)
        for name, value in later:
            setattr(made, name, value)
        return made

    return Form(
        lambda value, columns: {name: form.encode(getattr(value, name), columns) for name, form in forms.items()},
        decode_record,
    )


def _family(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - classes
    """The dataclasses among a class and its subclasses, by name."""
    name = kind.__name__
    found: dict[str, Any] = {name: kind} if is_dataclass(kind) else {}
    for subclass in kind.__subclasses__():  # a class that `dataclass` has replaced comes before its replacement
        found |= _family(subclass)
    return found
