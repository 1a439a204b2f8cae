"""Messages between a scheduler and the ranks for one step. Plain values without torch."""

from dataclasses import dataclass, field

from kvpool.core.ids import TableLease


@dataclass(slots=True)
class RequestStep:
    """One request's part of a step: tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens).

    Attributes:
        request_id: Id of the request, unique in its session.
        is_new: Whether the request starts, or restarts after a preemption: all its tokens and blocks follow, and
            replace earlier state on the ranks.
        num_computed_tokens: Number of tokens whose keys, values and states are in its blocks.
        num_scheduled_tokens: Number of tokens to compute, at least 1.
        new_token_ids: Tokens that the ranks have not received yet.
        new_block_ids: Per group, the blocks appended to its table. Blocks behind a window may be null or stay listed;
            they are not read.
    """

    request_id: str
    is_new: bool
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_token_ids: list[int]
    new_block_ids: list[list[int]]


@dataclass(slots=True)
class StepInput:
    """One step of one scheduler.

    Attributes:
        lease: The lease under which the blocks were handed out.
        session: Name of the scheduler's session on the ranks.
        requests: Requests to compute, in allocation order: a request may read blocks that an earlier one fills in this
            step.
        released: Requests that finished or were preempted. Handled first.
    """

    lease: TableLease
    session: str
    requests: list[RequestStep] = field(default_factory=list)
    released: list[str] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput:
    """The result of a step.

    Attributes:
        next_token_ids: The greedy next token of each request whose tokens are all computed, in request order.
        refusal: Reason and message if the step was refused, which changes nothing; None if the step ran.
    """

    next_token_ids: list[int] = field(default_factory=list)
    refusal: tuple[str, str] | None = None
