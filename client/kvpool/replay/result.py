"""What a replay counted."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counts:
    """What one scheduler did.

    Attributes:
        requests: Requests played to their end.
        rejected_requests: Requests that do not fit into the pool at all.
        input_tokens: Tokens of all prompts.
        output_tokens: Tokens generated.
        hit_tokens: Prompt tokens found in the cache when a request was first admitted.
        readmitted_hit_tokens: Tokens found when a preempted request was admitted again.
        shared_hit_tokens: Of hit_tokens, those of blocks that another session had filled.
        preemptions: Times that a running request's blocks were taken back.
        steps: Scheduling rounds.
    """

    requests: int = 0
    rejected_requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    readmitted_hit_tokens: int = 0
    shared_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0

    def add(self, other: "Counts") -> None:
        """Adds another scheduler's counts."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(slots=True)
class Result:
    """What a whole replay counted.

    Attributes:
        counts: All schedulers' counts.
        by_session: Each scheduler's; None for one that died.
        evicted_blocks: Cached blocks that the pool gave up to make room meanwhile.
        seconds: How long it took.
    """

    counts: Counts
    by_session: list[Counts | None]
    evicted_blocks: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found for each prompt token."""
        return self.counts.hit_tokens / self.counts.input_tokens if self.counts.input_tokens else 0.0

    @property
    def failed_sessions(self) -> int:
        """Schedulers that died."""
        return self.by_session.count(None)

    def as_json(self) -> dict[str, object]:
        """The result as `--json` prints it."""
        return {
            **asdict(self.counts),
            "hit_rate": self.hit_rate,
            "evicted_blocks": self.evicted_blocks,
            "seconds": self.seconds,
            "steps_per_second": self.counts.steps / self.seconds if self.seconds else 0.0,
            "sessions": len(self.by_session),
            "failed_sessions": self.failed_sessions,
        }
