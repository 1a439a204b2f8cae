"""Whether the pool of a rank is open, for callers that wait in any thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvpool.core.errors import AbortedError
from kvpool.gpu_worker.rank_pool import RankPool


class Readiness:
    """The pool of a rank while it is open, and how the rank ended. Thread-safe.

    Attributes:
        pool: The open pool; None while there is none.
        failure: The error that ended the rank; None for none.
        is_over: Whether the rank has ended.
    """

    def __init__(self, rank_name: str) -> None:
        self.pool: RankPool | None = None
        self.failure: Exception | None = None
        self.is_over = False
        self._rank_name = rank_name
        self._lock = threading.Lock()
        self._waiting: set[Future[RankPool]] = set()

    def future(self) -> Future[RankPool]:
        """The pool once it is open, or the error that ended the rank. May be cancelled."""
        future: Future[RankPool] = Future()
        future.add_done_callback(self._waiting.discard)
        with self._lock:
            self._waiting.add(future)
        self._answer()
        return future

    def open(self, pool: RankPool, admit: Callable[[], bool]) -> bool:
        """Opens the pool, unless `admit` returns that its epoch has passed; returns whether it is open.

        `close` waits for `admit`, so that no steps of an epoch are admitted after it has passed.
        """
        with self._lock:
            if not admit():
                return False
            self.pool = pool
        self._answer()
        return True

    def close(self) -> None:
        """Closes the pool: its epoch has passed."""
        with self._lock:
            self.pool = None

    def end(self) -> None:
        """The rank has ended; callers that wait get its failure, or an error that it has left."""
        with self._lock:
            self.is_over = True
        self._answer()

    def _answer(self) -> None:
        with self._lock:
            pool, failure = self.pool, self.failure
            if pool is None and not self.is_over:
                return
            waiting = tuple(self._waiting)
            self._waiting.clear()
        for future in filter(Future.set_running_or_notify_cancel, waiting):
            if failure:
                future.set_exception(failure)
            elif pool is None:
                future.set_exception(AbortedError("CLOSED", f"{self._rank_name} has left the pool"))
            else:
                future.set_result(pool)
