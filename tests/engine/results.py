"""Inputs and outputs of run_engine.py and follow_engine.py, as JSON."""

from typing import TypeAlias, TypedDict


class Specification(TypedDict):
    """An engine and what it is to do, one workload after the other.

    Attributes:
        llm: Arguments of `vllm.LLM`.
        workloads: Names; see workloads.py.
    """

    llm: dict[str, object]
    workloads: list[str]


class Answer(TypedDict):
    """One of the answers to a request: as far as it came, if it was aborted (then without a finish_reason)."""

    token_ids: list[int]
    logprobs: list[float]
    num_cached_tokens: int | None
    finish_reason: str | None


class Outcome(TypedDict):
    """What a workload led to.

    Attributes:
        requests: For each request in order, its answers in order.
        resets: Whether each reset was done.
        counters: By how much vLLM's own counters grew.
        steps: After each step, how many requests ran and how many waited, and the part of the pool in use.
        tables: A digest of the block tables of all running requests after each step.
    """

    requests: list[list[Answer]]
    resets: list[bool]
    counters: dict[str, float]
    steps: list[tuple[int, int, float]]
    tables: str


class Results(TypedDict):
    """What an engine is, and what came of each of its workloads."""

    scheduler: str
    num_blocks: int
    groups: list[tuple[str, int]]
    outcomes: dict[str, Outcome]


class Script(TypedDict):
    """Input of follow_engine.py.

    Attributes:
        llm: Arguments of `vllm.LLM`.
        workload: Its name; see workloads.py.
        pauses: Steps before which the engine waits for a command to continue.
    """

    llm: dict[str, object]
    workload: str
    pauses: list[int]


class NewTokens(TypedDict):
    """What a step adds to an answer: tokens, each with its logprob."""

    num_cached_tokens: int | None
    tokens: list[tuple[int, float]]


StepLine: TypeAlias = dict[str, NewTokens]
"""What a step adds, by request."""
