"""Unary changes of a session: each is a step with one operation, so that the core has a single way in."""

import re
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, TypeVar, assert_never

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.commands import ApplyStep, Command, CountRetry
from kvpool.core.errors import InvalidArgumentError, KvpoolError, NotFoundError
from kvpool.core.ids import BlockId, RequestId, RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Outcome, Step, StepResult
from kvpool.server.limits.budgets import Budgets
from kvpool.v1 import allocator_pb2
from kvpool.wire import steps as wire_steps

_ResultT = TypeVar("_ResultT")
_INDEX: Final = re.compile(r"\[\d+\]$")
_FIELDS: Final = {
    "request_numbers": "request.request_number",
    "request_ids": "request.request_id",
    "lora_names": "request.lora_name",
    "num_appended_tokens": "request.num_appended_tokens",
    "block_hashes": "request.block_hashes",
    "token_ids": "request.token_ids",
}

RequestChange: TypeAlias = (
    allocator_pb2.GetComputedBlocksRequest
    | allocator_pb2.AllocateSlotsRequest
    | allocator_pb2.CacheBlocksRequest
    | allocator_pb2.FreeRequest
    | allocator_pb2.GetCommonPrefixBlocksRequest
)
"""A unary change of one request."""

UnaryChange: TypeAlias = RequestChange | allocator_pb2.EvictBlocksRequest | allocator_pb2.ResetPrefixCacheRequest
"""A unary change of a session."""


class Execute(Protocol):
    """See `Executor.execute`."""

    def __call__(self, command: Command[_ResultT], /) -> _ResultT:
        """Executes a command now."""


@dataclass(slots=True)
class UnaryResult:
    """The result of a step's only operation.

    Attributes:
        outcome: Outcome of the operation.
        num_hit_tokens: Length of the hit in tokens.
        num_prefix_blocks: Blocks of the hit or of the common prefix, per group.
        hit_blocks: Block ids of the hit, per group.
        new_blocks: Ids of newly allocated blocks, per group.
    """

    outcome: Outcome
    num_hit_tokens: int
    num_prefix_blocks: list[int]
    hit_blocks: list[list[int]]
    new_blocks: list[list[int]]


def run(
    execute: Execute, budgets: Budgets, pool: KVCacheManager, session: Session, message: UnaryChange
) -> UnaryResult:
    """Applies a unary change once, however often it is sent.

    Args:
        execute: Executes a command.
        budgets: Checks the step.
        pool: The session's pool.
        session: The session.
        message: The change.

    Raises:
        KvpoolError: An error of the step; its field is named as in the message.
    """
    source = wire_steps.retry_key(message)
    result = session.remembered_result(message.sequence, source)
    if result is not None:
        execute(CountRetry(session.current_id))
    else:
        step = step_from_change(pool, session, message)
        try:
            budgets.check_step(pool, session, step)
            result = execute(ApplyStep(session.current_id, step, source))
        except KvpoolError as error:
            error.rename_field(_field_name(error, step))
            raise
    return _result(result, len(pool.config.groups))


def step_from_change(pool: KVCacheManager, session: Session, message: UnaryChange) -> Step:
    """Translates a new unary change into a step with one operation. A look-up or an allocation declares a new request.

    Raises:
        InvalidArgumentError: The promised hit cannot be the result of a look-up.
        NotFoundError: The request is new, and the change does not declare requests.
    """
    match message:
        case allocator_pb2.GetComputedBlocksRequest():
            operation = Operation.LOOKUP_COUNTED_AT_ONCE if message.counted_at_once else Operation.LOOKUP
            operation = Operation.LOOKUP_UNCOUNTED if message.uncounted else operation
            step = _request_step(session, message, operation, may_declare=True)
        case allocator_pb2.AllocateSlotsRequest():
            step = _allocation_step(pool, session, message)
        case allocator_pb2.CacheBlocksRequest():
            step = _request_step(session, message, Operation.CACHE)
            step.num_new_tokens = [message.num_computed_tokens]
        case allocator_pb2.FreeRequest():
            step = _request_step(session, message, Operation.PREEMPT if message.preempted else Operation.FREE)
        case allocator_pb2.GetCommonPrefixBlocksRequest():
            step = _request_step(session, message, Operation.COMMON_PREFIX)
        case allocator_pb2.EvictBlocksRequest():
            step = Step(message.sequence, operations=[Operation.EVICT], block_ids=list(message.block_ids))
            step.num_block_ids = [len(message.block_ids)] + [0] * (len(pool.config.groups) - 1)
        case allocator_pb2.ResetPrefixCacheRequest():
            step = Step(message.sequence, operations=[Operation.RESET])
        case _:
            assert_never(message)
    return step


def _request_step(session: Session, message: RequestChange, operation: Operation, *, may_declare: bool = False) -> Step:
    update = message.request
    number = session.request_number(RequestId(update.request_id))
    step = Step(
        sequence=message.sequence,
        operations=[operation],
        num_appended_tokens=[update.num_appended_tokens],
        block_hashes=update.block_hashes,
        token_ids=list(update.token_ids),
    )
    if number is None:
        if not may_declare:
            unknown = f"the session has no request {update.request_id!r}"
            raise NotFoundError("REQUEST_NOT_FOUND", unknown, field="request.request_id")
        number = RequestNumber(update.request_number) or session.free_number()
        step.declares = [True]
        step.request_ids = [update.request_id]
        step.lora_names = [update.lora_name]
    step.request_numbers = [number]
    return step


def _allocation_step(pool: KVCacheManager, session: Session, message: allocator_pb2.AllocateSlotsRequest) -> Step:
    step = _request_step(session, message, Operation.ALLOCATE, may_declare=True)
    step.num_new_tokens = [message.num_new_tokens]
    step.num_rejected_tokens = [message.num_rejected_tokens]
    step.num_lookahead_tokens = [message.num_lookahead_tokens]
    step.num_encoder_tokens = [message.num_encoder_tokens]
    step.delay_cache_blocks = [message.delay_cache_blocks]
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
        step.num_block_ids = [len(ids) for ids in promised]
        step.block_ids = [block_id for ids in promised for block_id in ids]
    return step


def _result(result: StepResult, num_groups: int) -> UnaryResult:
    queue = iter(result.block_ids)
    num_prefix_blocks = result.num_prefix_blocks or [0] * num_groups
    has_ids = bool(result.num_hit_tokens)
    hit_blocks = [[next(queue) for _ in range(count if has_ids else 0)] for count in num_prefix_blocks]
    new_blocks = [[next(queue) for _ in range(count)] for count in result.num_new_blocks or [0] * num_groups]
    return UnaryResult(
        Outcome(result.outcomes[0] if result.outcomes else 0),
        result.num_hit_tokens[0] if result.num_hit_tokens else 0,
        num_prefix_blocks,
        hit_blocks,
        new_blocks,
    )


def groups(blocks: list[list[int]]) -> list[allocator_pb2.GroupBlocks]:
    """Encodes block ids per group."""
    return [allocator_pb2.GroupBlocks(block_ids=block_ids) for block_ids in blocks]


def _field_name(error: KvpoolError, step: Step) -> str:
    """Name of the message's field that became the column that an error names."""
    column, operation = _INDEX.sub("", error.field), step.operations[-1]
    if column == "num_new_tokens" and operation == Operation.CACHE:
        return "num_computed_tokens"
    if column in ("num_block_ids", "block_ids"):
        return "block_ids" if operation == Operation.EVICT else "computed"
    return _FIELDS.get(column, column)
