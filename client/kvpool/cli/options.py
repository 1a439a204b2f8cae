"""Options that stand together. Cheap to import, for `kvpool health`."""

from collections.abc import Callable
from typing import Protocol, TypeVar

_CommandT = TypeVar("_CommandT", bound=Callable[..., object])


class Option(Protocol):
    """What `click.option` makes: adds one option to a command, or what `together` makes of several."""

    def __call__(self, command: _CommandT, /) -> _CommandT:
        """Adds it."""


def together(*options: Option) -> Option:
    """Makes one of several options; `--help` lists them in this order."""

    def decorate(command: _CommandT) -> _CommandT:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
