"""Encodes graphs of the core's objects as bytes, and decodes them.

1. Only classes of the core are instantiated, by name, and only with the fields that they have in this version. Anything
   else is refused completely (`DamageError`). No code of the classes runs.
2. Object identity is kept: an object that occurs twice in the graph is decoded once.
3. The same graph gives the same bytes, independent of the order in its sets.
"""

import importlib
import inspect
import pkgutil
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache
from typing import Any, Final, Protocol, TypeVar

import cbor2

import kvpool.core
from kvpool.server.journal.frames import MALFORMED, DamageError

_Made = TypeVar("_Made")
_ATOMS: Final = frozenset((type(None), bool, int, float, str, bytes))
_EMPTY: Final[dict[str, Callable[[], Any]]] = {
    "l": list,
    "i": list,
    "b": list,
    "q": deque,
    "d": dict,
    "o": OrderedDict,
    "s": set,
}
"""Empty containers by their codes."""
_PACKED_FROM: Final = 4
"""Minimum length of a list that is packed; shorter ones are written element by element."""


class Messages(Protocol):
    """Encodes the protobuf messages that sessions remember."""

    def encode(self, message: object) -> tuple[int, bytes] | None:
        """Returns a message's kind and bytes; None for other objects."""

    def decode(self, kind: int, encoded: bytes) -> object:
        """Decodes a message.

        Raises:
            ValueError: The kind is unknown, or the bytes are not a message of this kind.
        """


@cache
def core_classes() -> dict[str, type[Any]]:
    """Classes of the core by module and name."""
    found: dict[str, type[Any]] = {}
    prefix = "kvpool.core."
    for module in pkgutil.walk_packages(kvpool.core.__path__, prefix):
        for name, member in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(member) and member.__module__ == module.name:
                found[f"{module.name.removeprefix(prefix)}.{name}"] = member
    return found


@cache
def _names() -> dict[type[Any], str]:
    return {kind: name for name, kind in core_classes().items()}


@cache
def _slots_of(name: str) -> tuple[str, ...] | None:
    """Fields of a class with slots; None for a class whose objects have a `__dict__`."""
    kind = core_classes()[name]
    if any("__slots__" not in vars(each) for each in kind.__mro__[:-1]):
        return None
    return tuple(sorted({name for each in kind.__mro__[:-1] for name in vars(each)["__slots__"]}))


class Encoder:
    """Encodes a graph as plain lists, numbers and bytes.

    Args:
        messages: Encodes the messages in the graph.
        reference: Returns a reference to an object that is not part of the graph; None for an object that is.
        field: Returns the value of a field, or a substitute to write in its place.

    Attributes:
        classes: Names of the encoded classes, each with its fields.
    """

    def __init__(
        self,
        messages: Messages,
        reference: Callable[[object], list[object] | None] = lambda _: None,
        field: Callable[[object, str], object] = getattr,
    ) -> None:
        self.classes: list[tuple[str, tuple[str, ...]]] = []
        self._messages = messages
        self._reference = reference
        self._field = field
        self._numbers: dict[type[Any], int] = {}
        self._memo: dict[int, int] = {}
        self._kept: list[object] = []  # keeps ids of encoded objects from being reused

    def node(self, value: object) -> object:  # noqa: PLR0911 - one return per kind
        """Encodes a value.

        Raises:
            TypeError: Values of this type cannot be encoded.
        """
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is tuple:
            return ["t", *map(self.node, value)]  # type: ignore[call-overload]
        if isinstance(value, Enum):
            return ["e", _names()[kind], value.name]
        referred = self._reference(value)
        if referred is not None:
            return ["r", *referred]
        known = self._memo.get(id(value))
        if known is not None:
            return ["m", known]
        message = self._messages.encode(value)
        if message:
            return ["w", *message]
        self._memo[id(value)] = len(self._kept)
        self._kept.append(value)
        return self._mutable(kind, value)

    def _mutable(self, kind: type[Any], value: Any) -> object:  # noqa: ANN401, PLR0911 - one return per kind
        if kind is list:
            return _packed(value) or ["l", *map(self.node, value)]
        if kind is deque:
            return ["q", *map(self.node, value)]
        if kind is dict or kind is OrderedDict:
            pairs = [self.node(each) for pair in value.items() for each in pair]
            return ["d" if kind is dict else "o", *pairs]
        if kind is set:
            return ["s", *map(self.node, sorted(value))]
        if kind is bytearray:
            return ["y", bytes(value)]
        if kind is array:
            return ["a", value.typecode, value.tobytes()]
        return self._instance(kind, value)

    def _instance(self, kind: type[Any], value: object) -> object:
        number = self._numbers.get(kind)
        if number is None:
            name = _names().get(kind)
            if name is None:
                raise TypeError(f"{kind.__name__} cannot be encoded")
            number = self._numbers[kind] = len(self.classes)
            slots = _slots_of(name)
            self.classes.append((name, tuple(sorted(vars(value))) if slots is None else slots))
        return ["c", number, *(self.node(self._field(value, name)) for name in self.classes[number][1])]


