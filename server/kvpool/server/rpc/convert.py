"""Between the wire's messages and the core's values, both ways. Shared by server and client."""

from dataclasses import asdict, fields
from typing import Final, assert_never

from kvpool.server.core.allocator import PoolInfo
from kvpool.server.core.config import (
    HashScheme,
    KeyForm,
    KVCacheGroup,
    PoolConfig,
    ReuseOrder,
)
from kvpool.server.core.errors import InvalidArgumentError
from kvpool.server.core.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from kvpool.server.core.statistics import PrefixCacheStats
from kvpool.server.core.step import Step, StepResult
from kvpool.server.core.types import BlockHash, GroupId, PoolName
from kvpool.server.rpc.convert_spec import spec_from_proto, spec_to_proto
from kvpool.v1 import event_pb2, pool_pb2, step_pb2

_REUSE_ORDERS: Final = {
    pool_pb2.REUSE_ORDER_UNCACHED_FIRST: ReuseOrder.UNCACHED_FIRST,
    pool_pb2.REUSE_ORDER_LRU: ReuseOrder.LRU,
}
_KEY_FORMS: Final = {
    pool_pb2.KEY_FORM_UNSPECIFIED: KeyForm.TAGGED,
    pool_pb2.KEY_FORM_TAGGED: KeyForm.TAGGED,
    pool_pb2.KEY_FORM_PLAIN: KeyForm.PLAIN,
}


def config_from_proto(message: pool_pb2.PoolConfig) -> PoolConfig:
    """Decodes a pool's configuration; its numbers are checked by the core.

    Raises:
        InvalidArgumentError: An enum is unspecified or unknown, or a group has no spec.
    """
    if message.reuse_order not in _REUSE_ORDERS:
        raise InvalidArgumentError("config.reuse_order", f"{message.reuse_order} is unspecified or unknown")
    if message.hash_scheme.key_form not in _KEY_FORMS:
        raise InvalidArgumentError("config.hash_scheme.key_form", f"{message.hash_scheme.key_form} is unknown")
    return PoolConfig(
        name=PoolName(message.name),
        num_blocks=message.num_blocks,
        max_model_len=message.max_model_len,
        groups=tuple(
            KVCacheGroup(spec_from_proto(f"config.groups[{i}].spec", group.spec), tuple(group.layer_names))
            for i, group in enumerate(message.groups)
        ),
        reuse_order=_REUSE_ORDERS[message.reuse_order],
        enable_caching=not message.disable_caching,
        use_eagle=message.use_eagle,
        dcp_world_size=message.dcp_world_size or 1,
        enable_events=message.enable_events,
        hash_scheme=HashScheme(
            algorithm=message.hash_scheme.algorithm or "sha256_cbor",
            size_bytes=message.hash_scheme.size_bytes,
            none_hash=message.hash_scheme.none_hash,
            key_form=_KEY_FORMS[message.hash_scheme.key_form],
        ),
    )


def config_to_proto(config: PoolConfig, *, with_none_hash: bool) -> pool_pb2.PoolConfig:
    """Encodes a pool's configuration; its none_hash only for its sessions."""
    scheme = config.hash_scheme
    return pool_pb2.PoolConfig(
        name=config.name,
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        groups=[
            pool_pb2.KvCacheGroup(layer_names=group.layer_names, spec=spec_to_proto(group.spec))
            for group in config.groups
        ],
        reuse_order=next(wire for wire, order in _REUSE_ORDERS.items() if order is config.reuse_order),
        disable_caching=not config.enable_caching,
        use_eagle=config.use_eagle,
        dcp_world_size=config.dcp_world_size,
        enable_events=config.enable_events,
        hash_scheme=pool_pb2.HashScheme(
            algorithm=scheme.algorithm,
            size_bytes=scheme.hash_size_bytes,
            none_hash=scheme.none_hash if with_none_hash else b"",
            key_form=(pool_pb2.KEY_FORM_TAGGED if scheme.key_form is KeyForm.TAGGED else pool_pb2.KEY_FORM_PLAIN),
        ),
    )


def info_to_proto(info: PoolInfo) -> pool_pb2.PoolInfo:
    """Encodes what a pool is like; without its none_hash."""
    return pool_pb2.PoolInfo(
        config=config_to_proto(info.config, with_none_hash=False),
        epoch=info.epoch,
        free_blocks=info.free_blocks,
        cached_blocks=info.cached_blocks,
        usage=info.usage,
        prefix_cache=pool_pb2.PrefixCacheCounters(**asdict(info.prefix_cache)),
        recent_hit_rate=info.recent_hit_rate,
        evicted_blocks=info.evicted_blocks,
        preemptions=info.preemptions,
        sessions=info.sessions,
        requests=info.requests,
        event_sequence=info.event_sequence,
        sink_blocks=info.sink_blocks,
    )


def info_from_proto(message: pool_pb2.PoolInfo) -> PoolInfo:
    """Decodes what a pool is like."""
    names = [field.name for field in fields(PrefixCacheStats)]
    return PoolInfo(
        config=config_from_proto(message.config),
        epoch=message.epoch,
        free_blocks=message.free_blocks,
        cached_blocks=message.cached_blocks,
        usage=message.usage,
        prefix_cache=PrefixCacheStats(**{name: getattr(message.prefix_cache, name) for name in names}),
        recent_hit_rate=message.recent_hit_rate,
        evicted_blocks=message.evicted_blocks,
        preemptions=message.preemptions,
        sessions=message.sessions,
        requests=message.requests,
        event_sequence=message.event_sequence,
        sink_blocks=message.sink_blocks,
    )


def step_from_proto(message: step_pb2.Step) -> Step:
    """Decodes a step; the core checks it."""
    return Step(
        sequence=message.sequence,
        executed_sequence=message.executed_sequence,
        admission_budget_tokens=message.admission_budget_tokens,
        operations=list(message.operations),
        request_numbers=list(message.request_numbers),
        num_appended_tokens=list(message.num_appended_tokens),
        num_new_tokens=list(message.num_new_tokens),
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
        operations=step.operations,  # type: ignore[arg-type]
        request_numbers=step.request_numbers,
        num_appended_tokens=step.num_appended_tokens,
        num_new_tokens=step.num_new_tokens,
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
            removed = event_pb2.BlockRemoved(block_hash=event.block_hash, group_id=event.group_id)
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
                token_ids=tuple(stored.token_ids),
                block_size=stored.block_size,
                lora_name=stored.lora_name or None,
                group_id=GroupId(stored.group_id),
            )
        case "removed":
            return BlockRemoved(BlockHash(message.removed.block_hash), GroupId(message.removed.group_id))
        case "cleared":
            return AllBlocksCleared()
        case None:
            return None
