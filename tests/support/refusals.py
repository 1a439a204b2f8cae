"""Expects refusals: their kind, the field and the reason that they name, and that they change nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvpool.core.errors import InvalidArgumentError, KvpoolError

Kind = type[KvpoolError] | tuple[type[KvpoolError], ...]
Caught = pytest.ExceptionInfo[KvpoolError]


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
    before = state()
    with pytest.raises(kind, match=match) as caught:
        yield caught
    error = caught.value
    assert (error.field if field is not None else None, error.reason if reason is not None else None) == (field, reason)
    assert state() == before