def _packed(values: list[Any]) -> list[object] | None:
    """Packs a list of ints or of bytes into one value, which is many times faster than element by element."""
    if len(values) < _PACKED_FROM:
        return None
    kinds = set(map(type, values))
    if kinds == {int}:
        try:
            return ["i", array("q", values).tobytes()]
        except OverflowError:
            return None
    if kinds == {bytes}:
        return ["b", *packed_bytes(values)]
    return None


def packed_bytes(values: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Packs byte strings: their lengths, and all of them joined."""
    return array("I", map(len, values)).tobytes(), b"".join(values)


def unpacked_bytes(lengths: bytes, joined: bytes) -> list[bytes]:
    """Reverses `packed_bytes`.

    Raises:
        TypeError: An argument is not bytes.
        ValueError: The lengths do not fit.
    """
    found, at = [], 0
    for length in array("I", lengths):
        found.append(joined[at : at + length])
        at += length
    if at != len(joined):
        raise ValueError
    return found


class Decoder:
    """Decodes a graph that an `Encoder` encoded.

    Args:
        messages: Decodes the messages in the graph.
        classes: The encoder's classes.
        refer: Returns the object of a reference.
        fields: Returns the fields of a class without slots in this version; None if the class is unknown.

    Raises:
        DamageError: A class does not exist in this version, or has other fields.
    """

    def __init__(
        self,
        messages: Messages,
        classes: Iterable[Sequence[Any]] = (),
        refer: Callable[[list[Any]], object] | None = None,
        fields: Callable[[str], tuple[str, ...] | None] = lambda _: None,
    ) -> None:
        self._messages = messages
        self._refer = refer
        self._memo: list[Any] = []
        self._classes: list[tuple[type[Any], list[str]]] = []
        for name, found in classes:
            kind = core_classes().get(name)
            slots = _slots_of(name) if kind else None
            if kind is None or (fields(name) if slots is None else slots) != tuple(found):
                raise DamageError(f"{name} differs in this version")
            self._classes.append((kind, list(found)))

    def value(self, node: Any) -> Any:  # noqa: ANN401 - any value
        """Decodes a value.

        Raises:
            DamageError: The node is malformed.
        """
        try:
            return self._value(node)
        except MALFORMED as error:
            raise DamageError("holds a malformed value") from error

    def decoded(self, kind: type[_Made]) -> list[_Made]:
        """Returns the objects of a class decoded so far, each once."""
        return [each for each in self._memo if isinstance(each, kind)]

    def _value(self, node: Any) -> Any:  # noqa: ANN401, PLR0911 - any value, one return per kind
        if type(node) is not list:
            return node
        code, *rest = node
        match code:
            case "t":
                return tuple(map(self._value, rest))
            case "e":
                return core_classes()[rest[0]][rest[1]]
            case "m":
                return self._memo[rest[0]]
            case "w":
                return self._messages.decode(*rest)
            case "r" if self._refer:
                return self._refer(rest)
            case "c":
                return self._instance(*rest)
        return self._container(code, rest)

    def _container(self, code: str, rest: list[Any]) -> Any:  # noqa: ANN401 - any container
        if code in {"y", "a"}:
            packed = bytearray(rest[0]) if code == "y" else array(*rest)
            self._memo.append(packed)
            return packed
        made: Any = _EMPTY[code]()
        self._memo.append(made)
        if code in {"d", "o"}:
            for at in range(0, len(rest), 2):
                key = self._value(rest[at])
                made[key] = self._value(rest[at + 1])
        else:
            (made.update if code == "s" else made.extend)(self._elements(code, rest))
        return made

    def _elements(self, code: str, rest: list[Any]) -> Iterable[Any]:
        if code == "i":
            return array("q", rest[0])
        return unpacked_bytes(*rest) if code == "b" else map(self._value, rest)

    def _instance(self, number: int, *nodes: Any) -> Any:  # noqa: ANN401 - an object of the core
        kind, names = self._classes[number]
        made = object.__new__(kind)
        self._memo.append(made)
        for name, node in zip(names, nodes, strict=True):
            object.__setattr__(made, name, self._value(node))
        return made


def dumps(node: object) -> bytes:
    """Encodes a node as CBOR."""
    return cbor2.dumps(node)


def loads(encoded: bytes) -> Any:  # noqa: ANN401 - any node
    """Decodes a node from CBOR.

    Raises:
        DamageError: The bytes are not CBOR.
    """
    try:
        return cbor2.loads(encoded)
    except (cbor2.CBORDecodeError, ValueError, TypeError) as error:
        raise DamageError("is not CBOR") from error
