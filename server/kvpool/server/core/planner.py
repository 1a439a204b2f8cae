"""Lays out the memory of all ranks: from layer specs and free bytes to groups, tensors and num_blocks.

1. All ranks get the same groups and the same num_blocks, for block ids are those of the whole pool: the rank with the
   least room decides. A rank's tensors hold its own layers.
2. Layers of different groups share tensors, since no block belongs to two groups at a time: tensor i is shared by layer
   i of each group.
3. A plan is refused unless one request of the longest length fits; the refusal says what would.

Source: the results are those of vLLM's get_kv_cache_configs, but for `FitCheck.EVERY_GROUP`, the default here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvpool.server.core.config import KVCacheGroup
from kvpool.server.core.errors import check_range
from kvpool.server.core.plan import (
    GIB,
    FitCheck,
    KVCacheConfig,
    KVCacheTensor,
    Plan,
    PlanError,
    PlanOptions,
    RankMemory,
)
from kvpool.server.core.plan_groups import (
    Layers,
    block_size_bytes,
    group_layers,
    is_uniform_type,
    layer_specs,
    of_rank,
    undeclared_field,
)
from kvpool.server.core.specs import (
    KVCacheSpec,
    RequestLimits,
    allocation_spec,
    block_span_tokens,
    differing_field,
    num_sink_tokens,
)
from kvpool.server.core.types import MAX_BLOCKS, MAX_TOKENS


def get_kv_cache_configs(ranks: Sequence[RankMemory], options: PlanOptions) -> Plan:
    """Plans the memory of all ranks of a model.

    Args:
        ranks: The ranks: pipeline stages with layers of their own, tensor ranks with the same.
        options: What is asked.

    Raises:
        PlanError: Ranks disagree on a layer, memory is missing, or one request does not fit; says what is at fault,
            and of the last how much is needed, what there is, and the longest that fits.
        InvalidArgumentError: The layers cannot be put into groups as asked.
    """
    check_range("ranks", len(ranks), 1, 65_536)
    groups = group_layers(_merge_ranks(ranks), hybrid=not options.disable_hybrid_kv_cache_manager)
    _check_alignment(groups, options)
    by_rank = [of_rank(groups, rank.layers) for rank in ranks]
    max_model_len = options.max_model_len
    holders = [(i, own, ranks[i].available_bytes) for i, own in enumerate(by_rank) if block_size_bytes(own)]
    for i, _, available_bytes in holders:
        if available_bytes <= 0:
            raise PlanError(
                "NO_MEMORY",
                f"ranks[{i}].available_bytes",
                f"{available_bytes}: no memory is left for the KV cache",
                available_bytes=available_bytes,
            )
    if options.auto_fit_max_model_len:
        for i, own, available_bytes in holders:
            max_model_len = _longest(max_model_len, _fits(own, available_bytes, options))
            if not max_model_len:
                raise PlanError(
                    "NOT_EVEN_ONE_TOKEN_FITS",
                    f"ranks[{i}].available_bytes",
                    f"{available_bytes} bytes hold no block of each group",
                    available_bytes=available_bytes,
                )
    _check_fits(holders, replace(options, max_model_len=max_model_len))

    num_blocks = min((available // block_size_bytes(own) for _, own, available in holders), default=1)
    num_blocks = check_range("num_blocks", (options.num_blocks_override if groups else 0) or num_blocks, 1, MAX_BLOCKS)
    return Plan(
        tuple(KVCacheConfig(num_blocks, _tensors(own, num_blocks), own) for own in by_rank),
        groups,
        max_model_len,
        _blocks_of_request(groups, options.limits(max_model_len)),
        _longest(max_model_len, _holds(groups, num_blocks, options)),
    )


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
                    f"layer {name!r} differs in {field} between rank {first} ({_value(known, field)}) and rank {i}"
                    f" ({_value(spec, field)})",
                )
            missing = undeclared_field(spec)
            if missing:
                raise PlanError("SIZE_NOT_DECLARED", f"{where}.{missing}", "is needed to plan, and not declared")
    return {name: spec for name, (_, spec) in merged.items()}


def _value(spec: KVCacheSpec, field: str) -> object:
    return type(spec).__name__ if field == "type" else getattr(spec, field)


def _check_alignment(groups: tuple[KVCacheGroup, ...], options: PlanOptions) -> None:
    limits = options.limits(options.max_model_len)
    spans = [block_span_tokens(group.spec, limits.context_parallel_size) for group in groups]
    # A block that holds a whole request is never hit, so no hit has to be a multiple of it.
    alignment = math.lcm(*(span for span in spans if span < limits.max_model_len))
    if alignment > MAX_TOKENS:
        raise PlanError(
            "NO_COMMON_BLOCK_SIZE",
            "block_size",
            f"blocks of {sorted(set(spans))} tokens have no common multiple in [1, {MAX_TOKENS}]: no prefix could be"
            " found in all groups",
        )


def _check_fits(holders: Sequence[tuple[int, tuple[KVCacheGroup, ...], int]], options: PlanOptions) -> None:
    """Refuses what some rank cannot hold; of several it tells of the one that holds least."""
    length = options.max_model_len
    estimates = [(_longest(length, _fits(own, available, options)), i) for i, (_, own, available) in enumerate(holders)]
    estimate, worst = min(estimates, default=(length, 0))
    if estimate == length:
        return
    rank, groups, available_bytes = holders[worst]
    needed_bytes = _needed_bytes(groups, options, length)
    raise PlanError(
        "ONE_REQUEST_DOES_NOT_FIT",
        f"ranks[{rank}].available_bytes",
        f"one request of {length} tokens takes {needed_bytes / GIB:.2f} GiB, there are {available_bytes / GIB:.2f} GiB;"
        f" the longest that fits has {estimate} tokens: give more memory, or lower max_model_len",
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
        max_model_len=length,
        estimated_max_model_len=estimate,
    )


def _fits(groups: tuple[KVCacheGroup, ...], available_bytes: int, options: PlanOptions) -> Callable[[int], bool]:
    return lambda length: _needed_bytes(groups, options, length) <= available_bytes


def _needed_bytes(groups: tuple[KVCacheGroup, ...], options: PlanOptions, max_model_len: int) -> int:
    counted = groups if options.fit_check is FitCheck.EVERY_GROUP else groups[:1]
    return _blocks_of_request(counted, options.limits(max_model_len)) * block_size_bytes(groups)


def _holds(groups: tuple[KVCacheGroup, ...], num_blocks: int, options: PlanOptions) -> Callable[[int], bool]:
    ranks = options.limits(1).context_parallel_size
    set_aside = 1 + sum(num_sink_tokens(group.spec) // block_span_tokens(group.spec, ranks) for group in groups)
    return lambda length: not groups or _blocks_of_request(groups, options.limits(length)) <= num_blocks - set_aside


def _longest(max_model_len: int, fits: Callable[[int], bool]) -> int:
    """Finds the greatest length up to max_model_len that fits, 0 if none does. Costs logarithmically many tries.

    What is longer than one that does not fit, does not fit either.
    """
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _blocks_of_request(groups: tuple[KVCacheGroup, ...], limits: RequestLimits) -> int:
    return sum(allocation_spec(group.spec).max_blocks(limits) for group in groups)


def _tensors(groups: tuple[KVCacheGroup, ...], num_blocks: int) -> tuple[KVCacheTensor, ...]:
    if is_uniform_type(groups):
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
