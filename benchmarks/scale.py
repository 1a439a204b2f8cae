"""Amount of work of a run."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of work of a run.

    Attributes:
        num_rounds: Rounds of each section in which targets take turns.
        prompts_a_round: Prompts per target and round.
        steps_a_round: Decode steps, empty steps and echoes per target and round.
        num_blocks: Blocks of the pools.
        evicting_blocks: Blocks of the pools that are full of cached blocks.
        large_blocks: Blocks of the pool whose memory and construction are measured.
        num_constructions: Number of constructions, each in a fresh process.
        sessions: Numbers of concurrent sessions.
        pools: Numbers of concurrent pools, with one session each.
        session_processes: Maximum number of client processes for these sessions.
        session_rounds: Measurements per number of sessions.
        session_seconds: Time per measurement.
        session_requests: Running requests per session.
        pool_sizes_blocks: Sizes of pools.
        growth_rounds: Rounds of a decode step per growing parameter.
        growth_requests: Numbers of running requests.
        growth_prompt_blocks: Numbers of blocks per request.
        growth_groups: Numbers of groups.
    """

    num_rounds: int = 40
    prompts_a_round: int = 3
    steps_a_round: int = 8
    num_blocks: int = 100_000
    evicting_blocks: int = 100_000
    large_blocks: int = 1_000_000
    num_constructions: int = 3
    sessions: tuple[int, ...] = (1, 2, 8, 32)
    pools: tuple[int, ...] = (1, 2, 4)
    session_processes: int = 4
    session_rounds: int = 3
    session_seconds: float = 1.5
    session_requests: int = 64
    pool_sizes_blocks: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    growth_rounds: int = 15
    growth_requests: tuple[int, ...] = (16, 64, 256, 1024)
    growth_prompt_blocks: tuple[int, ...] = (16, 64, 256, 1024)
    growth_groups: tuple[int, ...] = (1, 2, 4, 8)


FULL: Final = Scale()
QUICK: Final = Scale(
    num_rounds=2,
    prompts_a_round=1,
    steps_a_round=2,
    evicting_blocks=5_000,
    num_constructions=1,
    pools=(1, 2),
    session_processes=2,
    session_rounds=1,
    session_seconds=0.1,
    session_requests=16,
    pool_sizes_blocks=(1_000, 10_000, 100_000),
    growth_rounds=2,
    growth_requests=(16, 64),
    growth_prompt_blocks=(16, 64),
    growth_groups=(1, 2),
)
"""Checks that everything works; not a measurement."""
