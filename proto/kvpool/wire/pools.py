"""Converts pool configurations and pool descriptions between protobuf messages and core values."""

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ids import PoolName
from kvpool.core.ranks.messages import PoolState, RankInfo, RankState
from kvpool.core.specs.pool_config import HashScheme, KeyForm, KVCacheGroup, PoolConfig, ReuseOrder
from kvpool.core.statistics import ActivityCounters, PrefixCacheStats
from kvpool.core.views.pool_info import GroupInfo, PoolInfo
from kvpool.v1 import pool_pb2
from kvpool.wire import specs as wire_specs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_REUSE_ORDERS: Final = {
    pool_pb2.REUSE_ORDER_UNCACHED_FIRST: ReuseOrder.UNCACHED_FIRST,
    pool_pb2.REUSE_ORDER_LRU: ReuseOrder.LRU,
}
_REUSE_ORDER_NUMBERS: Final = {order: number for number, order in _REUSE_ORDERS.items()}
_KEY_FORMS: Final = {
    pool_pb2.KEY_FORM_UNSPECIFIED: KeyForm.TAGGED,
    pool_pb2.KEY_FORM_TAGGED: KeyForm.TAGGED,
    pool_pb2.KEY_FORM_PLAIN: KeyForm.PLAIN,
}
_POOL_STATES: Final = {state: pool_pb2.PoolState.Value(f"POOL_STATE_{state.name}") for state in PoolState}
_RANK_STATES: Final = {state: pool_pb2.RankState.Value(f"RANK_STATE_{state.name}") for state in RankState}
_POOL_STATES_BY_NUMBER: Final = {int(number): state for state, number in _POOL_STATES.items()}
_RANK_STATES_BY_NUMBER: Final = {int(number): state for state, number in _RANK_STATES.items()}
_RANK_FIELDS: Final = tuple(field.name for field in fields(RankInfo) if field.name != "state")


def config_from_proto(message: pool_pb2.PoolConfig) -> PoolConfig:
    """Decodes a pool configuration. The core validates its numbers.

    Raises:
        InvalidArgumentError: An enum is unspecified or unknown, or a group has no spec.
    """
    return PoolConfig(
        name=PoolName(message.name),
        num_blocks=message.num_blocks,
        max_model_len=message.max_model_len,
        groups=tuple(group_from_proto(f"config.groups[{i}]", group) for i, group in enumerate(message.groups)),
        reuse_order=reuse_order_from_proto("config.reuse_order", message.reuse_order),
        enable_caching=not message.disable_caching,
        use_eagle=message.use_eagle,
        dcp_world_size=message.dcp_world_size or 1,
        enable_events=message.enable_events,
        hash_scheme=hash_scheme_from_proto("config.hash_scheme", message.hash_scheme),
        max_in_flight_tokens=message.max_in_flight_tokens,
        retention_tokens=message.retention_tokens if message.HasField("retention_tokens") else None,
    )


def config_to_proto(config: PoolConfig, *, with_none_hash: bool) -> pool_pb2.PoolConfig:
    """Encodes a pool configuration. Only sessions receive its none_hash."""
    return pool_pb2.PoolConfig(
        name=config.name,
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        groups=[group_to_proto(group) for group in config.groups],
        reuse_order=reuse_order_to_proto(config.reuse_order),
        disable_caching=not config.enable_caching,
        use_eagle=config.use_eagle,
        dcp_world_size=config.dcp_world_size,
        enable_events=config.enable_events,
        hash_scheme=hash_scheme_to_proto(config.hash_scheme, with_none_hash=with_none_hash),
        max_in_flight_tokens=config.max_in_flight_tokens,
        retention_tokens=config.retention_tokens,
    )


def group_to_proto(group: KVCacheGroup) -> pool_pb2.KvCacheGroup:
    """Encodes a group."""
    return pool_pb2.KvCacheGroup(layer_names=group.layer_names, spec=wire_specs.spec_to_proto(group.spec))


def group_from_proto(where: str, group: pool_pb2.KvCacheGroup) -> KVCacheGroup:
    """Decodes a group; `where` is its path, for errors."""
    return KVCacheGroup(wire_specs.spec_from_proto(f"{where}.spec", group.spec), tuple(group.layer_names))


def reuse_order_from_proto(where: str, order: int) -> ReuseOrder:
    """Decodes a reuse order; `where` is its path, for errors.

    Raises:
        InvalidArgumentError: The order is unspecified or unknown.
    """
    if order not in _REUSE_ORDERS:
        raise InvalidArgumentError(where, f"{order} is unspecified or unknown")
    return _REUSE_ORDERS[pool_pb2.ReuseOrder.ValueType(order)]


