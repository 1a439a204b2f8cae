"""Workload of a scheduler. Does not import torch, which schedulers do not need."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.replay.workload import Work


@dataclass(slots=True)
class Prompts:
    """A workload of prompts that are all available from the start.

    Attributes:
        prompts: Tokens of each prompt.
        output_length: Number of tokens to generate per prompt.
        outputs: Prompt and output of each finished request, in order of completion.
    """

    prompts: Sequence[list[int]]
    output_length: int
    outputs: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def start(self) -> list[Work]:
        """See `kvpool.replay.workload.Workload`."""
        return [Work(f"r{i}", prompt, self.output_length) for i, prompt in enumerate(self.prompts)]

    def follow_up(self, done: Work, output: list[int]) -> Work | None:
        """See `kvpool.replay.workload.Workload`: there is no follow-up."""
        self.outputs.append((done.token_ids, list(output)))
        return None
