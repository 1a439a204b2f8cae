"""What runs a scheduler's rounds: nothing at all in a replay, a model where one is driven.

1. A round is run after the service has answered it, and before the next is asked for. So all that the next step says
   was executed has been: what it filled may be hit by other sessions.
2. Requests are given in the order in which they were given room. One may hit what another before it fills in the same
   round.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool.client import Request, Session


@dataclass(slots=True, eq=False)
class Scheduled:
    """A running request, of which tokens [num_executed_tokens, request.num_computed_tokens) are to be computed.

    Attributes:
        request: Its tokens and block tables, null where nothing is looked at any more. To be read only.
        num_executed_tokens: Tokens whose keys and values are in the blocks: hits, and what earlier rounds computed.
    """

    request: Request
    num_executed_tokens: int = 0

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of this round; 0 if its budget left none."""
        return self.request.num_computed_tokens - self.num_executed_tokens

    @property
    def yields_token(self) -> bool:
        """Whether all tokens are computed after this round, so that the next is known."""
        return self.request.num_computed_tokens == self.request.num_tokens


class Executor(Protocol):
    """Runs rounds."""

    def execute(self, scheduled: Sequence[Scheduled], released: Iterable[Request]) -> Sequence[int]:
        """Runs a round; returns when it has run.

        Args:
            scheduled: All running requests.
            released: Those whose blocks this round gave back, finished or preempted. A preempted one may come back in
                a later round, with new tables.

        Returns:
            The next token of each request that yields one, in their order.
        """


@contextlib.contextmanager
def paced(step_seconds: float, session: Session) -> Iterator[Executor]:
    """Yields one that computes nothing, and takes its time for it, as a GPU does."""
    del session
    yield _Paced(step_seconds)


class NoModel:
    """Computes nothing. Any tokens do, as long as they differ between requests."""

    def execute(self, scheduled: Sequence[Scheduled], released: Iterable[Request]) -> Sequence[int]:
        """See `Executor`."""
        del released
        return [
            1_000_000 + (entry.request.number * 65_537 + entry.request.num_tokens) % 1_000_000_007
            for entry in scheduled
            if entry.yields_token
        ]


class _Paced(NoModel):
    """Takes as long as it is told for each round that computes something."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds

    def execute(self, scheduled: Sequence[Scheduled], released: Iterable[Request]) -> Sequence[int]:
        """See `Executor`."""
        if scheduled:
            time.sleep(self._step_seconds)
        return super().execute(scheduled, released)
