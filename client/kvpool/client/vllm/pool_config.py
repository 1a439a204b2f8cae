"""Converts an engine's KV cache configuration to that of a pool. Refuses unsupported features at the start."""

import math
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any, Final

from kvpool.client.vllm.connectors import unsupported_connector
from kvpool.client.vllm.versions import AUX_OUTPUTS_READ_POOL, IS_0_33_OR_NEWER, SPECS, VERSION, block_hash_root
from kvpool.core.ids import PoolName
from kvpool.core.specs import kinds
from kvpool.core.specs.base import DTYPE_SIZES_BYTES, AttentionSpec, KVCacheSpec
from kvpool.core.specs.pool_config import HashScheme, KeyForm, KVCacheGroup, PoolConfig, ReuseOrder

_HASHES: Final = {
    "sha256": ("vllm_sha256", 32),  # over the pickled block
    "sha256_cbor": ("sha256_cbor", 32),
    "xxhash": ("vllm_xxhash", 16),  # over the pickled block
    "xxhash_cbor": ("xxhash_cbor", 16),
}
"""By name in vLLM: name in a pool's hash scheme, and length in bytes."""

_ATTENTION: Final[dict[type, type[AttentionSpec]]] = {
    getattr(SPECS, kind.__name__): kind
    for kind in kinds.KIND_NAMES
    if issubclass(kind, AttentionSpec) and kind is not kinds.EncoderOnlyAttentionSpec  # which has no cache
}
"""By kind of attention in vLLM: the kind in the service, which has the same name."""

_HISPARSE: Final = "it has a pool of host blocks of its own, whose blocks its layers swap in while they run"


class UnsupportedError(ValueError):
    """The engine uses a feature that the service does not support."""

    def __init__(self, feature: str, hint: str = "") -> None:
        super().__init__(f"kvpool does not support {feature} of vLLM {VERSION}" + (f": {hint}" if hint else ""))


def pool_config(scheduler: Any, pool: str) -> PoolConfig:
    """Makes the pool configuration of an engine from its scheduler.

    Raises:
        UnsupportedError: The engine uses a feature that the service does not support; names it.
    """
    config = config_of(scheduler.vllm_config, scheduler.kv_cache_config, pool)
    if scheduler.connector is not None and (problem := unsupported_connector(scheduler, config.groups)):
        raise UnsupportedError(*problem)
    return config


def config_of(vllm_config: Any, kv_cache_config: Any, pool: str) -> PoolConfig:
    """Makes the pool configuration of an engine from what its scheduler is made from. Its workers have the same.

    Raises:
        UnsupportedError: The engine uses a feature that the service does not support; names it.
    """
    check_supported(vllm_config, kv_cache_config)
    cache_config, events = vllm_config.cache_config, vllm_config.kv_events_config
    caches = bool(cache_config.enable_prefix_caching)
    groups = _groups(kv_cache_config.kv_cache_groups)
    has_states = any(kinds.has_gaps(kinds.allocation_spec(group.spec)) for group in groups)
    config = PoolConfig(
        name=PoolName(pool),
        num_blocks=kv_cache_config.num_blocks,
        max_model_len=vllm_config.model_config.max_model_len,
        groups=groups,
        reuse_order=ReuseOrder.UNCACHED_FIRST,
        enable_caching=caches,
        enable_events=events is not None and bool(events.enable_kv_cache_events),
        use_eagle=_drops_eagle_block(vllm_config),
        dcp_world_size=vllm_config.parallel_config.decode_context_parallel_size,
        hash_scheme=_hash_scheme(cache_config.prefix_caching_hash_algo, vllm_config) if caches else HashScheme(),
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        retention_tokens=_retention_tokens(kv_cache_config) if caches else None,
        keeps_block_before_boundary=IS_0_33_OR_NEWER and _drops_eagle_block(vllm_config),
        num_reprefillable_tokens=max(vllm_config.num_prefill_lookahead_tokens - 1, 0) if caches else 0,
        shares_read_states=IS_0_33_OR_NEWER and has_states,
        allow_too_few_blocks=True,  # as vLLM with num_gpu_blocks_override
    )
    if not caches:
        return config
    if cache_config.prefix_match_unit not in (None, config.hash_block_size):
        config = replace(config, prefix_match_unit=cache_config.prefix_match_unit)
    return _with_partial_hits(config, kv_cache_config)


