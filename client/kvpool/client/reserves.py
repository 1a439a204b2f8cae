"""Blocks that a request holds in reserve: slots for tokens that it may compute without a message to the service.

1. The service gives a request more blocks than it needs, while enough are free. The session keeps them apart: an engine
   gets each block with the token that needs it, as without a reserve, so that a reserve can be given back.
2. What was computed in them is reported later: at most `REPORT_STEPS` steps after a block is full, and with the message
   that frees the request.
3. A reserve is given back if a request of the session is refused blocks, in the message that asks again; and if the
   service says that another session was refused.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from kvpool.client.request import Request

REPORT_STEPS: Final = 4
"""Steps between two reports of full blocks. More would let other sessions find them later; fewer need more messages."""

Spans = Sequence[tuple[int, int, int]]
"""Of each group whose blocks belong to tokens: its index, tokens per block, and number of blocks without tokens."""


def hand_over(request: Request, spans: Spans, num_tokens: int) -> list[list[int]]:
    """Moves blocks from the reserve of a request to its block tables: those of its first `num_tokens` tokens.

    Returns:
        The blocks, per group.
    """
    new: list[list[int]] = [[] for _ in request.block_ids]
    for i, count in enumerate(_num_needed(request, spans, num_tokens)):
        new[i] = request.reserve_ids[i][:count]
        del request.reserve_ids[i][:count]
        request.block_ids[i] += new[i]
    set_held(request, spans, request.held_tokens)
    return new


def take_slots(request: Request, spans: Spans, num_slots: int, max_tokens: int) -> list[list[int]]:
    """Moves the blocks that a request lacks for some more tokens from its reserve to its tables. See `hand_over`."""
    return hand_over(request, spans, min(request.num_computed_tokens + num_slots, max_tokens))


def note_run_tokens(requests: Sequence[Request], num_in_flight_tokens: Sequence[int]) -> None:
    """Records how many tokens of each request have certainly run, before it is allocated a slot."""
    for request, num_in_flight in zip(requests, num_in_flight_tokens or [0] * len(requests), strict=True):
        request.num_run_tokens = max(request.num_computed_tokens - num_in_flight, 0)


def cut(request: Request, spans: Spans, num_tokens: int) -> None:
    """Takes the blocks after those of its first `num_tokens` tokens out of the reserve of a request."""
    for i, count in enumerate(_num_needed(request, spans, num_tokens)):
        del request.reserve_ids[i][count:]


def _num_needed(request: Request, spans: Spans, num_tokens: int) -> list[int]:
    """Number of blocks in reserve that the first `num_tokens` tokens need, per group; all without a slot per token."""
    counts = [len(ids) for ids in request.reserve_ids]
    for group_id, span, num_extra in spans if counts else ():
        counts[group_id] = max(-(-num_tokens // span) + num_extra - len(request.block_ids[group_id]), 0)
    return counts


def set_held(request: Request, spans: Spans, held_tokens: int) -> None:
    """Sets the number of tokens for which a request holds slots, and which of them are in its block tables."""
    given = [(len(request.block_ids[group_id]) - num_extra) * span for group_id, span, num_extra in spans]
    request.held_tokens, request.credit_tokens = held_tokens, min([held_tokens, *given])


def restore_held(request: Request, spans: Spans, max_tokens: int) -> None:
    """Has a request use all of its reserve again, of which it was to give blocks back."""
    tables, reserves = request.block_ids, request.reserve_ids
    slots = [(len(tables[i]) + len(reserves[i]) - num_extra) * span for i, span, num_extra in spans if reserves]
    set_held(request, spans, min([max_tokens, *slots]))


def due(requests: Iterable[Request], reserve_tokens: int, block_size: int) -> list[Request]:
    """Those requests that have filled a block which the service does not know, or whose reserve is low.

    A `block_size` of 0 stands for blocks that the service need not know.
    """
    low, size = reserve_tokens // 2 + REPORT_STEPS, block_size
    found = []
    for request in requests:
        computed = request.num_computed_tokens
        known = min(computed, len(request.token_ids))  # a block has a hash when its tokens are known
        is_full = size and known // size > min(request.num_sent_computed_tokens, request.num_sent_tokens) // size
        if is_full or request.held_tokens - computed < low:
            found.append(request)
    return found
