"""The metrics and labels that an expression of PromQL names."""

import re
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = re.compile(
    r"""
      \[[^]]*\] | \boffset\s+\w+ | \d[\w.]*
    | \b(?P<grouping>by|without|on|ignoring|group_left|group_right)\s*\((?P<labels>[^)]*)\)
    | (?P<name>[a-zA-Z_:][\w:]*) \s* (?P<call>\()? (?:\{(?P<matchers>[^}]*)\})?
    """,
    re.VERBOSE,
)
_MATCHER: Final = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_KEYWORDS: Final = frozenset({"and", "or", "unless", "bool", "sum", "min", "max", "avg", "count"})


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric of an expression.

    Attributes:
        name: Its name.
        values: By label: the values that a matcher of it names. Patterns are taken to be lists of values; variables of
            a dashboard are left out.
    """

    name: str
    values: dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Expression:
    """What an expression names.

    Attributes:
        selectors: Its metrics.
        kept: Labels that its result has at most; None for all labels of its metrics.
        grouped: Labels that it groups or joins by.
    """

    selectors: list[Selector]
    kept: set[str] | None
    grouped: set[str]


def parse(text: str) -> Expression:
    """Reads an expression."""
    selectors, kept, grouped = [], None, set()
    for token in _TOKEN.finditer(text):
        if token["grouping"]:
            labels = set(re.findall(r"\w+", token["labels"]))
            grouped |= labels
            if token["grouping"] == "by":
                kept = (kept or set()) | labels
        elif token["name"] and not token["call"] and token["name"] not in _KEYWORDS:
            matchers = _MATCHER.findall(token["matchers"] or "")
            selectors.append(Selector(token["name"], {label: _values(pattern) for label, pattern in matchers}))
    return Expression(selectors, kept, grouped)


def _values(pattern: str) -> list[str]:
    return [value for value in pattern.split("|") if not value.startswith("$")]
