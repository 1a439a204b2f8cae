"""What schedulers are given to do: a share of a trace, or generated chats."""

import functools
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvpool.replay.trace import read_trace

_CHAT_ID: Final = re.compile("[./]")
"""Parts a chat's work id: its place, its number there, its turn."""


@dataclass(slots=True)
class Work:
    """A request to play.

    Attributes:
        work_id: Its id, unique in its workload.
        token_ids: The prompt.
        output_length: Tokens to generate.
    """

    work_id: str
    token_ids: list[int]
    output_length: int


class Workload(Protocol):
    """One scheduler's share of a workload."""

    def start(self) -> list[Work]:
        """The requests that are there from the start, in order."""

    def follow_up(self, done: Work, output: list[int]) -> Work | None:
        """The request that comes when another is done, if one does."""


@dataclass(frozen=True, slots=True)
class TraceShare:
    """Each n-th request of a trace, all there from the start.

    Attributes:
        path: The trace.
        limit: Most requests of the trace; None for all.
        index: Which share, [0, of).
        of: Number of shares.
        num_rounds: How often each request is played, again when it is done; None for ever.
    """

    path: Path
    limit: int | None
    index: int
    of: int
    num_rounds: int | None = 1

    def start(self) -> list[Work]:
        """See `Workload`."""
        trace = read_trace(self.path, self.limit)
        return [
            Work(f"r{i}.0", entry.token_ids(), entry.output_length)
            for i, entry in enumerate(trace)
            if i % self.of == self.index
        ]

    def follow_up(self, done: Work, output: list[int]) -> Work | None:
        """See `Workload`: the same request in the next round."""
        del output
        request, _, number = done.work_id.partition(".")
        if _is_last(int(number), self.num_rounds):
            return None
        return Work(f"{request}.{int(number) + 1}", done.token_ids, done.output_length)


@dataclass(frozen=True, slots=True)
class ChatShare:
    """Generated conversations over shared system prompts and documents, each turn's prompt holding all before it.

    Attributes:
        seed: Equal seeds give equal chats; the system prompts depend on nothing else, so that all shares have them.
        index: Which share.
        num_conversations: Conversations in this share.
        num_turns: Turns of each.
        num_rounds: Conversations that follow each other in the place of each; None for ever.
    """

    seed: int
    index: int
    num_conversations: int
    num_turns: int
    num_rounds: int | None = 1

    def start(self) -> list[Work]:
        """See `Workload`: the first turns."""
        return [self._first_turn(f"c{i}", 0) for i in range(self.num_conversations)]

    def follow_up(self, done: Work, output: list[int]) -> Work | None:
        """See `Workload`: the next turn of the conversation, or the first of the one that comes after it."""
        place, number, turn = _CHAT_ID.split(done.work_id)
        if int(turn) + 1 == self.num_turns:
            return None if _is_last(int(number), self.num_rounds) else self._first_turn(place, int(number) + 1)
        work_id = f"{place}.{number}/{int(turn) + 1}"
        own = self._source(work_id)
        history = done.token_ids + output + _tokens(own, own.randint(20, 120))
        return Work(work_id, history, own.randint(20, 100))

    def _first_turn(self, place: str, number: int) -> Work:
        work_id = f"{place}.{number}/0"
        own = self._source(work_id)
        return Work(
            work_id, own.choice(_contexts(self.seed)) + _tokens(own, own.randint(20, 120)), own.randint(20, 100)
        )

    def _source(self, work_id: str) -> random.Random:
        return random.Random(f"{self.seed}/{self.index}/{work_id}")  # noqa: S311 - a workload


@functools.cache
def _contexts(seed: int) -> list[list[int]]:
    shared = random.Random(seed)  # noqa: S311 - a workload
    systems = [_tokens(shared, 200 + 100 * i) for i in range(4)]
    return [system + _tokens(shared, shared.randint(100, 400)) for system in systems for _ in range(10)]


def _is_last(number: int, num_rounds: int | None) -> bool:
    return num_rounds is not None and number + 1 >= num_rounds


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(32_000) for _ in range(count)]
