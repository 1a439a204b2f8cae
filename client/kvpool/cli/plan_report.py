"""A plan as tables and as JSON, for `kvpool plan`."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Final

from kvpool.cli.plan_limits import Load, hit_multiple_tokens, loads, num_request_blocks
from kvpool.cli.tables import Column, print_facts, print_table
from kvpool.cli.text import print_line
from kvpool.core.errors import InvalidArgumentError
from kvpool.core.planning.grouping import layer_specs
from kvpool.core.planning.plan import KVCacheConfig, Plan, PlanError, PlanOptions, RankMemory
from kvpool.core.specs import kinds
from kvpool.core.specs.base import AttentionSpec, KVCacheSpec
from kvpool.core.specs.pool_config import KVCacheGroup
from kvpool.models.config import Model
from kvpool.wire.log_fields import format_bytes

_USES: Final = {
    "kv_bytes_per_token": "bytes per token, all stages, one tensor rank",
    "windowed_kv_bytes_per_token": "... per token in a window",
    "state_bytes_per_request": "... of states, per request",
    "encoder_kv_bytes_per_token": "... per encoder token",
}
"""What `bytes_by_use` counts, with labels for people."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model and its plan.

    Attributes:
        model: The model, as on one tensor-parallel rank.
        ranks: Layers and memory of each rank.
        options: The options of the plan.
        plan: The plan.
        tensor_parallel_size: Ranks per pipeline stage.
        engines: Engines that share the cache.
        host_memory_bytes: Host memory of each rank for evicted blocks; None if it is not planned.
    """

    model: Model
    ranks: tuple[RankMemory, ...]
    options: PlanOptions
    plan: Plan
    tensor_parallel_size: int
    engines: int = 1
    host_memory_bytes: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests of maximum length that fit at once. vLLM 0.32 logs this as its KV cache size."""
        return int(self.plan.max_concurrency * self.plan.max_model_len) if self.plan.groups else 0

    @property
    def num_host_blocks(self) -> int:
        """Number of blocks that fit the host memory of the rank whose blocks are largest."""
        slot_bytes = max(config.block_size_bytes for config in self.plan.configs)
        return (self.host_memory_bytes or 0) // slot_bytes if slot_bytes else 0

    @property
    def num_host_tokens(self) -> int:
        """Tokens of requests of maximum length whose blocks fit the host memory."""
        return self.num_host_blocks * self.plan.max_model_len // max(self.plan.blocks_per_request, 1)

    @property
    def max_requests(self) -> int | None:
        """Number of requests that fit at once, if each has one token; None for a model without a KV cache.

        However short, a request takes a block in every group, and one more for the state after each draft token.
        """
        if not self.plan.groups:
            return None
        each = sum(1 + kinds.num_draft_blocks(kinds.allocation_spec(group.spec)) for group in self.plan.groups)
        return num_request_blocks(self.plan, self.options) // each

    def unused_bytes(self, rank: int) -> int:
        """Memory of a rank that no block takes: all ranks have the blocks of the one with the least."""
        return max(self.ranks[rank].available_bytes - used_bytes(self.plan.configs[rank]), 0)

    def span_tokens(self, group: KVCacheGroup) -> int:
        """Returns the tokens of a request that a block of a group spans: at most the longest one's."""
        span = kinds.block_span_tokens(group.spec, self.options.decode_context_parallel_size)
        return span if kinds.allocation_spec(group.spec).is_cached else self.plan.max_model_len

    def blocks_per_request(self, group: KVCacheGroup) -> int:
        """Returns the blocks of a group that a request of maximum length needs."""
        return group.spec.max_blocks(self.options.limits(self.plan.max_model_len))

    @property
    def padding_fraction(self) -> float:
        """Fraction of padding in the bytes of a request of maximum length, on the rank with most padding."""
        blocks = [self.blocks_per_request(group) for group in self.plan.groups]
        return max(_padding_fraction(blocks, config) for config in self.plan.configs)

    def request_bytes(self, config: KVCacheConfig) -> int:
        """Returns the bytes that a request of maximum length needs on a rank."""
        return self.plan.blocks_per_request * config.block_size_bytes

    def warnings(self) -> list[str]:
        """Returns warnings for the user of this plan."""
        plan = self.plan
        sentences = []
        if plan.longest_request_tokens < plan.max_model_len:
            sentences.append(
                f"a request of {plan.max_model_len:,} tokens needs {plan.blocks_per_request:,} blocks, and the pool has"
                f" {plan.num_blocks:,}, including the null block and sinks: the longest request that it can serve has"
                f" {plan.longest_request_tokens:,} tokens"
            )
        if rare := kinds.rare_hits(map(self.span_tokens, plan.groups), plan.max_model_len):
            sentences.append(rare)
        for rank, (memory, config) in enumerate(zip(self.ranks, plan.configs, strict=True)):
            if used_bytes(config) > memory.available_bytes:
                sentences.append(
                    f"rank {rank} has {format_bytes(memory.available_bytes)}, and {plan.num_blocks:,} blocks need"
                    f" {format_bytes(used_bytes(config))}"
                )
        return sentences


