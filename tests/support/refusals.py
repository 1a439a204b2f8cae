"""Expects refusals: their kind, the field and the reason that they name, and that they change nothing.

Without pytest, as the pages of the site are made with the same worlds, where it is not installed.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from kvpool.core.errors import InvalidArgumentError, KvpoolError

Kind: TypeAlias = type[KvpoolError] | tuple[type[KvpoolError], ...]


class Caught:
    """The error that was raised in a block of `refused`, after its end."""

    value: KvpoolError


@contextmanager
def refused(
    kind: Kind = InvalidArgumentError,
    *,
    field: str | None = None,
    reason: str | None = None,
    match: str | None = None,
    state: Callable[[], object] = lambda: None,
) -> Iterator[Caught]:
    """Expects an error of a kind that leaves `state` as it was; of what is None, anything may be said."""
    before, caught = state(), Caught()
    try:
        yield caught
    except kind as raised:
        error = caught.value = raised
    else:
        raise AssertionError("not refused")
    assert match is None or re.search(match, str(error)), str(error)
    assert (error.field if field is not None else None, error.reason if reason is not None else None) == (field, reason)
    assert state() == before
