"""What schedulers are given to generate. Needs no torch, for a scheduler has none."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.replay.workload import Work


@dataclass(slots=True)
class Prompts:
    """A scheduler's workload: prompts that are all there from the start.

    Attributes:
        prompts: Tokens of each.
        output_length: Tokens to generate for each.
        outputs: What was generated so far: prompt and output, in the order in which requests finished.
    """

    prompts: Sequence[list[int]]
    output_length: int
    outputs: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def start(self) -> list[Work]:
        """See `kvpool.replay.workload.Workload`."""
        return [Work(f"r{i}", prompt, self.output_length) for i, prompt in enumerate(self.prompts)]

    def follow_up(self, done: Work, output: list[int]) -> Work | None:
        """See `kvpool.replay.workload.Workload`: nothing follows."""
        self.outputs.append((done.token_ids, list(output)))
        return None
