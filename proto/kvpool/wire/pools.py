"""Converts pool configurations and states between protobuf messages and core values."""

from collections.abc import Iterable
from typing import Final

from kvpool.core.errors import InvalidArgumentError
from kvpool.core.ranks.messages import MappingProcess, PoolState
from kvpool.core.specs.pool_config import HashScheme, KeyForm, KVCacheGroup, PoolConfig, ReuseOrder
from kvpool.v1 import pool_pb2
from kvpool.wire import specs as wire_specs
from kvpool.wire.fields import EnumNumbers, field_values

REUSE_ORDERS: Final = EnumNumbers(ReuseOrder, pool_pb2.ReuseOrder)
_KEY_FORMS: Final = EnumNumbers(KeyForm, pool_pb2.KeyForm)
POOL_STATES: Final = EnumNumbers(PoolState, pool_pb2.PoolState)
_CONFIG_FIELDS_CONVERTED: Final = ("groups", "reuse_order", "enable_caching", "hash_scheme")


def config_from_proto(message: pool_pb2.PoolConfig) -> PoolConfig:
    """Decodes a pool configuration. The core validates its numbers.

    Raises:
        InvalidArgumentError: An enum is unspecified or unknown, or a group has no spec.
    """
    values = field_values(PoolConfig, message, _CONFIG_FIELDS_CONVERTED)
    values["dcp_world_size"] = message.dcp_world_size or 1
    values["retention_tokens"] = message.retention_tokens if message.HasField("retention_tokens") else None
    return PoolConfig(
        groups=tuple(group_from_proto(f"config.groups[{i}]", group) for i, group in enumerate(message.groups)),
        reuse_order=reuse_order_from_proto("config.reuse_order", message.reuse_order),
        enable_caching=not message.disable_caching,
        hash_scheme=hash_scheme_from_proto("config.hash_scheme", message.hash_scheme),
        **values,
    )


def config_to_proto(config: PoolConfig, *, with_none_hash: bool) -> pool_pb2.PoolConfig:
    """Encodes a pool configuration. Only sessions, and requests that declare a pool, contain its none_hash."""
    return pool_pb2.PoolConfig(
        groups=[group_to_proto(group) for group in config.groups],
        reuse_order=REUSE_ORDERS.number(config.reuse_order),
        disable_caching=not config.enable_caching,
        hash_scheme=hash_scheme_to_proto(config.hash_scheme, with_none_hash=with_none_hash),
        **field_values(PoolConfig, config, _CONFIG_FIELDS_CONVERTED),
    )


def group_to_proto(group: KVCacheGroup) -> pool_pb2.KvCacheGroup:
    """Encodes a group."""
    return pool_pb2.KvCacheGroup(
        layer_names=group.layer_names, spec=wire_specs.spec_to_proto(group.spec), has_no_draft=group.has_no_draft
    )


def group_from_proto(where: str, group: pool_pb2.KvCacheGroup) -> KVCacheGroup:
    """Decodes a group; `where` is its path, for errors."""
    spec = wire_specs.spec_from_proto(f"{where}.spec", group.spec)
    return KVCacheGroup(spec, tuple(group.layer_names), group.has_no_draft)


def reuse_order_from_proto(where: str, order: int) -> ReuseOrder:
    """Decodes a reuse order; `where` is its path, for errors.

    Raises:
        InvalidArgumentError: The order is unspecified or unknown.
    """
    found = REUSE_ORDERS.member(order)
    if found is None:
        raise InvalidArgumentError(where, f"{order} is unspecified or unknown")
    return found


def hash_scheme_from_proto(where: str, scheme: pool_pb2.HashScheme) -> HashScheme:
    """Decodes a hash scheme and fills in defaults; `where` is its path, for errors.

    Raises:
        InvalidArgumentError: The key form is unknown.
    """
    key_form = _KEY_FORMS.member(scheme.key_form or pool_pb2.KEY_FORM_TAGGED)
    if key_form is None:
        raise InvalidArgumentError(f"{where}.key_form", f"{scheme.key_form} is unknown")
    return HashScheme(
        algorithm=scheme.algorithm or "sha256_cbor",
        key_form=key_form,
        **field_values(HashScheme, scheme, ("algorithm", "key_form")),
    )


def hash_scheme_to_proto(scheme: HashScheme, *, with_none_hash: bool) -> pool_pb2.HashScheme:
    """Encodes a hash scheme. Only sessions, ranks and admins who explain misses receive its none_hash."""
    return pool_pb2.HashScheme(
        algorithm=scheme.algorithm,
        size_bytes=scheme.hash_size_bytes,
        none_hash=scheme.none_hash if with_none_hash else b"",
        key_form=_KEY_FORMS.number(scheme.key_form),
        num_lookahead_tokens=scheme.num_lookahead_tokens,
    )


def mapping_processes_to_proto(processes: Iterable[MappingProcess]) -> list[pool_pb2.MappingProcess]:
    """Encodes the processes that map the memory of a rank."""
    return [pool_pb2.MappingProcess(**field_values(MappingProcess, process)) for process in processes]


def mapping_processes_from_proto(processes: Iterable[pool_pb2.MappingProcess]) -> tuple[MappingProcess, ...]:
    """Decodes the processes that map the memory of a rank."""
    return tuple(MappingProcess(**field_values(MappingProcess, process)) for process in processes)