def _with_partial_hits(config: PoolConfig, kv_cache_config: Any) -> PoolConfig:
    """Has hits end within blocks of states and of full attention where vLLM has it so."""
    unit, is_sharded = config.hash_block_size, config.dcp_world_size > 1
    specs = [kinds.allocation_spec(group.spec) for group in config.groups]
    cached = [(spec, span) for spec, span in zip(specs, config.spans_tokens, strict=True) if spec.is_cached]
    states = [span for spec, span in cached if kinds.has_gaps(spec)]
    others = [span for spec, span in cached if not (kinds.has_gaps(spec) or isinstance(spec, kinds.FullAttentionSpec))]
    interval = kv_cache_config.prefix_cache_retention_interval
    if any(span > unit or (is_sharded and span == unit) for span in states) and {*others} <= {unit}:
        if config.hash_scheme.num_lookahead_tokens or config.num_reprefillable_tokens:
            hint = "set disable_lookahead_block_hashes in speculative_config"
            raise UnsupportedError("lookahead block hashes with hits that end within blocks", hint)
        if config.use_eagle and others:
            hint = "set enable_prefix_caching=False"
            raise UnsupportedError("EAGLE with hits that end within blocks beside sliding windows", hint)
        return replace(config, partial_hits=len(specs) > 1, retention_tokens=interval)
    has_sizes = len({span for _, span in cached}) > 1
    if states and has_sizes and config.use_eagle:
        raise UnsupportedError(
            "EAGLE with prefix caching and blocks of different sizes", "set enable_prefix_caching=False"
        )
    if states and has_sizes and interval is None:  # all states, but few blocks of windows
        hint = "set prefix_cache_retention_interval=0"
        raise UnsupportedError("all states beside blocks of other sizes that end no hits", hint)
    return config


def _groups(groups: Iterable[Any]) -> tuple[KVCacheGroup, ...]:
    """Converts the groups. vLLM flags those with layers of the draft model, or none if it cannot tell.

    A flag applies to all groups with an equal spec, as vLLM looks them up together.
    """
    drafted = [group.kv_cache_spec for group in groups if group.is_eagle_group]
    return tuple(
        KVCacheGroup(
            spec_of(group.kv_cache_spec),
            tuple(group.layer_names),
            has_no_draft=bool(drafted) and group.kv_cache_spec not in drafted,
        )
        for group in groups
    )


