"""Between the core's values and bytes, both ways: any graph of the core's own objects, and nothing else.

1. Only classes of the core are made, by name, and only with the fields that they have here: what comes from other code
   is refused whole (`DamageError`), never half made. No code of theirs runs.
2. What is one object in the graph is one object again.
3. The same graph gives the same bytes, whatever the hash order of its sets.
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
from kvpool.server.journal.frames import NONSENSE, DamageError

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
"""By the code that it is written with: an empty container."""
_PACKED_FROM: Final = 4
"""Shorter lists of ints are written one by one."""


class Messages(Protocol):
    """Messages of the wire, which only `rpc` knows: sessions remember them."""

    def encode(self, message: object) -> tuple[int, bytes] | None:
        """A message's kind and bytes; None for what is none."""

    def decode(self, kind: int, encoded: bytes) -> object:
        """Makes the message again.

        Raises:
            ValueError: There is no such kind, or the bytes are no message of it.
        """


@cache
def core_classes() -> dict[str, type[Any]]:
    """The classes of the core, by module and name."""
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
    """The fields of a class whose objects have no others; None of one whose objects may have any."""
    kind = core_classes()[name]
    if any("__slots__" not in vars(each) for each in kind.__mro__[:-1]):
        return None
    return tuple(sorted({name for each in kind.__mro__[:-1] for name in vars(each)["__slots__"]}))


class Encoder:
    """Makes plain lists, numbers and bytes of a graph.

    Args:
        messages: Knows the messages in it.
        reference: Gives what an object is known by elsewhere, if it is no part of the graph; else None.
        field: Gives a field's value, or what to write in its place.

    Attributes:
        classes: Names of the classes met, each with its fields.
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
        self._kept: list[object] = []  # so that no other object gets the id of one that was met

    def node(self, value: object) -> object:  # noqa: PLR0911 - one for each kind
        """What stands for a value.

        Raises:
            TypeError: It is of no kind that can be written.
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

    def _mutable(self, kind: type[Any], value: Any) -> object:  # noqa: ANN401, PLR0911 - one for each kind
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
                raise TypeError(f"{kind.__name__} cannot be written down")
            number = self._numbers[kind] = len(self.classes)
            self.classes.append((name, _slots_of(name) or tuple(sorted(vars(value)))))
        return ["c", number, *(self.node(self._field(value, name)) for name in self.classes[number][1])]


def _packed(values: list[Any]) -> list[object] | None:
    """A list of ints, or of bytes, in one piece: many times faster than one by one."""
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
    """Bytes in one piece: their lengths, and all of them joined."""
    return array("I", map(len, values)).tobytes(), b"".join(values)


def unpacked_bytes(lengths: bytes, joined: bytes) -> list[bytes]:
    """Takes apart what `packed_bytes` made.

    Raises:
        TypeError: It is no such thing.
        ValueError: Likewise.
    """
    found, at = [], 0
    for length in array("I", lengths):
        found.append(joined[at : at + length])
        at += length
    if at != len(joined):
        raise ValueError
    return found


class Decoder:
    """Makes a graph again of what an `Encoder` made.

    Args:
        messages: Knows the messages in it.
        classes: The encoder's.
        refer: Finds what a reference stands for.
        fields: Gives the fields that objects of a class without slots have here; None if it is not known.

    Raises:
        DamageError: A class is not here, or has other fields here.
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
            expected = None if kind is None else _slots_of(name) or fields(name)
            if kind is None or expected != tuple(found):
                raise DamageError(f"{name} is not as it was")
            self._classes.append((kind, list(found)))

    def value(self, node: Any) -> Any:  # noqa: ANN401 - any value
        """Makes the value that a node stands for.

        Raises:
            DamageError: There is none.
        """
        try:
            return self._value(node)
        except NONSENSE as error:
            raise DamageError("holds what no value is written as") from error

    def made(self, kind: type[_Made]) -> list[_Made]:
        """The objects of a class that were made so far, each once."""
        return [each for each in self._memo if isinstance(each, kind)]

    def _value(self, node: Any) -> Any:  # noqa: ANN401, PLR0911 - any value, one for each kind
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
    """Writes a node."""
    return cbor2.dumps(node)


def loads(encoded: bytes) -> Any:  # noqa: ANN401 - any node
    """Reads a node.

    Raises:
        DamageError: It is none.
    """
    try:
        return cbor2.loads(encoded)
    except (cbor2.CBORDecodeError, ValueError, TypeError) as error:
        raise DamageError("holds no CBOR") from error
