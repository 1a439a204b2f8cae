"""Checks of the token ids that callers give."""

import operator
from array import array
from collections.abc import Sequence
from typing import Final

from kvpool.core.errors import InvalidArgumentError

_MAX_TOKEN_ID: Final = 2**32 - 1


def check_token_ids(token_ids: Sequence[int]) -> None:
    """Raises InvalidArgumentError unless all are integers in [0, 2^32). Costs about 20 ns per token.

    Raises:
        InvalidArgumentError: Names the first that is not, as `token_ids[3]`.
    """
    try:
        array("I", token_ids)  # raises for what is no integer, and for what is out of range
        if operator.countOf(map(type, token_ids), int) == len(token_ids):  # array() takes booleans
            return
    except (TypeError, OverflowError, ValueError):
        pass
    for i, token_id in enumerate(token_ids):
        if not _is_token_id(token_id):
            raise InvalidArgumentError(f"token_ids[{i}]", f"{token_id!r} is not an integer in [0, {_MAX_TOKEN_ID}]")


def _is_token_id(value: object) -> bool:
    try:
        return not isinstance(value, bool) and 0 <= operator.index(value) <= _MAX_TOKEN_ID  # type: ignore[arg-type]
    except TypeError:
        return False