def check_process(arguments: Any) -> None:
    """Raises UnsupportedError if vLLM would continue the engine after a fault, or from an image of its process.

    `arguments` are vLLM's `EngineArgs` or its `ParallelConfig`.
    """
    # A mock of a config, as in vLLM's own tests, has every attribute.
    if arguments.enable_fault_tolerance is True:
        raise UnsupportedError("enable_fault_tolerance", "leave it out; a step that failed would count as executed")
    if "vllm.snapshot.server" in sys.orig_argv:  # started by `vllm snapshot create`
        raise UnsupportedError("vllm snapshot", "use vllm serve; a restored engine has no session")


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises UnsupportedError if the engine uses a feature that the service does not support."""
    groups = kv_cache_config.kv_cache_groups
    check_process(vllm_config.parallel_config)
    if vllm_config.observability_config.kv_cache_metrics:
        raise UnsupportedError("kv_cache_metrics", "the service samples block lifetimes")
    if vllm_config.diffusion_config is not None:  # vLLM has schedulers of their own for them
        raise UnsupportedError("diffusion models")
    _check_lookups(vllm_config)
    if not groups:
        raise UnsupportedError("models without a KV cache")
    for group in groups:
        _check_group(group, vllm_config.parallel_config.decode_context_parallel_size)
    if vllm_config.cache_config.enable_prefix_caching:
        drops_block = _drops_eagle_block(vllm_config)
        moves_states = drops_block or _num_hash_lookahead_tokens(vllm_config) > 1
        _check_cached(_cached_specs(groups), drops_block=drops_block, moves_states=moves_states)


def _check_lookups(vllm_config: Any) -> None:
    """Refuses features that look blocks up by other rules."""
    # A mock of a config, as in vLLM's own tests, has every attribute.
    if vllm_config.cache_config.enable_mamba_shared_prefix_checkpoint is True:
        raise UnsupportedError("enable_mamba_shared_prefix_checkpoint", "leave it out")
    if AUX_OUTPUTS_READ_POOL and vllm_config.aux_output_config.enabled:  # hits end where that pool has no block
        raise UnsupportedError("returned routed experts", "they limit hits to what vLLM's own block pool has")


def _cached_specs(groups: Iterable[Any]) -> list[Any]:
    """The specs of the groups that take part in prefix caching."""
    specs = [group.kv_cache_spec for group in groups]
    return [spec for spec in specs if spec.prefix_cacheable]


def _check_group(group: Any, dcp_world_size: int) -> None:
    if group.host_resident or group.role != "default":
        raise UnsupportedError("HiSparse groups", _HISPARSE)
    if dcp_world_size > 1 and any(map(_is_replicated, _layer_specs(group.kv_cache_spec))):
        raise UnsupportedError("attention layers that decode context parallelism replicates")


def _layer_specs(spec: Any) -> Iterable[Any]:
    return spec.kv_cache_specs.values() if type(spec) is SPECS.UniformTypeKVCacheSpecs else (spec,)


def _is_replicated(spec: Any) -> bool:
    """Whether every rank of decode context parallelism holds all tokens of a kind that is sharded in the service."""
    kind = _ATTENTION.get(type(spec))
    return kind is not None and kind.is_sharded and not spec.dcp_sharded


def _check_cached(specs: list[Any], *, drops_block: bool, moves_states: bool) -> None:
    """Refuses configurations that vLLM caches by different rules."""
    hint = "set enable_prefix_caching=False"
    for spec in [spec for spec in specs if isinstance(spec, SPECS.MambaSpec)]:
        if spec.mamba_cache_mode != "align":
            raise UnsupportedError(f"prefix caching with mamba_cache_mode={spec.mamba_cache_mode!r}", hint)
        if moves_states and spec.prefill_checkpoint_alignment:  # vLLM keys them by other positions
            raise UnsupportedError("EAGLE with prefix caching of Mamba states that kernels write within a step", hint)
    if _has_sizes(specs) and any(isinstance(spec, SPECS.ChunkedLocalAttentionSpec) for spec in specs):
        raise UnsupportedError("prefix caching of chunks beside blocks of other sizes", hint)  # vLLM fails at look-ups
    others = [spec for spec in specs if not isinstance(spec, (SPECS.MambaSpec, SPECS.FullAttentionSpec))]
    is_within = not others and any(isinstance(spec, SPECS.MambaSpec) for spec in specs)
    if _has_sizes(specs) and drops_block and not is_within:  # vLLM drops more than is needed before a window
        raise UnsupportedError("EAGLE with prefix caching and blocks of different sizes", hint)


def _has_sizes(specs: list[Any]) -> bool:
    """Whether the blocks of the groups differ in size."""
    return len({spec.block_size for spec in specs}) > 1


def _num_hash_lookahead_tokens(vllm_config: Any) -> int:
    """Number of tokens after its block that a hash covers; 0.32 knows none."""
    return getattr(vllm_config, "num_hash_lookahead_tokens", 0)


def _drops_eagle_block(vllm_config: Any) -> bool:
    speculative_config = vllm_config.speculative_config
    if speculative_config is None or _num_hash_lookahead_tokens(vllm_config):  # the hash covers the token that follows
        return False
    return bool(speculative_config.use_eagle_block_drop())


def _retention_tokens(kv_cache_config: Any) -> int | None:
    """Interval at which sliding windows and states are cached; None if all blocks are cached.

    vLLM never caches all blocks if block sizes differ. Without an interval it caches windows at each multiple of the
    largest common block.
    """
    tokens: int | None = kv_cache_config.prefix_cache_retention_interval
    specs = _cached_specs(kv_cache_config.kv_cache_groups)
    is_sparse = any(isinstance(spec, (SPECS.SlidingWindowSpec, SPECS.MambaSpec)) for spec in specs)
    if _has_sizes(specs):
        if not is_sparse:
            return 0
        return math.lcm(*(spec.block_size for spec in specs)) if tokens is None else tokens
    return tokens if is_sparse else None


def _hash_scheme(algorithm: str, vllm_config: Any) -> HashScheme:
    if algorithm not in _HASHES:
        raise UnsupportedError(f"prefix_caching_hash_algo={algorithm!r}", f"known: {', '.join(_HASHES)}")
    name, size_bytes = _HASHES[algorithm]
    num_lookahead_tokens = _num_hash_lookahead_tokens(vllm_config)
    return HashScheme(name, size_bytes, block_hash_root(algorithm), KeyForm.TAGGED, num_lookahead_tokens)


def spec_of(spec: Any) -> KVCacheSpec:
    """Converts a layer's spec. Only kinds that allocate exactly as in the service are supported.

    Raises:
        UnsupportedError: The service does not support its kind.
    """
    kind = type(spec)
    if kind is SPECS.UniformTypeKVCacheSpecs:
        layers = tuple((name, spec_of(layer)) for name, layer in spec.kv_cache_specs.items())
        return kinds.UniformTypeKVCacheSpecs(spec.block_size, layers)
    if kind is SPECS.MambaSpec:
        return kinds.MambaSpec(
            spec.block_size,
            tuple(tuple(shape) for shape in spec.shapes),
            tuple(_dtype(dtype) for dtype in spec.dtypes),
            spec.page_size_padded or 0,
            spec.mamba_type.name.lower(),
            spec.num_speculative_blocks,
            spec.num_prefill_checkpoint_blocks,
            only_step_ends=spec.mamba_cache_mode == "align",
            prefill_checkpoint_alignment=spec.prefill_checkpoint_alignment or 0,
        )
    if kind not in _ATTENTION:
        raise UnsupportedError(f"{kind.__name__} groups", _HISPARSE if kind.__name__.startswith("HiSparse") else "")
    return _attention(spec)


def _attention(spec: Any) -> AttentionSpec:
    """Converts a spec by the names of its fields, which are vLLM's. The engine declares the sizes of state and page."""
    own_kind = _ATTENTION[type(spec)]
    values: dict[str, Any] = {field.name: getattr(spec, field.name, 0) or field.default for field in fields(own_kind)}
    values.update(dtype=_dtype(spec.dtype), page_size_padded=0, state_content_bytes=0)
    values.pop("cache_dtype_str", "")  # the size of a state says enough
    states_per_token = 1
    if 0 < values["tokens_per_state"] < 1:  # several states per token, which are one larger state here
        states_per_token = Fraction(values.pop("tokens_per_state")).denominator
    made = own_kind(**values)
    content_bytes = spec.state_content_size_bytes * states_per_token
    if content_bytes not in (0, made.head_elements_bytes):
        made = replace(made, state_content_bytes=content_bytes)
    if spec.page_size_bytes == made.page_size_bytes:
        return made
    return replace(made, page_size_padded=spec.page_size_bytes)


def _dtype(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_SIZES_BYTES:
        raise UnsupportedError(f"KV caches of {name}")
    return name
