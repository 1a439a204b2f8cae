"""Counts of a replay."""

from dataclasses import asdict, dataclass, field
from typing import Final

from kvpool.client import PoolInfo

_HOST_ROWS: Final = {
    "host_hit_tokens": "hit tokens in host memory",
    "copied_out_blocks": "blocks copied to host memory",
    "copied_in_blocks": "blocks copied from host memory",
    "lost_blocks": "blocks evicted before a copy",
}
"""Figures of host memory by their names in JSON, as people read them."""


@dataclass(slots=True)
class Counts:
    """Counts of one scheduler.

    Attributes:
        requests: Completed requests.
        rejected_requests: Requests that are too large for the pool.
        input_tokens: Tokens of all prompts.
        output_tokens: Tokens generated.
        hit_tokens: Prompt tokens found in the cache when a request was first admitted.
        readmitted_hit_tokens: Tokens found when a preempted request was admitted again.
        shared_hit_tokens: Those of hit_tokens that are in blocks which another session filled.
        preemptions: Number of times that a running request was preempted.
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

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the cache."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    def add(self, other: "Counts") -> None:
        """Adds another scheduler's counts."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(slots=True)
class Result:
    """Result of a replay.

    Attributes:
        counts: The sum of all schedulers.
        evicted_blocks: Cached blocks that the pool evicted during the replay.
        seconds: Its duration.
        host: Figures of host memory, by name; none without host memory.
    """

    counts: Counts
    evicted_blocks: int
    seconds: float
    host: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Returns the JSON object of `--json`."""
        return {
            **asdict(self.counts),
            "hit_rate": self.counts.hit_rate,
            "evicted_blocks": self.evicted_blocks,
            **self.host,
            "seconds": self.seconds,
            "steps_per_second": self.counts.steps / self.seconds if self.seconds else 0.0,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Returns the names and values of a table for people."""
        counts = self.counts
        rows = [
            ("requests", f"{counts.requests:,}"),
            ("prompt tokens", f"{counts.input_tokens:,}"),
            ("hit tokens", f"{counts.hit_tokens:,}"),
            ("hit rate", f"{counts.hit_rate:.2%}"),
            ("evictions", f"{self.evicted_blocks:,} blocks"),
        ]
        rows += [(_HOST_ROWS[name], f"{figure:,}") for name, figure in self.host.items()]
        if counts.output_tokens:
            shared = counts.shared_hit_tokens / counts.input_tokens if counts.input_tokens else 0.0
            rows += [
                ("generated tokens", f"{counts.output_tokens:,}"),
                ("preemptions", f"{counts.preemptions:,}"),
                ("reused from other sessions", f"{counts.shared_hit_tokens:,} tokens ({shared:.1%} of all prompts)"),
            ]
        if counts.rejected_requests:
            rows.append(("requests that do not fit the pool", f"{counts.rejected_requests:,}"))
        rows += [("steps per second", f"{counts.steps / self.seconds:,.0f}"), ("seconds", f"{self.seconds:.1f}")]
        return rows


def host_figures(before: PoolInfo, now: PoolInfo) -> dict[str, int]:
    """Returns how the figures of a pool's host memory have changed, by name; none without host memory."""
    if not now.HasField("host_memory"):
        return {}
    hits = now.prefix_cache.host_hits_tokens - before.prefix_cache.host_hits_tokens
    copies = (name for name in _HOST_ROWS if name.endswith("_blocks"))
    changes = {name: getattr(now.host_memory, name) - getattr(before.host_memory, name) for name in copies}
    return {"host_hit_tokens": hits, **changes}
