"""Workloads of schedulers: generated chats."""

import functools
import random
import re
from dataclasses import dataclass
from typing import Final, Protocol

_CHAT_ID: Final = re.compile("[./]")
"""Separators in the work id of a chat: place, number of the conversation in that place, turn."""


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
        """Returns the initial requests, in order."""

    def follow_up(self, done: Work, output: list[int]) -> Work | None:
        """Returns the request that follows a completed one, if any."""


@dataclass(frozen=True, slots=True)
class ChatShare:
    """Generated conversations over shared system prompts and documents. A turn's prompt contains all earlier turns.

    Attributes:
        seed: Equal seeds give equal chats. System prompts depend on the seed alone, so that all shares have them.
        index: Number of this share.
        num_conversations: Concurrent conversations in this share.
        num_turns: Turns per conversation.
        num_rounds: Successive conversations in each place; None continues without end.
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
        """See `Workload`: the next turn of the conversation, or the first turn of the next conversation."""
        place, number, turn = _CHAT_ID.split(done.work_id)
        if int(turn) + 1 == self.num_turns:
            is_last = self.num_rounds is not None and int(number) + 1 >= self.num_rounds
            return None if is_last else self._first_turn(place, int(number) + 1)
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


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(32_000) for _ in range(count)]
