"""What the options of several commands have in common. Cheap to import, for `kvpool health`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click

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


def enum_option(flag: str, kind: type[Enum], default: Enum | None, text: str) -> Option:
    """Makes an option whose value is a member of an enum, given by the member's value."""

    def member(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Enum | None:
        return None if value is None else kind(value)

    choice = click.Choice([each.value for each in kind])
    return click.option(flag, type=choice, default=default and default.value, callback=member, help=text)


@contextmanager
def usage_errors(prefix: str = "") -> Iterator[None]:
    """Reports a ValueError of the block as a usage error, whose message starts with `prefix`."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(f"{prefix}{error}") from error
