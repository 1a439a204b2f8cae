"""What schedulers are given to do: a share of a trace, or generated chats."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvpool.replay.trace import read_trace


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
    """

    path: Path
    limit: int | None
    index: int
    of: int

    def start(self) -> list[Work]:
        """See `Workload`."""
        trace = read_trace(self.path, self.limit)
        return [
            Work(f"r{i}", entry.token_ids(), entry.output_length)
            for i, entry in enumerate(trace)
            if i % self.of == self.index
        ]

    def follow_up(self, done: Work, output: list[int]) -> Work | None:
        """See `Workload`: nothing follows."""
        del done, output
        return None


@dataclass(frozen=True, slots=True)
class ChatShare:
    """Generated conversations over shared system prompts and documents, each turn's prompt holding all before it.

    Attributes:
        seed: Equal seeds give equal chats; the system prompts depend on nothing else, so that all shares have them.
        index: Which share.
        num_conversations: Conversations in this share.
        num_turns: Turns of each.
    """

    seed: int
    index: int
    num_conversations: int
    num_turns: int

    def start(self) -> list[Work]:
        """See `Workload`: the first turns."""
        shared = random.Random(self.seed)  # noqa: S311 - a workload
        systems = [_tokens(shared, 200 + 100 * i) for i in range(4)]
        contexts = [system + _tokens(shared, shared.randint(100, 400)) for system in systems for _ in range(10)]
        own = random.Random(f"{self.seed}/{self.index}")  # noqa: S311 - a workload
        return [
            Work(f"c{i}/0", own.choice(contexts) + _tokens(own, own.randint(20, 120)), own.randint(20, 100))
            for i in range(self.num_conversations)
        ]

    def follow_up(self, done: Work, output: list[int]) -> Work | None:
        """See `Workload`: the next turn of the conversation."""
        conversation, turn = done.work_id.split("/")
        if int(turn) + 1 >= self.num_turns:
            return None
        work_id = f"{conversation}/{int(turn) + 1}"
        own = random.Random(f"{self.seed}/{self.index}/{work_id}")  # noqa: S311 - a workload
        history = done.token_ids + output + _tokens(own, own.randint(20, 120))
        return Work(work_id, history, own.randint(20, 100))


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(32_000) for _ in range(count)]
