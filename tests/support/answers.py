"""Calls of clients with short deadlines, on a machine that may be too busy to answer in time."""

import time
from collections.abc import Callable
from typing import TypeVar

from kvpool.client import DeadlineError
from support.waiting import DEADLINE_SECONDS

_T = TypeVar("_T")


def until_answered(call: Callable[[], _T]) -> _T:
    """Makes a call again until it does not end at its deadline without an answer. Raises the error of the answer.

    A client repeats a refused call until its deadline, so that a test of a refusal needs a short one. Connecting counts
    for the deadline too.
    """
    due_seconds = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            return call()
        except DeadlineError:
            if time.monotonic() >= due_seconds:
                raise
