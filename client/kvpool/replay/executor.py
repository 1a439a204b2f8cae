"""Executors run a scheduler's rounds: in a replay they compute nothing, in an engine they run a model.

1. A round runs after the service has answered its step and before the next step is sent. Blocks that the next step
   reports as executed have therefore been written, and other sessions may hit them.
2. Requests are passed in the order of their allocation. A request may hit blocks that an earlier request fills in the
   same round.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool.client import Request


@dataclass(slots=True, eq=False)
class Scheduled:
    """A running request, whose tokens [num_executed_tokens, request.num_computed_tokens) are to be computed.

    Attributes:
        request: Its tokens and block tables; blocks that are no longer read are null. Read-only.
        num_executed_tokens: Tokens whose keys and values are in the blocks: hits and tokens of earlier rounds.
    """

    request: Request
    num_executed_tokens: int = 0

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of this round; 0 if the round's budget is used up."""
        return self.request.num_computed_tokens - self.num_executed_tokens

    @property
    def yields_token(self) -> bool:
        """Whether this round computes the last token, so that it yields the next one."""
        return self.request.num_computed_tokens == self.request.num_tokens


class Executor(Protocol):
    """Runs rounds."""

    def execute(self, scheduled: Sequence[Scheduled], released: Iterable[Request]) -> Sequence[int]:
        """Runs a round; returns when it is complete.

        Args:
            scheduled: All running requests.
            released: Requests whose blocks were freed in this round, finished or preempted. A preempted request may
                return in a later round, with new block tables.

        Returns:
            The next token of each request that yields one, in their order.
        """


class NoModel:
    """Computes nothing. Returns arbitrary tokens that differ between requests.

    Args:
        step_seconds: Time to sleep in each round that has requests, as if a GPU computed.
    """

    def __init__(self, step_seconds: float = 0.0) -> None:
        self._step_seconds = step_seconds

    def execute(self, scheduled: Sequence[Scheduled], released: Iterable[Request]) -> Sequence[int]:
        """See `Executor`."""
        del released
        if scheduled and self._step_seconds:
            time.sleep(self._step_seconds)
        return [
            1_000_000 + (entry.request.number * 65_537 + entry.request.num_tokens) % 1_000_000_007
            for entry in scheduled
            if entry.yields_token
        ]