def _padding_fraction(blocks: list[int], config: KVCacheConfig) -> float:
    taken = sum(blocks) * config.block_size_bytes
    padding = sum(n * size for n, size in zip(blocks, config.padding_bytes_per_block, strict=True))
    return padding / taken if taken else 0.0


def used_bytes(config: KVCacheConfig) -> int:
    """Returns the bytes of a rank's tensors."""
    return sum(tensor.size_bytes for tensor in config.tensors)


def bytes_by_use(specs: Iterable[KVCacheSpec]) -> dict[str, int]:
    """Returns the bytes, without padding, that layers of one tensor rank need for a token that the rank holds.

    Four figures: bytes per token that stay, bytes per token while it is in a window, bytes of states per request of
    any length (including states of drafts), and bytes per token of an encoder's output.
    """
    figures = dict.fromkeys(_USES, 0.0)
    for spec in specs:
        token_bytes = spec.content_size_bytes / spec.block_size
        if isinstance(spec, kinds.MambaSpec | kinds.CircularBufferSpec):
            figures["state_bytes_per_request"] += spec.content_size_bytes * (1 + kinds.num_draft_blocks(spec))
        elif isinstance(spec, kinds.CrossAttentionSpec):
            figures["encoder_kv_bytes_per_token"] += token_bytes
        elif not spec.keeps_all:
            figures["windowed_kv_bytes_per_token"] += token_bytes
        elif spec.keeps_tokens:
            figures["kv_bytes_per_token"] += token_bytes
    return {use: int(size) for use, size in figures.items()}


def kv_dtypes(model: Model) -> list[str]:
    """Returns the element types of keys and values."""
    return sorted({spec.dtype for _, spec in model.layers if isinstance(spec, AttentionSpec)})


def layers_by_kind(model: Model) -> dict[str, int]:
    """Returns the number of layers of each kind."""
    return dict(Counter(type(spec).__name__ for _, spec in model.layers))


def as_json(planned: PlannedModel) -> dict[str, Any]:
    """Returns the whole plan. The model's figures cover all its layers on one tensor rank."""
    model, plan, options = planned.model, planned.plan, planned.options
    concurrency = plan.max_concurrency if math.isfinite(plan.max_concurrency) else None
    host = {"num_host_blocks": planned.num_host_blocks, "num_host_tokens": planned.num_host_tokens}
    return {
        "architecture": model.architecture,
        "layers_by_kind": layers_by_kind(model),
        "kv_dtypes": kv_dtypes(model),
        **bytes_by_use(spec for _, spec in model.layers),
        "tensor_parallel_size": planned.tensor_parallel_size,
        "pipeline_parallel_size": len(plan.configs) // planned.tensor_parallel_size,
        "decode_context_parallel_size": options.decode_context_parallel_size,
        "engines": planned.engines,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": plan.max_model_len,
        "num_blocks": plan.num_blocks,
        "num_tokens": planned.num_tokens,
        **(host if planned.host_memory_bytes is not None else {}),
        "max_concurrency": concurrency,
        "max_requests": planned.max_requests,
        "tokens_at_max_model_len": planned.num_tokens if concurrency else None,
        "blocks_per_request": plan.blocks_per_request,
        "hit_multiple_tokens": hit_multiple_tokens(plan, options),
        "loads": [{**asdict(load), "num_tokens": load.num_tokens} for load in loads(plan, options)],
        "longest_request_tokens": plan.longest_request_tokens,
        "padding_fraction": planned.padding_fraction,
        "groups": [_group_as_json(planned, group_id) for group_id in range(len(plan.groups))],
        "ranks": [_rank_as_json(planned, rank) for rank in range(len(plan.configs))],
        "notes": model.notes,
        "warnings": planned.warnings(),
    }


