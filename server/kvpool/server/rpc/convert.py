"""Between the wire's messages and the core's values, both ways. Shared by server and client."""

from typing import assert_never

from kvpool.server.core.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, packed_token_ids
from kvpool.server.core.step import Step, StepResult
from kvpool.server.core.types import BlockHash, GroupId
from kvpool.v1 import event_pb2, step_pb2


def step_from_proto(message: step_pb2.Step) -> Step:
    """Decodes a step; the core checks it."""
    return Step(
        sequence=message.sequence,
        executed_sequence=message.executed_sequence,
        admission_budget_tokens=message.admission_budget_tokens,
        num_quiet_allocations=message.num_quiet_allocations,
        operations=list(message.operations),
        request_numbers=list(message.request_numbers),
        num_appended_tokens=list(message.num_appended_tokens),
        num_new_tokens=list(message.num_new_tokens),
        num_taken_tokens=list(message.num_taken_tokens),
        num_rejected_tokens=list(message.num_rejected_tokens),
        num_lookahead_tokens=list(message.num_lookahead_tokens),
        num_encoder_tokens=list(message.num_encoder_tokens),
        delay_cache_blocks=list(message.delay_cache_blocks),
        num_block_ids=list(message.num_block_ids),
        block_ids=list(message.block_ids),
        block_hashes=message.block_hashes,
        token_ids=list(message.token_ids),
        request_ids=list(message.request_ids),
        lora_names=list(message.lora_names),
    )


def step_to_proto(step: Step, session_id: str) -> step_pb2.Step:
    """Encodes a step."""
    return step_pb2.Step(
        session_id=session_id,
        sequence=step.sequence,
        executed_sequence=step.executed_sequence,
        admission_budget_tokens=step.admission_budget_tokens,
        num_quiet_allocations=step.num_quiet_allocations,
        operations=step.operations,  # type: ignore[arg-type]
        request_numbers=step.request_numbers,
        num_appended_tokens=step.num_appended_tokens,
        num_new_tokens=step.num_new_tokens,
        num_taken_tokens=step.num_taken_tokens,
        num_rejected_tokens=step.num_rejected_tokens,
        num_lookahead_tokens=step.num_lookahead_tokens,
        num_encoder_tokens=step.num_encoder_tokens,
        delay_cache_blocks=step.delay_cache_blocks,
        num_block_ids=step.num_block_ids,
        block_ids=step.block_ids,
        block_hashes=step.block_hashes,
        token_ids=step.token_ids,
        request_ids=step.request_ids,
        lora_names=step.lora_names,
    )


def result_to_proto(result: StepResult) -> step_pb2.StepResult:
    """Encodes a step's result."""
    return step_pb2.StepResult(
        sequence=result.sequence,
        free_blocks=result.free_blocks,
        outcomes=result.outcomes,  # type: ignore[arg-type]
        num_hit_tokens=result.num_hit_tokens,
        num_shared_hit_tokens=result.num_shared_hit_tokens,
        num_new_tokens=result.num_new_tokens,
        num_prefix_blocks=result.num_prefix_blocks,
        num_new_blocks=result.num_new_blocks,
        block_ids=result.block_ids,
    )


def result_from_proto(message: step_pb2.StepResult) -> StepResult:
    """Decodes a step's result."""
    return StepResult(
        sequence=message.sequence,
        free_blocks=message.free_blocks,
        outcomes=list(message.outcomes),
        num_hit_tokens=list(message.num_hit_tokens),
        num_shared_hit_tokens=list(message.num_shared_hit_tokens),
        num_new_tokens=list(message.num_new_tokens),
        num_prefix_blocks=list(message.num_prefix_blocks),
        num_new_blocks=list(message.num_new_blocks),
        block_ids=list(message.block_ids),
    )


def event_to_proto(event: BlockEvent) -> event_pb2.BlockEvent:
    """Encodes a block event."""
    match event:
        case BlockStored():
            stored = event_pb2.BlockStored(
                block_hashes=event.block_hashes,
                parent_block_hash=event.parent_block_hash or b"",
                token_ids=event.token_ids,
                block_size=event.block_size,
                lora_name=event.lora_name or "",
                group_id=event.group_id,
            )
            return event_pb2.BlockEvent(stored=stored)
        case BlockRemoved():
            removed = event_pb2.BlockRemoved(
                block_hash=event.block_hash, group_id=event.group_id, copies_left=event.copies_left
            )
            return event_pb2.BlockEvent(removed=removed)
        case AllBlocksCleared():
            return event_pb2.BlockEvent(cleared=event_pb2.AllBlocksCleared())
        case _:
            assert_never(event)


def event_from_proto(message: event_pb2.BlockEvent) -> BlockEvent | None:
    """Decodes a block event; None for a kind that only a newer server knows."""
    match message.WhichOneof("event"):
        case "stored":
            stored = message.stored
            return BlockStored(
                block_hashes=tuple(map(BlockHash, stored.block_hashes)),
                parent_block_hash=BlockHash(stored.parent_block_hash) if stored.parent_block_hash else None,
                token_ids=packed_token_ids(stored.token_ids),
                block_size=stored.block_size,
                lora_name=stored.lora_name or None,
                group_id=GroupId(stored.group_id),
            )
        case "removed":
            removed = message.removed
            return BlockRemoved(BlockHash(removed.block_hash), GroupId(removed.group_id), removed.copies_left)
        case "cleared":
            return AllBlocksCleared()
        case None:
            return None
