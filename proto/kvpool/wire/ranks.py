"""Converts the messages of WorkerService to and from core values."""

from typing import Final, assert_never

from google.protobuf.message import DecodeError

from kvpool.core.errors import InvalidArgumentError, WrongStateError, check_range, fields_renamed
from kvpool.core.ids import MAX_BLOCKS
from kvpool.core.planning.plan import KVCacheConfig, KVCacheTensor
from kvpool.core.ranks import messages
from kvpool.core.specs.base import KVCacheSpec
from kvpool.v1 import pool_pb2, spec_pb2, worker_pb2
from kvpool.wire import pools as wire_pools
from kvpool.wire import specs as wire_specs
from kvpool.wire.errors import malformed_error
from kvpool.wire.fields import field_values
from kvpool.wire.protocol_version import PROTOCOL_VERSION

_REGISTRATION_CONVERTED: Final = ("options", "layers", "held", "declared")
_OPTIONS_CONVERTED: Final = (
    *("reuse_order", "enable_caching", "hash_scheme", "retention_tokens"),
    *("prefill_context_parallel_size", "mamba_cache_mode"),  # ranks keep their defaults
)


def registration_from_proto(message: worker_pb2.Register) -> messages.Registration:
    """Decodes the registration of a rank. The core validates its numbers.

    Raises:
        WrongStateError: The worker uses another protocol version.
        InvalidArgumentError: A spec is malformed, a layer appears twice, or an enum is unknown; names the field.
    """
    if message.protocol_version != PROTOCOL_VERSION:
        raise WrongStateError(
            "PROTOCOL_VERSION",
            f"{message.protocol_version}; this server uses {PROTOCOL_VERSION}. Use the same release for both",
            field="register.protocol_version",
        )
    held = messages.HeldTensors(message.held.epoch, message.held.num_blocks) if message.HasField("held") else None
    declared = declared_from_proto("register.declared", message.declared) if message.HasField("declared") else None
    return messages.Registration(
        **field_values(messages.Registration, message, _REGISTRATION_CONVERTED),
        options=declared.options if declared else _options_from_proto(message.options),
        layers=declared.layers if declared else _layers_from_proto(message),
        held=held,
        declared=declared,
    )


def _layers_from_proto(message: worker_pb2.Register) -> dict[str, KVCacheSpec]:
    layers: dict[str, KVCacheSpec] = {}
    for i, layer in enumerate(message.layers):
        where = f"register.layers[{i}]"
        if not layer.layer_name or layer.layer_name in layers:
            raise InvalidArgumentError(f"{where}.layer_name", f"{layer.layer_name!r} is empty or appears twice")
        if layer.spec.WhichOneof("kind") == "uniform_type":
            raise InvalidArgumentError(f"{where}.spec", "uniform_type is valid for groups only, not for a layer")
        layers[layer.layer_name] = wire_specs.spec_from_proto(f"{where}.spec", layer.spec)
    return layers


def registration_to_proto(pool_name: str, registration: messages.Registration) -> worker_pb2.Register:
    """Encodes the registration of a rank. What it declares replaces its options and layers."""
    held, declared = registration.held, registration.declared
    layers = {} if declared else registration.layers
    return worker_pb2.Register(
        **field_values(messages.Registration, registration, _REGISTRATION_CONVERTED),
        protocol_version=PROTOCOL_VERSION,
        pool_name=pool_name,
        options=None if declared else _options_to_proto(registration.options),
        layers=[
            spec_pb2.LayerSpec(layer_name=name, spec=wire_specs.spec_to_proto(spec)) for name, spec in layers.items()
        ],
        held=worker_pb2.HeldTensors(**field_values(messages.HeldTensors, held)) if held else None,
        declared=declared_to_proto(declared) if declared else None,
    )


def registration_to_bytes(pool_name: str, registration: messages.Registration) -> bytes:
    """Encodes the registration of a rank, for a file."""
    return registration_to_proto(pool_name, registration).SerializeToString()


def registration_from_bytes(data: bytes) -> messages.Registration:
    """Decodes what `registration_to_bytes` encoded.

    Raises:
        WrongStateError: Another release encoded it.
        InvalidArgumentError: It is damaged.
    """
    try:
        return registration_from_proto(worker_pb2.Register.FromString(data))
    except DecodeError:
        raise malformed_error() from None


def declared_from_proto(where: str, message: worker_pb2.DeclaredMemory) -> messages.DeclaredMemory:
    """Decodes the memory that an engine declares; `where` is its path, for errors. The core validates its numbers.

    Raises:
        InvalidArgumentError: A spec is malformed, or an enum is unknown; names the field.
    """
    with fields_renamed(lambda field: f"{where}.{field}"):
        config = wire_pools.config_from_proto(message.config)
    return messages.DeclaredMemory(config, message.size_bytes, tuple(sorted(message.fingerprint.items())))


