"""The changes of a session as messages: steps, and unary calls, which mean a step with one operation.

A change has one form of bytes, `change_bytes`. A retry is recognized by them, and the journal and the standbys execute
them again.
"""

from typing import Final, TypeAlias, assert_never, get_args

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.errors import InvalidArgumentError, NotFoundError
from kvpool.core.ids import BlockId, RequestId, RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Operation, Step
from kvpool.v1 import allocator_pb2, step_pb2
from kvpool.wire.steps import step_from_proto

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

Change: TypeAlias = step_pb2.Step | UnaryChange
"""A change of a session."""

_KINDS: Final[dict[bytes, type[Change]]] = {kind.DESCRIPTOR.name.encode(): kind for kind in get_args(Change)}


def change_bytes(change: Change) -> bytes:
    """Encodes a change with its type. A change of another type never has the same bytes."""
    return b"%b:%b" % (change.DESCRIPTOR.name.encode(), change.SerializeToString(deterministic=True))


def change_from_bytes(encoded: bytes) -> Change:
    """Decodes a change.

    Raises:
        DecodeError: The bytes are not of the type that they name.
        LookupError: They name no type of a change.
    """
    name, _, message = encoded.partition(b":")
    return _KINDS[name].FromString(message)


def step_from_change(pool: KVCacheManager, session: Session, message: Change) -> Step:
    """Translates a change into a step; the core validates it. A unary look-up or allocation declares a new request.

    A change that is sent again becomes a step without operations: the core answers it by its number and its bytes.

    Raises:
        InvalidArgumentError: The promised hit cannot be the result of a look-up.
        NotFoundError: The request is new, and the change does not declare requests.
    """
    if message.sequence <= session.sequence:
        return Step(message.sequence)
    match message:
        case step_pb2.Step():
            step = step_from_proto(message)
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
    where, stated_tokens = "computed.groups[{}].block_ids".format, message.computed.num_tokens
    hit_tokens = pool.check_computed_blocks(where, promised, stated_tokens) if promised else 0
    if message.computed.num_tokens != hit_tokens:
        raise InvalidArgumentError(
            "computed.num_tokens", f"{message.computed.num_tokens}, the blocks hold {hit_tokens}"
        )
    if any(promised):
        step.num_block_ids = [len(ids) for ids in promised]
        step.block_ids = [block_id for ids in promised for block_id in ids]
    return step
