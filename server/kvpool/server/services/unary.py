"""The unary calls as steps of one operation, so that there is one way into the core."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvpool.core.allocator import Allocator
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import InvalidArgumentError, KvpoolError, NotFoundError
from kvpool.core.ids import BlockId, RequestId, RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Outcome, Step, StepResult
from kvpool.server.limits.config import Limits
from kvpool.server.services.remembered import Sent, remembered
from kvpool.v1 import allocator_pb2

_INDEX: Final = re.compile(r"\[\d+\]$")
_FIELDS: Final = {
    "request_numbers": "request.request_number",
    "request_ids": "request.request_id",
    "lora_names": "request.lora_name",
    "num_appended_tokens": "request.num_appended_tokens",
    "block_hashes": "request.block_hashes",
    "token_ids": "request.token_ids",
}


class Change(Sent, Protocol):
    """What all messages that change a session have."""

    session_id: str
    sequence: int


Build = Callable[[KVCacheManager, Session], Step]
"""Makes the step of a unary change."""


@dataclass(slots=True)
class Answer:
    """The result of a step's last operation.

    Attributes:
        outcome: How it ended.
        num_hit_tokens: Tokens found.
        counts: Its entries of num_prefix_blocks, group by group.
        hit_blocks: The hit's blocks, group by group.
        new_blocks: The new blocks, group by group.
    """

    outcome: Outcome
    num_hit_tokens: int
    counts: list[int]
    hit_blocks: list[list[int]]
    new_blocks: list[list[int]]


def run(  # noqa: PLR0913, PLR0917 - what a change is made of
    allocator: Allocator, limits: Limits, pool: KVCacheManager, session: Session, message: Change, build: Build
) -> Answer:
    """Runs a unary change: once, however often it is sent.

    Args:
        allocator: All pools and sessions.
        limits: What the step may be.
        pool: The session's pool.
        session: The session.
        message: What was sent.
        build: Makes the step, if the change is new; called only then.

    Returns:
        What the step's last operation got.

    Raises:
        KvpoolError: As the step's; its field is named as in the message.
    """
    source = remembered(message)
    result = session.remembered_result(message.sequence, source)
    if result is not None:
        allocator.count_retry(pool)
    else:
        step = build(pool, session)
        try:
            limits.check_step(pool, session, step)
            result = allocator.apply(pool, session, step, source)
        except KvpoolError as error:
            error.rename_field(_field_name(error, step))
            raise
    return _last(result, len(pool.config.groups))


def step_for(
    session: Session,
    message: Change,
    update: allocator_pb2.RequestUpdate,
    operation: Operation,
    *,
    may_declare: bool = False,
) -> Step:
    """Makes a step of one operation on a request, after an ADD if the request is new and may be declared.

    Raises:
        NotFoundError: The request is new and may not.
    """
    number = session.request_number(RequestId(update.request_id))
    step = Step(
        sequence=message.sequence,
        operations=[operation],
        block_hashes=update.block_hashes,
        token_ids=list(update.token_ids),
    )
    if number is not None:
        step.request_numbers = [number]
        step.num_appended_tokens = [update.num_appended_tokens]
        return step
    if not may_declare:
        raise NotFoundError(
            "REQUEST_NOT_FOUND", f"the session has no request {update.request_id!r}", field="request.request_id"
        )
    chosen = RequestNumber(update.request_number) or session.free_number()
    step.operations = [Operation.ADD, operation]
    step.request_numbers = [chosen, chosen]
    step.num_appended_tokens = [update.num_appended_tokens, 0]
    step.request_ids = [update.request_id]
    step.lora_names = [update.lora_name]
    return step


def allocation(pool: KVCacheManager, session: Session, message: allocator_pb2.AllocateSlotsRequest) -> Step:
    """Makes the step of AllocateSlots.

    Raises:
        InvalidArgumentError: The promised hit is not what a look-up can have answered.
        NotFoundError: As `step_for`.
    """
    step = step_for(session, message, message.request, Operation.ALLOCATE, may_declare=True)
    step.num_new_tokens = _last_only(step, message.num_new_tokens)
    step.num_rejected_tokens = _last_only(step, message.num_rejected_tokens)
    step.num_lookahead_tokens = _last_only(step, message.num_lookahead_tokens)
    step.num_encoder_tokens = _last_only(step, message.num_encoder_tokens)
    step.delay_cache_blocks = [False] * (len(step.operations) - 1) + [message.delay_cache_blocks]
    promised = [[BlockId(block_id) for block_id in group.block_ids] for group in message.computed.groups]
    num_groups = len(pool.config.groups)
    if len(promised) not in (0, num_groups):
        raise InvalidArgumentError("computed.groups", f"{len(promised)} groups, the pool has {num_groups}")
    hit_tokens = pool.check_computed_blocks("computed.groups[{}].block_ids".format, promised) if promised else 0
    if message.computed.num_tokens != hit_tokens:
        raise InvalidArgumentError(
            "computed.num_tokens", f"{message.computed.num_tokens}, the blocks hold {hit_tokens}"
        )
    if any(promised):
        step.num_block_ids = [0] * (len(step.operations) - 1) * len(promised) + [len(ids) for ids in promised]
        step.block_ids = [block_id for ids in promised for block_id in ids]
    return step


def caching(session: Session, message: allocator_pb2.CacheBlocksRequest) -> Step:
    """Makes the step of CacheBlocks."""
    step = step_for(session, message, message.request, Operation.CACHE)
    step.num_new_tokens = [message.num_computed_tokens]
    return step


def eviction(message: allocator_pb2.EvictBlocksRequest, num_groups: int) -> Step:
    """Makes the step of EvictBlocks."""
    return Step(
        message.sequence,
        operations=[Operation.EVICT],
        num_block_ids=[len(message.block_ids)] + [0] * (num_groups - 1),
        block_ids=list(message.block_ids),
    )


def _last_only(step: Step, value: int) -> list[int]:
    """A column with a value for the step's last operation."""
    return [0] * (len(step.operations) - 1) + [value]


def groups(blocks: list[list[int]]) -> list[allocator_pb2.GroupBlocks]:
    """Encodes block ids, group by group."""
    return [allocator_pb2.GroupBlocks(block_ids=block_ids) for block_ids in blocks]


def _last(result: StepResult, num_groups: int) -> Answer:
    # Only the last operation of these steps has blocks in its answer.
    def of_last(column: list[int]) -> list[int]:
        return column[-num_groups:] if column else [0] * num_groups

    queue = iter(result.block_ids)
    counts = of_last(result.num_prefix_blocks)
    has_ids = bool(result.num_hit_tokens)
    hit_blocks = [[next(queue) for _ in range(count if has_ids else 0)] for count in counts]
    new_blocks = [[next(queue) for _ in range(count)] for count in of_last(result.num_new_blocks)]
    return Answer(
        Outcome(result.outcomes[-1] if result.outcomes else 0),
        result.num_hit_tokens[-1] if result.num_hit_tokens else 0,
        counts,
        hit_blocks,
        new_blocks,
    )


def _field_name(error: KvpoolError, step: Step) -> str:
    column, operation = _INDEX.sub("", error.field), step.operations[-1]
    if column == "num_new_tokens" and operation == Operation.CACHE:
        return "num_computed_tokens"
    if column in ("num_block_ids", "block_ids"):
        return "block_ids" if operation == Operation.EVICT else "computed"
    return _FIELDS.get(column, column)