def declared_to_proto(declared: messages.DeclaredMemory) -> worker_pb2.DeclaredMemory:
    """Encodes the memory that an engine declares."""
    return worker_pb2.DeclaredMemory(
        config=wire_pools.config_to_proto(declared.config, with_none_hash=True),
        size_bytes=declared.size_bytes,
        fingerprint=dict(declared.fingerprint),
    )


def _options_from_proto(message: worker_pb2.RankGroupOptions) -> messages.RankGroupOptions:
    where = "register.options"
    order = message.reuse_order or pool_pb2.REUSE_ORDER_UNCACHED_FIRST
    values = field_values(messages.RankGroupOptions, message, _OPTIONS_CONVERTED)
    values = {name: value for name, value in values.items() if value or name == "max_model_len"}  # 0: the default
    return messages.RankGroupOptions(
        **values,
        reuse_order=wire_pools.reuse_order_from_proto(f"{where}.reuse_order", order),
        enable_caching=not message.disable_caching,
        hash_scheme=wire_pools.hash_scheme_from_proto(f"{where}.hash_scheme", message.hash_scheme),
        retention_tokens=message.retention_tokens if message.HasField("retention_tokens") else None,
    )


def _options_to_proto(options: messages.RankGroupOptions) -> worker_pb2.RankGroupOptions:
    return worker_pb2.RankGroupOptions(
        **field_values(messages.RankGroupOptions, options, _OPTIONS_CONVERTED),
        reuse_order=wire_pools.REUSE_ORDERS.number(options.reuse_order),
        disable_caching=not options.enable_caching,
        hash_scheme=wire_pools.hash_scheme_to_proto(options.hash_scheme, with_none_hash=True),
        retention_tokens=options.retention_tokens,
    )


def server_message_to_proto(message: messages.ServerMessage) -> worker_pb2.JoinResponse:
    """Encodes a message of the server to a rank."""
    match message:
        case messages.Registered():
            return worker_pb2.JoinResponse(
                registered=worker_pb2.Registered(**field_values(messages.Registered, message))
            )
        case messages.Planned():
            return worker_pb2.JoinResponse(plan=_plan_to_proto(message))
        case messages.Ready():
            return worker_pb2.JoinResponse(ready=worker_pb2.Ready(**field_values(messages.Ready, message)))
        case messages.PoolStatus():
            values = field_values(messages.PoolStatus, message)
            values["state"] = wire_pools.POOL_STATES.number(message.state)
            return worker_pb2.JoinResponse(status=worker_pb2.PoolStatus(**values))
        case messages.FenceSet():
            return worker_pb2.JoinResponse(fence=worker_pb2.Fence(**field_values(messages.FenceSet, message)))
        case _:
            assert_never(message)


def server_message_from_proto(response: worker_pb2.JoinResponse) -> messages.ServerMessage | None:
    """Decodes a message of the server; None for a kind that only a newer server knows.

    Raises:
        InvalidArgumentError: A plan has no blocks or an attention kind that this process lacks, or heartbeats have no
            interval.
    """
    match response.WhichOneof("message"):
        case "registered":
            timing = response.registered
            if not (timing.heartbeat_seconds > 0 and timing.heartbeat_timeout_seconds > 0):
                raise InvalidArgumentError("registered.heartbeat_seconds", "heartbeats need an interval and a timeout")
            return messages.Registered(**field_values(messages.Registered, timing))
        case "plan":
            check_range("plan.num_blocks", response.plan.num_blocks, 1, MAX_BLOCKS)
            return messages.Planned(response.plan.epoch, _config_from_proto(response.plan), response.plan.max_model_len)
        case "ready":
            return messages.Ready(**field_values(messages.Ready, response.ready))
        case "status":
            status = response.status
            # A state that only a newer server knows counts as degraded.
            state = wire_pools.POOL_STATES.member(status.state) or messages.PoolState.DEGRADED
            return messages.PoolStatus(state, status.epoch, tuple(status.absent_ranks), status.heartbeat_sequence)
        case "fence":
            return messages.FenceSet(**field_values(messages.FenceSet, response.fence))
        case _:
            return None


def _plan_to_proto(plan: messages.Planned) -> worker_pb2.Plan:
    return worker_pb2.Plan(
        epoch=plan.epoch,
        num_blocks=plan.config.num_blocks,
        tensors=[worker_pb2.KvCacheTensor(**field_values(KVCacheTensor, tensor)) for tensor in plan.config.tensors],
        groups=[wire_pools.group_to_proto(group) for group in plan.config.groups],
        max_model_len=plan.max_model_len,
    )


def _config_from_proto(message: worker_pb2.Plan) -> KVCacheConfig:
    return KVCacheConfig(
        message.num_blocks,
        tuple(KVCacheTensor(**field_values(KVCacheTensor, tensor)) for tensor in message.tensors),
        tuple(wire_pools.group_from_proto(f"plan.groups[{i}]", group) for i, group in enumerate(message.groups)),
    )
