"""Typed access to the keys of a parsed JSON object.

Rule 1: every error names its key by the dotted path, as the config spells it.
Rule 2: null counts as absent, as in the config.json of models.
Rule 3: code asks for a key by one name; `SPELLINGS` has the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_TOKENS
from kvpool.core.specs.base import MAX_DIMENSION

MAX_LAYERS: Final = 10_000
"""Maximum number of layers in a config."""

SPELLINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups"),
    "hidden_size": ("n_embd", "d_model"),
    "head_dim": ("attention_head_dim", "kv_channels", "hidden_size_per_head"),
    "sliding_window": ("sliding_window_size",),
    "sliding_window_pattern": ("_sliding_window_pattern", "global_attn_every_n_layers"),
    "attn_layer_indices": ("full_attn_idxs",),
}
"""Other spellings of a key, in the order in which they are looked for after the key itself."""

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
        renamed: Keys that stand for others in this reader, such as those of layers with a window.
        base: Reader of the keys that this one does not have.
    """

    values: Mapping[str, object]
    path: str = ""
    read: set[str] = field(default_factory=set, compare=False)
    renamed: Mapping[str, str] = field(default_factory=dict)
    base: "Reader | None" = None

    def field(self, key: str) -> str:
        """Path of a key, for errors."""
        where, name = self._find(key)
        return f"{where.path}.{name}" if where.path else name

    def has(self, key: str) -> bool:
        """Whether the key is present and not null, under any of its names."""
        where, name = self._find(key)
        if where.values.get(name) is None:
            return False
        where.read.add(name)
        return True

    def value(self, key: str) -> object:
        """The value of a key.

        Raises:
            InvalidArgumentError: It is absent.
        """
        if not self.has(key):
            raise InvalidArgumentError(self.field(key), "is missing from the model's config", reason="MISSING")
        where, name = self._find(key)
        return where.values[name]

    def dimension(self, key: str, default: int = 0) -> int:
        """A number of elements, heads or groups, [1, 2^24]; `default` if absent and `default` is not 0."""
        return self._integer(key, default, MAX_DIMENSION)

    def tokens(self, key: str, default: int = 0) -> int:
        """A number of tokens, at least 1; `default` if absent and `default` is not 0."""
        return self._integer(key, default, MAX_TOKENS)

    def layers(self, key: str, default: int = 0) -> int:
        """A number of layers, at least 1; `default` if absent and `default` is not 0."""
        return self._integer(key, default, MAX_LAYERS)

    def index(self, key: str, default: int | None = None) -> int:
        """The number of a layer, at least 0; `default` if absent, unless it is None."""
        if default is not None and not self.has(key):
            return default
        return _checked(self.field(key), self.value(key), 0, MAX_LAYERS)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        return typed(self.field(key), self.value(key) if self.has(key) else default, bool)

    def text(self, key: str, default: str | None = None) -> str:
        """A string; `default` if absent, unless it is None."""
        if default is not None and not self.has(key):
            return default
        return typed(self.field(key), self.value(key), str)

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        items = typed(self.field(key), self.value(key), list)
        return [typed(f"{self.field(key)}[{i}]", item, str) for i, item in enumerate(items)]

    def integers(self, key: str) -> list[int]:
        """A list of integers, each at least 0."""
        items = typed(self.field(key), self.value(key), list)
        return [_checked(f"{self.field(key)}[{i}]", item, 0, MAX_TOKENS) for i, item in enumerate(items)]

    def section(self, key: str) -> "Reader":
        """An object within this one."""
        return Reader(typed(self.field(key), self.value(key), dict), self.field(key))

    def sections(self, key: str) -> "list[Reader]":
        """Objects of a list within this one."""
        items = typed(self.field(key), self.value(key), list)
        paths = [f"{self.field(key)}[{i}]" for i in range(len(items))]
        return [Reader(typed(path, item, dict), path) for path, item in zip(paths, items, strict=True)]

    def with_names(self, names: Mapping[str, str]) -> "Reader":
        """Returns a reader that looks for other keys before the ones that it is asked for."""
        return replace(self, renamed=names, base=self)

    def over(self, base: "Reader") -> "Reader":
        """Returns a reader of this object that looks into another one for keys that this one does not have."""
        return replace(self, base=base)

    def _find(self, key: str) -> "tuple[Reader, str]":
        """Returns the reader and the name under which the key is present, else those under which to ask for it."""
        own = self.renamed.get(key)
        names = (own,) if own else () if self.renamed else (key, *SPELLINGS.get(key, ()))
        for name in names:
            if self.values.get(name) is not None:
                return self, name
        return self.base._find(key) if self.base else (self, own or key)  # noqa: SLF001 - of the same class

    def _integer(self, key: str, default: int, high: int) -> int:
        if default and not self.has(key):
            return default
        return _checked(self.field(key), self.value(key), 1, high)


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