def _group_as_json(planned: PlannedModel, group_id: int) -> dict[str, Any]:
    group = planned.plan.groups[group_id]
    return {
        "group_id": group_id,
        "layer_names": group.layer_names,
        "blocks_per_request": planned.blocks_per_request(group),
        "block_span_tokens": planned.span_tokens(group),
        "spec": _spec_as_json(group.spec),
    }


def _rank_as_json(planned: PlannedModel, rank: int) -> dict[str, Any]:
    memory, config = planned.ranks[rank], planned.plan.configs[rank]
    return {
        "rank": rank,
        "pipeline_stage": rank // planned.tensor_parallel_size,
        "tensor_rank": rank % planned.tensor_parallel_size,
        **bytes_by_use(memory.layers.values()),
        "available_bytes": memory.available_bytes,
        "used_bytes": used_bytes(config),
        "unused_bytes": planned.unused_bytes(rank),
        "request_bytes": planned.request_bytes(config),
        "num_blocks": config.num_blocks,
        "block_size_bytes": config.block_size_bytes,
        "padding_bytes_per_block": config.padding_bytes_per_block,
        "groups": [group.layer_names for group in config.groups],
        "tensors": config.tensors,
    }


def error_as_json(error: InvalidArgumentError) -> dict[str, Any]:
    """Returns the reason why there is no plan."""
    facts: dict[str, Any] = {"reason": error.reason, "field": error.field, "message": error.message}
    if isinstance(error, PlanError) and error.needed_bytes:
        names = ("needed_bytes", "available_bytes", "max_model_len", "estimated_max_model_len")
        facts |= {name: getattr(error, name) for name in names}
    return {"error": facts}


def _spec_as_json(spec: KVCacheSpec) -> dict[str, Any]:
    entries: dict[str, Any] = {"type": type(spec).__name__, "page_size_bytes": spec.page_size_bytes}
    if isinstance(spec, kinds.UniformTypeKVCacheSpecs):
        return {**entries, "block_size": spec.block_size, "layers": {n: _spec_as_json(s) for n, s in spec.layers}}
    return {**entries, **asdict(spec)}


def print_tables(planned: PlannedModel) -> None:
    """Prints the plan as tables."""
    _print_summary(planned)
    if planned.plan.groups:
        print_line()
        print_line("groups: tokens and page size per block, blocks per request")
        _print_groups(planned)
        print_line()
        print_line("requests at once, by length")
        _print_loads(planned)
        print_line()
        print_line("ranks")
        _print_ranks(planned)
    for sentence in planned.model.notes:
        print_line(f"note: {sentence}")
    for sentence in planned.warnings():
        print_line(f"warning: {sentence}")


def _print_summary(planned: PlannedModel) -> None:
    model, plan = planned.model, planned.plan
    layers = ", ".join(f"{count} {kind.removesuffix('Spec')}" for kind, count in layers_by_kind(model).items())
    rows = [("layers", layers or "none with a cache"), ("elements", ", ".join(kv_dtypes(model)) or "states only")]
    rows += [(_USES[name], f"{n:,}") for name, n in bytes_by_use(spec for _, spec in model.layers).items() if n]
    rows += [
        ("blocks, including the null block", f"{plan.num_blocks:,}"),
        ("longest request", f"{plan.max_model_len:,} tokens, {plan.blocks_per_request:,} blocks"),
    ]
    if plan.groups:
        rows.append(("maximum concurrency of such requests", f"{plan.max_concurrency:.2f}"))
        if planned.engines > 1:
            each = plan.max_concurrency / planned.engines
            rows.append(("... of each engine, if all have as many", f"{each:.2f}"))
        rows.append(("tokens of these requests together", f"{planned.num_tokens:,}"))
        if planned.host_memory_bytes is not None:
            rows.append(("blocks in host memory", f"{planned.num_host_blocks:,}, {planned.num_host_tokens:,} tokens"))
        rows.append(("most requests at once, however short", f"{planned.max_requests:,}"))
        if multiple := hit_multiple_tokens(plan, planned.options):
            rows.append(("prefixes are hit in multiples of", f"{multiple:,} tokens"))
        rows.append(("padding in the memory of such a request", f"{planned.padding_fraction:.2%}"))
    print_facts(model.architecture.encode("utf-8", "backslashreplace").decode(), rows)


