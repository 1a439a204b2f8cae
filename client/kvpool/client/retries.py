"""When a call that has failed is repeated, and for how long. No I/O.

1. Calls that can be repeated without effect are repeated: reads, and changes that the server recognizes by a key or a
   number. Those of operators are not: rule 5.
2. A call is repeated only where this can help: the server cannot be reached (UNAVAILABLE), or it sends a retry time.
   Any other error is raised at once. If no time is left for another attempt, or for its answer, the last error before
   is raised.
3. A call without an answer after 2 s is logged, once. A host that drops packets causes no error by then, so the first
   attempt can be limited to that time.
4. Pauses grow and are random, so that the clients of a restarted server do not all return at once. A retry time that
   the server sends is the minimum.
5. An operator's client waits only if it has several servers and none of them is the primary. It logs nothing, and
   raises all other errors at once.
"""

import logging
import time
from typing import Final

from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.wire.backoff import Backoff
from kvpool.wire.errors import DeadlineError
from kvpool.wire.seeds import NO_PRIMARY

LOGGED_AFTER_SECONDS: Final = 2.0
"""Time without an answer after which a call is logged."""

_log = logging.getLogger("kvpool.client")


class Retries:
    """The pauses between the attempts of one call."""

    def __init__(self, started_seconds: float, deadline_seconds: float, *, is_patient: bool = True) -> None:
        """Begins after the first failure.

        Args:
            started_seconds: When the call began, by the monotonic clock.
            deadline_seconds: Time limit of all attempts together.
            is_patient: See rule 5.
        """
        self._started_seconds = started_seconds
        self._due_seconds = started_seconds + deadline_seconds
        self._is_patient = is_patient
        self._last: KvpoolError | None = None
        """The error of the attempt before."""
        self._backoff = Backoff(0.05, 0.5)
        self._is_logged = False

    @property
    def left_seconds(self) -> float:
        """Time that is left for the next attempt."""
        return self._due_seconds - time.monotonic()

    def pause_seconds(self, error: KvpoolError, *, was_cut: bool = False) -> float:
        """Returns the pause before the next attempt.

        Args:
            error: The error of the attempt.
            was_cut: Whether the attempt had less time than the call.

        Raises:
            KvpoolError: The error if another attempt cannot help, or there is no time for it; the error before if the
                time was too short for an answer.
        """
        last, self._last = self._last, error
        if last and isinstance(error, DeadlineError):
            raise last from None
        can_help = was_cut or isinstance(error, UnavailableError) or error.retry_seconds is not None
        if not (can_help if self._is_patient else error.reason == NO_PRIMARY):
            raise error
        pause_seconds = self._backoff.next(error.retry_seconds or None)
        if pause_seconds >= self.left_seconds:
            raise error
        waited_seconds = time.monotonic() - self._started_seconds
        if self._is_patient and not self._is_logged and (was_cut or waited_seconds >= LOGGED_AFTER_SECONDS):
            self._is_logged = True
            fields = {"reason": error.reason, "error": str(error), "seconds": round(waited_seconds, 1)}
            _log.warning("no answer yet, trying again", extra=fields)
        return pause_seconds
