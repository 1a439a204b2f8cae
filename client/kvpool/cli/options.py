"""Groups of options. Cheap to import, for `kvpool health`."""

from collections.abc import Callable
from typing import Protocol, TypeVar

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
