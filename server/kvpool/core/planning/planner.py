"""Memory planning for all ranks: computes groups, tensors and num_blocks from layer specs and free bytes.

1. All ranks get the same groups and the same num_blocks, as block ids are valid in the whole pool. The rank with the
   least memory decides num_blocks. The tensors of a rank hold the layers of that rank.
2. Layers of different groups share tensors, since a block belongs to one group at a time. Tensor i is shared by layer i
   of each group. If blocks are outermost, one tensor has all layers, and those of a group lie side by side in a block.
3. A plan is refused unless one request of the maximum length fits. The error gives the maximum length that fits.

Source: the results equal those of vLLM 0.32's get_kv_cache_configs, which counts no sinks, except for rule 2 of
`grouping`.
"""

from collections.abc import Sequence

from kvpool.core.errors import check_range
from kvpool.core.ids import MAX_BLOCKS, MAX_TOKENS
from kvpool.core.planning.grouping import (
    Layers,
    block_size_bytes,
    field_value,
    group_layers,
    groups_on_rank,
    layer_specs,
    undeclared_field,
)
from kvpool.core.planning.packing import block_offsets
from kvpool.core.planning.plan import (
    GIB,
    KVCacheConfig,
    KVCacheTensor,
    Plan,
    PlanError,
    PlanOptions,
    RankMemory,
)
from kvpool.core.specs.base import KVCacheSpec, RequestLimits
from kvpool.core.specs.kinds import (
    UniformTypeKVCacheSpecs,
    block_span_tokens,
    common_multiple_tokens,
    differing_field,
    num_sink_tokens,
)
from kvpool.core.specs.longest_request import longest_fitting
from kvpool.core.specs.pool_config import KVCacheGroup


