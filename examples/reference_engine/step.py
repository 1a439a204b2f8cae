"""What a scheduler tells the ranks of a step, and what they answer. Plain values, which need no torch."""

from dataclasses import dataclass, field

from kvpool.core.ids import TableLease


@dataclass(slots=True)
class RequestStep:
    """One request's part of a step: tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens).

    Attributes:
        request_id: Its id, unique in its session.
        is_new: Whether it starts here, or again after a preemption: all its tokens and blocks follow, and whatever the
            ranks knew of it is replaced.
        num_computed_tokens: Tokens whose keys, values and states are in its blocks.
        num_scheduled_tokens: Tokens to compute, at least 1.
        new_token_ids: Its tokens that the ranks do not know yet.
        new_block_ids: Of each group, the blocks added to its table. What lies behind a window may be null here, or stay
            listed: it is not read.
    """

    request_id: str
    is_new: bool
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_token_ids: list[int]
    new_block_ids: list[list[int]]


@dataclass(slots=True)
class StepInput:
    """One round of one scheduler.

    Attributes:
        lease: What the blocks were handed out under.
        session: Name of the scheduler's session on the ranks.
        requests: What to compute, in the order in which the requests were given room: one may start from what another
            before it leaves in this step.
        released: Requests that are running no more, finished or preempted. Goes first.
    """

    lease: TableLease
    session: str
    requests: list[RequestStep] = field(default_factory=list)
    released: list[str] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput:
    """What became of a step.

    Attributes:
        next_token_ids: The greedy choice for each request whose tokens are all computed, in the order of the requests.
        refusal: Why nothing was done, and nothing changed: the reason's constant and a sentence; None if it was done.
    """

    next_token_ids: list[int] = field(default_factory=list)
    refusal: tuple[str, str] | None = None