def reuse_order_to_proto(order: ReuseOrder) -> pool_pb2.ReuseOrder.ValueType:
    """Encodes a reuse order."""
    return _REUSE_ORDER_NUMBERS[order]


def hash_scheme_from_proto(where: str, scheme: pool_pb2.HashScheme) -> HashScheme:
    """Decodes a hash scheme and fills in defaults; `where` is its path, for errors.

    Raises:
        InvalidArgumentError: The key form is unknown.
    """
    if scheme.key_form not in _KEY_FORMS:
        raise InvalidArgumentError(f"{where}.key_form", f"{scheme.key_form} is unknown")
    return HashScheme(
        algorithm=scheme.algorithm or "sha256_cbor",
        size_bytes=scheme.size_bytes,
        none_hash=scheme.none_hash,
        key_form=_KEY_FORMS[scheme.key_form],
    )


def hash_scheme_to_proto(scheme: HashScheme, *, with_none_hash: bool) -> pool_pb2.HashScheme:
    """Encodes a hash scheme. Only sessions and ranks receive its none_hash."""
    return pool_pb2.HashScheme(
        algorithm=scheme.algorithm,
        size_bytes=scheme.hash_size_bytes,
        none_hash=scheme.none_hash if with_none_hash else b"",
        key_form=pool_pb2.KEY_FORM_TAGGED if scheme.key_form is KeyForm.TAGGED else pool_pb2.KEY_FORM_PLAIN,
    )


def info_to_proto(info: PoolInfo) -> pool_pb2.PoolInfo:
    """Encodes the description of a pool, without its none_hash."""
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
        state=_POOL_STATES[info.state],
        world_size=len(info.ranks),
        ranks=[_rank_to_proto(rank) for rank in info.ranks],
        running_requests=info.running_requests,
        activity=pool_pb2.ActivityCounters(**asdict(info.activity)),
        groups=[pool_pb2.GroupInfo(**asdict(group)) for group in info.groups],
        quarantined_blocks=info.quarantined_blocks,
        quarantined_sessions=info.quarantined_sessions,
        reserved_blocks=info.reserved_blocks,
        memory_id=info.memory_id,
    )


def info_from_proto(message: pool_pb2.PoolInfo) -> PoolInfo:
    """Decodes the description of a pool."""
    return PoolInfo(
        config=config_from_proto(message.config),
        epoch=message.epoch,
        free_blocks=message.free_blocks,
        cached_blocks=message.cached_blocks,
        usage=message.usage,
        prefix_cache=PrefixCacheStats(**values_of(PrefixCacheStats, message.prefix_cache)),
        recent_hit_rate=message.recent_hit_rate,
        evicted_blocks=message.evicted_blocks,
        preemptions=message.preemptions,
        sessions=message.sessions,
        requests=message.requests,
        event_sequence=message.event_sequence,
        sink_blocks=message.sink_blocks,
        state=pool_state_from_proto(message.state),
        ranks=tuple(_rank_from_proto(rank) for rank in message.ranks),
        running_requests=message.running_requests,
        activity=ActivityCounters(**values_of(ActivityCounters, message.activity)),
        groups=tuple(GroupInfo(**values_of(GroupInfo, group)) for group in message.groups),
        quarantined_blocks=message.quarantined_blocks,
        quarantined_sessions=message.quarantined_sessions,
        reserved_blocks=message.reserved_blocks,
        memory_id=message.memory_id,
    )


def pool_state_to_proto(state: PoolState) -> pool_pb2.PoolState.ValueType:
    """Encodes a pool's state."""
    return _POOL_STATES[state]


def pool_state_from_proto(state: int) -> PoolState:
    """Decodes a pool state. An unknown state of a newer server is decoded as DEGRADED, i.e. not serving."""
    return _POOL_STATES_BY_NUMBER.get(state, PoolState.DEGRADED)


def values_of(kind: "type[DataclassInstance]", source: object) -> dict[str, Any]:
    """The values of the dataclass's fields, from a message or a dataclass whose fields have the same names."""
    return {field.name: getattr(source, field.name) for field in fields(kind)}


def _rank_to_proto(info: RankInfo) -> pool_pb2.RankInfo:
    values = {name: getattr(info, name) for name in _RANK_FIELDS}
    return pool_pb2.RankInfo(state=_RANK_STATES[info.state], **values)


def _rank_from_proto(message: pool_pb2.RankInfo) -> RankInfo:
    state = _RANK_STATES_BY_NUMBER.get(message.state, RankState.ABSENT)
    return RankInfo(state=state, **{name: getattr(message, name) for name in _RANK_FIELDS})
