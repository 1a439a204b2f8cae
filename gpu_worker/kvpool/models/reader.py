"""Typed access to the keys of a parsed JSON object.

Rule 1: every error names its key by the dotted path.
Rule 2: null counts as absent, as in the config.json of models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_TOKENS
from kvpool.core.specs.base import MAX_DIMENSION

MAX_LAYERS: Final = 10_000
"""Maximum number of layers in a config."""

_T = TypeVar("_T")
_NAMES: Final[dict[type, str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class Reader:
    """An object of a config, and its path.

    Attributes:
        values: The keys and values of the object.
        path: Dotted path of the object; empty for the whole file.
        read: The keys that were present when they were read or looked for.
    """

    values: Mapping[str, object]
    path: str = ""
    read: set[str] = field(default_factory=set, compare=False)

    def field(self, key: str) -> str:
        """Path of a key, for errors."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether the key is present and not null."""
        if self.values.get(key) is None:
            return False
        self.read.add(key)
        return True

    def dimension(self, key: str, default: int = 0) -> int:
        """A number of elements, heads or groups, [1, 2^24]; `default` if absent and `default` is not 0."""
        return self._integer(key, default, MAX_DIMENSION)

    def tokens(self, key: str, default: int = 0) -> int:
        """A number of tokens, at least 1; `default` if absent and `default` is not 0."""
        return self._integer(key, default, MAX_TOKENS)

    def layers(self, key: str, default: int = 0) -> int:
        """A number of layers, at least 1; `default` if absent and `default` is not 0."""
        return self._integer(key, default, MAX_LAYERS)

    def index(self, key: str) -> int:
        """The number of a layer, at least 0."""
        return _checked(self.field(key), self._required(key), 0, MAX_LAYERS)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        return typed(self.field(key), self.values[key] if self.has(key) else default, bool)

    def text(self, key: str, default: str | None = None) -> str:
        """A string; `default` if absent, unless it is None."""
        if default is not None and not self.has(key):
            return default
        return typed(self.field(key), self._required(key), str)

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        items = typed(self.field(key), self._required(key), list)
        return [typed(f"{self.field(key)}[{i}]", item, str) for i, item in enumerate(items)]

    def integers(self, key: str) -> list[int]:
        """A list of integers, each at least 0."""
        items = typed(self.field(key), self._required(key), list)
        return [_checked(f"{self.field(key)}[{i}]", item, 0, MAX_TOKENS) for i, item in enumerate(items)]

    def section(self, key: str) -> "Reader":
        """An object within this one."""
        return Reader(typed(self.field(key), self._required(key), dict), self.field(key))

    def _required(self, key: str) -> object:
        if not self.has(key):
            raise InvalidArgumentError(self.field(key), "is missing from the model's config", reason="MISSING")
        return self.values[key]

    def _integer(self, key: str, default: int, high: int) -> int:
        if default and not self.has(key):
            return default
        return _checked(self.field(key), self._required(key), 1, high)


def typed(field: str, value: object, kind: type[_T]) -> _T:
    """Returns `value` if it has this type; true and false are not integers.

    Raises:
        InvalidArgumentError: It has another type.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidArgumentError(field, f"is {type(value).__name__}, not {_NAMES[kind]}")
    return value


def _checked(field: str, value: object, low: int, high: int) -> int:
    return check_range(field, typed(field, value, int), low, high)
