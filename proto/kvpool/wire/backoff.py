"""Pauses between attempts to reach another process. No clock: the caller waits."""

import random
from collections.abc import Callable
from typing import Final

_REQUESTED_JITTER: Final = 0.1
"""Maximum share by which a pause that the other process requested is extended."""

generator = random.Random()  # noqa: S311 - pauses are no secret
"""Draws the pauses. The generator of the module `random` belongs to the program, which may have seeded it."""


class Backoff:
    """The pauses of one loop: each is twice as long as the one before, up to a maximum, until `reset`.

    They are random, so that the clients of a server that restarts do not all return at once.

    Args:
        first_seconds: Least length of the first pause.
        max_seconds: Maximum of this length, to which it grows.
        jitter: Maximum share by which a pause is extended at random.
        draw: Draws from [0, 1); None to use `generator`.
    """

    def __init__(
        self,
        first_seconds: float,
        max_seconds: float,
        *,
        jitter: float = 1.0,
        draw: Callable[[], float] | None = None,
    ) -> None:
        self._first_seconds = self._seconds = first_seconds
        self._max_seconds = max_seconds
        self._jitter = jitter
        self._draw = draw or generator.random

    def next(self, requested_seconds: float | None = None) -> float:
        """Returns the next pause in seconds. One that the other process requests takes its place, as a minimum."""
        if requested_seconds is not None:
            return requested_seconds * (1 + _REQUESTED_JITTER * self._draw())
        seconds = self._seconds
        self._seconds = min(2 * seconds, self._max_seconds)
        return seconds * (1 + self._jitter * self._draw())

    def reset(self) -> None:
        """Begins with the first pause again, after a success."""
        self._seconds = self._first_seconds
