"""Plays a trace request by request: look up, allocate the whole prompt, cache, free."""

from collections.abc import Callable, Iterable

from kvpool.client import Outcome, Request, Session
from kvpool.replay.result import Counts
from kvpool.replay.trace import TraceRequest


def play_serially(session: Session, trace: Iterable[TraceRequest], advance: Callable[[], object]) -> Counts:
    """Plays prompts one after the other, a step each, which frees the one before; outputs are not counted.

    Args:
        session: The session to play on.
        trace: The requests.
        advance: Called after each.

    Returns:
        What was counted.
    """
    counts = Counts()
    before: Request | None = None
    for number, entry in enumerate(trace):
        counts.input_tokens += entry.input_length
        if entry.input_length > session.config.max_model_len:
            counts.rejected_requests += 1
            advance()
            continue
        request = session.request(f"r{number}", entry.token_ids())
        with session.step(executed_sequence=session.sequence) as step:
            if before:
                step.free(before)
            admitted = step.admit(request)
        before = request
        counts.steps += 1
        if admitted.outcome is Outcome.OK:
            counts.requests += 1
            counts.hit_tokens += admitted.num_hit_tokens
            counts.shared_hit_tokens += admitted.num_shared_hit_tokens
        else:
            counts.rejected_requests += 1
        advance()
    if before:
        session.mark_executed()
        session.free(before)
    return counts