def _print_groups(planned: PlannedModel) -> None:
    """Prints one row per run of groups that have equal specs."""
    groups = planned.plan.groups
    columns: tuple[Column[list[int]], ...] = (
        Column("GROUP", _span),
        Column("KIND", lambda run: _kind(groups[run[0]].spec), is_text=True),
        Column("LAYERS", lambda run: " ".join(str(len(groups[i].layer_names)) for i in run), is_text=True),
        Column("TOKENS", lambda run: f"{planned.span_tokens(groups[run[0]]):,}"),
        Column("PAGE", lambda run: format_bytes(groups[run[0]].spec.page_size_bytes)),
        Column("BLOCKS", lambda run: f"{planned.blocks_per_request(groups[run[0]]):,}"),
    )
    print_table(columns, [list(run) for _, run in groupby(range(len(groups)), lambda i: groups[i].spec)])


def _print_loads(planned: PlannedModel) -> None:
    """Prints how many requests of each length fit at once. Short ones end at blocks, long ones at tokens."""
    columns: tuple[Column[Load], ...] = (
        Column("TOKENS", lambda load: f"{load.request_tokens:,}"),
        Column("BLOCKS", lambda load: f"{load.blocks_per_request:,}"),
        Column("REQUESTS", lambda load: f"{load.num_requests:,}"),
        Column("TOKENS TOGETHER", lambda load: f"{load.num_tokens:,}"),
    )
    print_table(columns, loads(planned.plan, planned.options))


def _print_ranks(planned: PlannedModel) -> None:
    """Prints one row per run of ranks that have the same stage and memory."""
    configs = planned.plan.configs

    def stage_and_memory(rank: int) -> tuple[int, int]:
        return rank // planned.tensor_parallel_size, planned.ranks[rank].available_bytes

    columns: tuple[Column[list[int]], ...] = (
        Column("RANKS", _span),
        Column("STAGE", lambda run: str(stage_and_memory(run[0])[0])),
        Column("LAYERS", lambda run: str(sum(len(layer_specs(group)) for group in configs[run[0]].groups))),
        Column("TENSORS", lambda run: _tensors(configs[run[0]])),
        Column("MEMORY", lambda run: format_bytes(stage_and_memory(run[0])[1])),
        Column("UNUSED", lambda run: format_bytes(planned.unused_bytes(run[0]))),
        Column("PER REQUEST", lambda run: format_bytes(planned.request_bytes(configs[run[0]]))),
    )
    print_table(columns, [list(run) for _, run in groupby(range(len(configs)), stage_and_memory)])


def _span(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def _tensors(config: KVCacheConfig) -> str:
    sizes = {tensor.size_bytes for tensor in config.tensors}
    each = f" x {format_bytes(sizes.pop())}" if len(sizes) == 1 else ""
    return f"{len(config.tensors)}{each}"


def _kind(spec: KVCacheSpec) -> str:
    first = kinds.allocation_spec(spec)
    windows = ("sliding_window", "attention_chunk_size", "sink_len")
    tokens = next((value for name in windows if (value := getattr(first, name, 0))), 0)
    sizes = ", several sizes" if isinstance(spec, kinds.UniformTypeKVCacheSpecs) else ""
    return type(first).__name__.removesuffix("Spec") + (f", {tokens:,} tokens" if tokens else "") + sizes