def get_kv_cache_configs(ranks: Sequence[RankMemory], options: PlanOptions) -> Plan:
    """Plans the memory of all ranks of a model.

    Args:
        ranks: The ranks. Pipeline stages have different layers, tensor-parallel ranks the same.
        options: The options.

    Raises:
        PlanError: Ranks disagree on a layer, a rank has no memory, or one request does not fit. In the last case the
            error has the needed and available memory and the maximum length that fits.
        InvalidArgumentError: An option is out of range, or the layers cannot be grouped with these options.
    """
    options.check()
    check_range("ranks", len(ranks), 1, 65_536)
    groups = group_layers(
        _merge_ranks(ranks), hybrid=not options.disable_hybrid_kv_cache_manager, packed=options.block_outermost
    )
    _check_alignment(groups, options)
    by_rank = [groups_on_rank(groups, rank.layers) for rank in ranks]
    capacities = [
        _RankCapacity(i, own, ranks[i].available_bytes, options)
        for i, own in enumerate(by_rank)
        if block_size_bytes(own)
    ]
    max_model_len = _check_capacities(capacities, options)
    num_blocks = min((capacity.available_bytes // capacity.block_size_bytes for capacity in capacities), default=1)
    num_blocks = (options.num_blocks_override if groups else 0) or min(num_blocks, MAX_BLOCKS)
    check_range("num_blocks", num_blocks, 1, MAX_BLOCKS)
    configs = tuple(KVCacheConfig(num_blocks, _tensors(own, num_blocks, options), own) for own in by_rank)
    return finished_plan(configs, groups, max_model_len, options)


def finished_plan(
    configs: tuple[KVCacheConfig, ...], groups: tuple[KVCacheGroup, ...], max_model_len: int, options: PlanOptions
) -> Plan:
    """Returns the plan with the memory of every rank; computes which requests it can hold."""
    return Plan(
        configs,
        groups,
        max_model_len,
        _blocks_per_request(groups, options.limits(max_model_len)),
        longest_fitting(
            max_model_len,
            lambda length: _pool_blocks_for_request(groups, options.limits(length)) <= configs[0].num_blocks,
        ),
    )


class _RankCapacity:
    """The memory of one rank, and the lengths of requests that fit it. Raises PlanError if there is no memory."""

    def __init__(self, rank: int, groups: tuple[KVCacheGroup, ...], available_bytes: int, options: PlanOptions) -> None:
        self.rank = rank
        self.field = f"ranks[{rank}].available_bytes"
        if available_bytes <= 0:
            message = f"{available_bytes}: no memory is left for the KV cache"
            raise PlanError("NO_MEMORY", self.field, message, available_bytes=available_bytes, rank=rank)
        self.available_bytes = available_bytes
        self.block_size_bytes = block_size_bytes(groups)
        self._groups = groups
        self._options = options
        self.usable_bytes = available_bytes
        if options.num_blocks_override:
            self.field = "num_blocks_override"
            self.usable_bytes = options.num_blocks_override * self.block_size_bytes

    def needed_bytes(self, length: int) -> int:
        """Bytes of one request of this length, including reserved blocks."""
        return _pool_blocks_for_request(self._groups, self._options.limits(length)) * self.block_size_bytes

    def longest(self, max_model_len: int) -> int:
        """The maximum length that fits, in tokens, at most max_model_len; 0 if none fits."""
        return longest_fitting(max_model_len, lambda length: self.needed_bytes(length) <= self.usable_bytes)

    def refusal(self, length: int, estimate: int) -> PlanError:
        """Returns the error for a request of this length, where `estimate` is the maximum length that fits."""
        needed_bytes = self.needed_bytes(length)
        needed_blocks, blocks = (size // self.block_size_bytes for size in (needed_bytes, self.usable_bytes))
        return PlanError(
            "ONE_REQUEST_DOES_NOT_FIT",
            self.field,
            f"one request of {length} tokens takes {needed_bytes / GIB:.2f} GiB ({needed_blocks} blocks), there are"
            f" {self.usable_bytes / GIB:.2f} GiB ({blocks} blocks); the longest that fits has {estimate} tokens: add"
            " memory, or lower max_model_len",
            needed_bytes=needed_bytes,
            available_bytes=self.usable_bytes,
            max_model_len=length,
            estimated_max_model_len=estimate,
            rank=self.rank,
        )


def _check_capacities(capacities: Sequence[_RankCapacity], options: PlanOptions) -> int:
    """Checks that one request fits every rank.

    Returns:
        The maximum length that applies.

    Raises:
        PlanError: A rank has too little memory; names the rank with the smallest capacity.
    """
    length = options.max_model_len
    if not capacities:
        return length
    estimate, worst = min(((capacity.longest(length), capacity) for capacity in capacities), key=lambda entry: entry[0])
    if estimate == length:
        return length
    if not options.auto_fit_max_model_len:
        raise worst.refusal(length, estimate)
    if not estimate:
        raise PlanError(
            "NOT_EVEN_ONE_TOKEN_FITS",
            worst.field,
            f"a request of one token takes {worst.needed_bytes(1)} bytes, there are {worst.usable_bytes}",
            available_bytes=worst.usable_bytes,
            needed_bytes=worst.needed_bytes(1),
            rank=worst.rank,
        )
    return estimate


def _merge_ranks(ranks: Sequence[RankMemory]) -> Layers:
    merged: dict[str, tuple[int, KVCacheSpec]] = {}
    for i, rank in enumerate(ranks):
        for name, spec in rank.layers.items():
            where = f'ranks[{i}].layers["{name}"]'
            first, known = merged.setdefault(name, (i, spec))
            field = differing_field(known, spec)
            if field:
                raise PlanError(
                    "RANKS_DISAGREE_ON_A_LAYER",
                    f"{where}.{field}",
                    f"layer {name!r} differs in {field} between rank {first} ({field_value(known, field)}) and rank {i}"
                    f" ({field_value(spec, field)})",
                )
            missing = undeclared_field(spec)
            if missing:
                raise PlanError("SIZE_NOT_DECLARED", f"{where}.{missing}", "is required for planning, and not declared")
    return {name: spec for name, (_, spec) in merged.items()}


def _check_alignment(groups: tuple[KVCacheGroup, ...], options: PlanOptions) -> None:
    limits = options.limits(options.max_model_len)
    spans = [block_span_tokens(group.spec, limits.context_parallel_size) for group in groups]
    if common_multiple_tokens(spans, limits.max_model_len) > MAX_TOKENS:
        raise PlanError(
            "NO_COMMON_BLOCK_SIZE",
            "block_size",
            f"blocks of {sorted(set(spans))} tokens have no common multiple in [1, {MAX_TOKENS}]: no prefix could be"
            " found in all groups",
        )
    for group, span in zip(groups, spans, strict=True):
        sink_len = num_sink_tokens(group.spec)
        if sink_len % span:
            raise PlanError(
                "SINKS_DO_NOT_FIT_BLOCKS", "sink_len", f"{sink_len} is no multiple of blocks of {span} tokens"
            )


def _pool_blocks_for_request(groups: tuple[KVCacheGroup, ...], limits: RequestLimits) -> int:
    """Blocks that a pool needs to hold one request: its blocks, the null block and the sinks."""
    if not groups:
        return 0
    ranks = limits.context_parallel_size
    sinks = (num_sink_tokens(group.spec) // block_span_tokens(group.spec, ranks) for group in groups)
    return _blocks_per_request(groups, limits) + 1 + sum(sinks)


def _blocks_per_request(groups: tuple[KVCacheGroup, ...], limits: RequestLimits) -> int:
    return sum(group.spec.max_blocks(limits) for group in groups)


def _tensors(groups: tuple[KVCacheGroup, ...], num_blocks: int, options: PlanOptions) -> tuple[KVCacheTensor, ...]:
    if options.block_outermost:
        offsets = {name: start for group in groups for name, start in block_offsets(layer_specs(group)).items()}
        size_bytes = block_size_bytes(groups) * num_blocks
        return (KVCacheTensor(size_bytes, tuple(offsets), tuple(offsets.values())),) if offsets else ()
    if len(groups) == 1 and isinstance(groups[0].spec, UniformTypeKVCacheSpecs):  # each layer has its own tensor
        layers = layer_specs(groups[0])
        return tuple(KVCacheTensor(spec.page_size_bytes * num_blocks, (name,)) for name, spec in layers)
    count = max((len(group.layer_names) for group in groups), default=0)
    return tuple(
        KVCacheTensor(
            groups[0].spec.page_size_bytes * num_blocks,
            tuple(group.layer_names[i] for group in groups if i < len(group.layer_names)),
        )
        for i in range(count)
    )
