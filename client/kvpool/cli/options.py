"""What the options of several commands have in common. Cheap to import, for `kvpool health`."""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import click
from click.core import ParameterSource

_FIRST_NAMES: Final = re.compile(r"[a-z][a-z_]*(, [a-z][a-z_]*)*(?=: )")
"""The names at the beginning of an error of a configuration, as `listen: ...` or `tls_cert, tls_key: ...`."""
_LATER_NAME: Final = re.compile(r"(?<![\w'\"/.-])[a-z]+(?:_[a-z]+)+(?![\w'\"/.-])")
"""A name in the rest of the text. A part of a path or of a quoted value is none."""
_MAX_NAMED: Final = 30
"""Most names that a hint lists."""

_CommandT = TypeVar("_CommandT", bound=Callable[..., object])


class Option(Protocol):
    """A decorator that adds options to a command: a result of `click.option` or `together`."""

    def __call__(self, command: _CommandT, /) -> _CommandT:
        """Adds the options."""


def together(*options: Option) -> Option:
    """Combines options into one decorator; `--help` lists them in this order."""

    def decorate(command: _CommandT) -> _CommandT:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def file_option(flag: str, text: str, **attributes: Any) -> Option:  # noqa: ANN401 - as click has it
    """Makes an option whose value is the path of a file."""
    return click.option(flag, type=click.Path(path_type=Path), metavar="FILE", help=text, **attributes)


def text_option(flag: str, metavar: str, text: str, **attributes: Any) -> Option:  # noqa: ANN401 - as click has it
    """Makes an option whose value is a text, by default an empty one, which is not shown."""
    attributes.setdefault("default", "")
    return click.option(flag, show_default=bool(attributes["default"]), metavar=metavar, help=text, **attributes)


def enum_option(flag: str, kind: type[Enum], default: Enum, text: str) -> Option:
    """Makes an option whose value is a member of an enum, given by the member's value."""

    def member(_ctx: click.Context, _param: click.Parameter, value: str) -> Enum:
        return kind(value)

    choice = click.Choice([each.value for each in kind])
    return click.option(flag, type=choice, default=default.value, callback=member, help=text)


@contextmanager
def usage_errors(prefix: str = "") -> Iterator[None]:
    """Reports a ValueError of the block as a usage error, whose message starts with `prefix`.

    Names of options are replaced: see `as_given`.
    """
    try:
        yield
    except ValueError as error:
        raise click.UsageError(as_given(f"{prefix}{error}")) from error


def as_given(message: str) -> str:
    """Replaces the names of parameters in an error by what the user wrote."""

    def written(found: re.Match[str]) -> str:
        return ", ".join(map(name_as_given, found[0].split(", ")))

    first = _FIRST_NAMES.match(message)
    start = written(first) if first else ""
    return start + _LATER_NAME.sub(written, message[first.end() if first else 0 :])


def name_as_given(name: str) -> str:
    """Returns how the user wrote the name of a parameter of the running command: as flag, variable, or key of a file.

    The flag if the value is the default. The name itself if the command has no such parameter.
    """
    ctx = click.get_current_context(silent=True)
    param = next((param for param in ctx.command.params if param.name == name), None) if ctx else None
    if ctx is None or param is None:
        return name
    if isinstance(param, click.Argument):
        return param.human_readable_name
    match ctx.get_parameter_source(name):
        case ParameterSource.ENVIRONMENT:
            variables = [param.envvar] if isinstance(param.envvar, str) else [*(param.envvar or ())]
            variables.append(f"{ctx.auto_envvar_prefix}_{name.upper()}")
            return next((variable for variable in variables if variable in os.environ), variables[-1])
        case ParameterSource.DEFAULT_MAP:
            return name
    return max(param.opts, key=len)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a hint for an error about an unknown word: the most similar known one, or all of them; empty if none."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return f"did you mean {close[0]}?"
    if len(names) > _MAX_NAMED:
        names[_MAX_NAMED:] = ["..."]
    return f"known: {', '.join(names)}" if names else ""
