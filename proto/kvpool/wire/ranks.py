"""Between the wire's messages of ranks and the core's values, both ways. Shared by server and workers."""

from typing import Final

from kvpool.core.errors import InvalidArgumentError, WrongStateError
from kvpool.core.planning.plan import KVCacheConfig, KVCacheTensor
from kvpool.core.ranks.messages import (
    Allocated,
    FenceSent,
    HeldTensors,
    PlanSent,
    Rank,
    RankGroupOptions,
    ReadySent,
    Registration,
    StatusSent,
)
from kvpool.core.specs.base import KVCacheSpec
from kvpool.v1 import pool_pb2, spec_pb2, worker_pb2
from kvpool.wire.pools import (
    group_from_proto,
    group_to_proto,
    hash_scheme_from_proto,
    hash_scheme_to_proto,
    pool_state_to_proto,
    reuse_order_from_proto,
    reuse_order_to_proto,
)
from kvpool.wire.protocol_version import PROTOCOL_VERSION
from kvpool.wire.specs import spec_from_proto, spec_to_proto

_SAME_NAME: Final = (
    "max_model_len",
    "auto_fit_max_model_len",
    "max_num_batched_tokens",
    "max_num_encoder_input_tokens",
    "num_blocks_override",
    "disable_hybrid_kv_cache_manager",
    "decode_context_parallel_size",
    "use_eagle",
    "enable_events",
)
_DEFAULTS: Final = {
    "max_num_batched_tokens": 2048,
    "max_num_encoder_input_tokens": 1500,
    "decode_context_parallel_size": 1,
}


def registration_from_proto(message: worker_pb2.Register) -> Registration:
    """Decodes what a rank says of itself; its numbers are checked by the core.

    Raises:
        WrongStateError: It speaks another version of the wire.
        InvalidArgumentError: A spec is malformed, a layer stands twice, or an enum is unknown; names the field.
    """
    if message.protocol_version != PROTOCOL_VERSION:
        raise WrongStateError(
            "PROTOCOL_VERSION",
            f"{message.protocol_version}, this server speaks {PROTOCOL_VERSION}; take both from one release",
            field="register.protocol_version",
        )
    layers: dict[str, KVCacheSpec] = {}
    for i, layer in enumerate(message.layers):
        where = f"register.layers[{i}]"
        if not layer.layer_name or layer.layer_name in layers:
            raise InvalidArgumentError(f"{where}.layer_name", f"{layer.layer_name!r} is empty or stands twice")
        if layer.spec.WhichOneof("kind") == "uniform_type":
            raise InvalidArgumentError(f"{where}.spec", "uniform type is for groups, not for a layer")
        layers[layer.layer_name] = spec_from_proto(f"{where}.spec", layer.spec)
    held = HeldTensors(message.held.epoch, message.held.num_blocks) if message.HasField("held") else None
    return Registration(
        rank=Rank(message.rank),
        world_size=message.world_size,
        boot_id=message.boot_id,
        options=_options_from_proto(message.options),
        layers=layers,
        available_bytes=message.available_bytes,
        held=held,
        device=message.device,
        host=message.host,
        pid=message.pid,
        last_epoch=message.last_epoch,
        fences=message.fences,
    )


def registration_to_proto(pool_name: str, registration: Registration) -> worker_pb2.Register:
    """Encodes what a rank says of itself."""
    held = registration.held
    return worker_pb2.Register(
        protocol_version=PROTOCOL_VERSION,
        pool_name=pool_name,
        rank=registration.rank,
        world_size=registration.world_size,
        boot_id=registration.boot_id,
        options=_options_to_proto(registration.options),
        layers=[
            spec_pb2.LayerSpec(layer_name=name, spec=spec_to_proto(spec)) for name, spec in registration.layers.items()
        ],
        available_bytes=registration.available_bytes,
        held=worker_pb2.HeldTensors(epoch=held.epoch, num_blocks=held.num_blocks) if held else None,
        device=registration.device,
        host=registration.host,
        pid=registration.pid,
        last_epoch=registration.last_epoch,
        fences=registration.fences,
    )


def _options_from_proto(message: worker_pb2.RankGroupOptions) -> RankGroupOptions:
    where = "register.options"
    order = message.reuse_order or pool_pb2.REUSE_ORDER_UNCACHED_FIRST
    return RankGroupOptions(
        **{name: getattr(message, name) or _DEFAULTS.get(name, getattr(message, name)) for name in _SAME_NAME},
        reuse_order=reuse_order_from_proto(f"{where}.reuse_order", order),
        enable_caching=not message.disable_caching,
        hash_scheme=hash_scheme_from_proto(f"{where}.hash_scheme", message.hash_scheme),
        retention_tokens=message.retention_tokens if message.HasField("retention_tokens") else None,
    )


def _options_to_proto(options: RankGroupOptions) -> worker_pb2.RankGroupOptions:
    return worker_pb2.RankGroupOptions(
        **{name: getattr(options, name) for name in _SAME_NAME},
        reuse_order=reuse_order_to_proto(options.reuse_order),
        disable_caching=not options.enable_caching,
        hash_scheme=hash_scheme_to_proto(options.hash_scheme, with_none_hash=True),
        retention_tokens=options.retention_tokens,
    )


def allocated_from_proto(message: worker_pb2.Initialized) -> Allocated:
    """Decodes what a rank got."""
    return Allocated(message.epoch, message.num_blocks, message.allocated_bytes)


def plan_to_proto(plan: PlanSent) -> worker_pb2.Plan:
    """Encodes what a rank is to allocate."""
    return worker_pb2.Plan(
        epoch=plan.epoch,
        num_blocks=plan.config.num_blocks,
        tensors=[
            worker_pb2.KvCacheTensor(size_bytes=tensor.size_bytes, shared_by=tensor.shared_by)
            for tensor in plan.config.tensors
        ],
        groups=[group_to_proto(group) for group in plan.config.groups],
        max_model_len=plan.max_model_len,
    )


def plan_from_proto(message: worker_pb2.Plan) -> KVCacheConfig:
    """Decodes what a rank is to allocate."""
    return KVCacheConfig(
        message.num_blocks,
        tuple(KVCacheTensor(tensor.size_bytes, tuple(tensor.shared_by)) for tensor in message.tensors),
        tuple(group_from_proto(f"plan.groups[{i}]", group) for i, group in enumerate(message.groups)),
    )


def ready_to_proto(ready: ReadySent) -> worker_pb2.Ready:
    """Encodes that the pool is open."""
    return worker_pb2.Ready(epoch=ready.epoch, num_blocks=ready.num_blocks, max_model_len=ready.max_model_len)


def fence_to_proto(fence: FenceSent) -> worker_pb2.Fence:
    """Encodes whose steps may run."""
    return worker_pb2.Fence(
        fence_sequence=fence.fence_sequence,
        epoch=fence.epoch,
        last_session_number=fence.last_session_number,
        live_session_numbers=fence.live_session_numbers,
    )


def status_to_proto(status: StatusSent) -> worker_pb2.PoolStatus:
    """Encodes how the pool is."""
    return worker_pb2.PoolStatus(
        state=pool_state_to_proto(status.state),
        epoch=status.epoch,
        absent_ranks=status.absent_ranks,
        heartbeat_sequence=status.heartbeat_sequence,
    )
