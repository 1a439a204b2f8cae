"""What `kvpool plan` tells of a plan, as tables and as JSON."""

import math
from collections import Counter
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpool.models.config import Model
from kvpool.server.core.config import KVCacheGroup
from kvpool.server.core.errors import InvalidArgumentError
from kvpool.server.core.plan import GIB, KVCacheConfig, Plan, PlanError, PlanOptions, RankMemory
from kvpool.server.core.plan_groups import layer_specs
from kvpool.server.core.specs import (
    CrossAttentionSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    allocation_spec,
    block_span_tokens,
)

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model and its plan.

    Attributes:
        model: The model, as on one tensor-parallel rank.
        ranks: What each rank brought.
        options: What was asked.
        plan: What came out.
        tensor_parallel_size: Ranks of a pipeline stage.
    """

    model: Model
    ranks: tuple[RankMemory, ...]
    options: PlanOptions
    plan: Plan
    tensor_parallel_size: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks hold if every group gets as many: what vLLM logs as the size of its KV cache."""
        groups = self.plan.groups
        if not groups:
            return 0
        spans = (block_span_tokens(group.spec, self.options.decode_context_parallel_size) for group in groups)
        return self.plan.num_blocks // len(groups) * min(spans)

    def blocks_per_request(self, group: KVCacheGroup) -> int:
        """Blocks that a request of the longest length takes in a group."""
        return allocation_spec(group.spec).max_blocks(self.options.limits(self.plan.max_model_len))

    def padding_fraction(self, config: KVCacheConfig) -> float:
        """Of the bytes that a request of the longest length takes on a rank, those that hold nothing."""
        blocks = [self.blocks_per_request(group) for group in self.plan.groups]
        taken = sum(blocks) * config.block_size_bytes
        padding = sum(n * size for n, size in zip(blocks, config.padding_bytes_per_block, strict=True))
        return padding / taken if taken else 0.0

    def warnings(self) -> list[str]:
        """What a user should know before running this."""
        plan = self.plan
        if plan.longest_request_tokens >= plan.max_model_len:
            return []
        sentence = (
            f"the pool holds requests of up to {plan.longest_request_tokens:,} tokens: of its {plan.num_blocks:,}"
            f" blocks some are set aside (the null block, sinks), and {plan.max_model_len:,} tokens take"
            f" {plan.blocks_per_request:,}"
        )
        return [sentence]


def bytes_by_use(model: Model) -> dict[str, int]:
    """Bytes on one rank, padding apart: what every token adds for good, what windows hold of it, and states."""
    kept = windowed = state = encoder = 0
    for _, spec in model.layers:
        token_bytes = spec.content_size_bytes // spec.block_size
        if isinstance(spec, CrossAttentionSpec):
            encoder += token_bytes
        elif not spec.has_token_slots:
            state += spec.content_size_bytes
        elif not spec.keeps_all:
            windowed += token_bytes
        elif spec.keeps_tokens:
            kept += token_bytes
    return {
        "kv_bytes_per_token": kept,
        "windowed_kv_bytes_per_token": windowed,
        "state_bytes_per_request": state,
        "encoder_kv_bytes_per_token": encoder,
    }


def layers_by_kind(model: Model) -> dict[str, int]:
    """How many layers there are of each kind."""
    return dict(Counter(type(spec).__name__ for _, spec in model.layers))


def as_json(planned: PlannedModel) -> dict[str, Any]:
    """The whole plan."""
    model, plan = planned.model, planned.plan
    concurrency = plan.max_concurrency
    return {
        "architecture": model.architecture,
        "layers_by_kind": layers_by_kind(model),
        **bytes_by_use(model),
        "max_model_len": plan.max_model_len,
        "num_blocks": plan.num_blocks,
        "num_tokens": planned.num_tokens,
        "max_concurrency": concurrency if math.isfinite(concurrency) else None,
        "blocks_per_request": plan.blocks_per_request,
        "longest_request_tokens": plan.longest_request_tokens,
        "padding_fraction": max(planned.padding_fraction(config) for config in plan.configs),
        "groups": [
            {
                "group_id": group_id,
                "layer_names": list(group.layer_names),
                "blocks_per_request": planned.blocks_per_request(group),
                "spec": _spec_as_json(group.spec),
            }
            for group_id, group in enumerate(plan.groups)
        ],
        "ranks": [
            {
                "rank": rank,
                "pipeline_stage": rank // planned.tensor_parallel_size,
                "tensor_rank": rank % planned.tensor_parallel_size,
                "available_bytes": planned.ranks[rank].available_bytes,
                "used_bytes": sum(tensor.size_bytes for tensor in config.tensors),
                "num_blocks": config.num_blocks,
                "block_size_bytes": config.block_size_bytes,
                "padding_bytes_per_block": list(config.padding_bytes_per_block),
                "groups": [list(group.layer_names) for group in config.groups],
                "tensors": [
                    {"size_bytes": tensor.size_bytes, "shared_by": list(tensor.shared_by)} for tensor in config.tensors
                ],
            }
            for rank, config in enumerate(plan.configs)
        ],
        "notes": list(model.notes),
        "warnings": planned.warnings(),
    }


def error_as_json(error: InvalidArgumentError) -> dict[str, Any]:
    """Why there is no plan."""
    facts: dict[str, Any] = {"reason": error.reason, "field": error.field, "message": error.message}
    if isinstance(error, PlanError) and error.needed_bytes:
        names = ("needed_bytes", "available_bytes", "max_model_len", "estimated_max_model_len")
        facts |= {name: getattr(error, name) for name in names}
    return {"error": facts}


def _spec_as_json(spec: KVCacheSpec) -> dict[str, Any]:
    entries: dict[str, Any] = {"type": type(spec).__name__, "page_size_bytes": spec.page_size_bytes}
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {**entries, "block_size": spec.block_size, "layers": {n: _spec_as_json(s) for n, s in spec.layers}}
    return {**entries, **{field.name: getattr(spec, field.name) for field in fields(spec)}}


def print_tables(planned: PlannedModel) -> None:
    """Prints the plan for a reader."""
    console = Console(highlight=False)
    plan = planned.plan
    console.print(_summary(planned))
    if plan.groups:
        console.print(_group_table(planned))
        console.print(_rank_table(planned))
    for sentence in planned.model.notes:
        console.print(f"note: {sentence}", markup=False)
    for sentence in planned.warnings():
        console.print(f"warning: {sentence}", markup=False)


def _summary(planned: PlannedModel) -> Table:
    model, plan = planned.model, planned.plan
    table = Table(title=model.architecture, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    kinds = ", ".join(f"{count} {kind.removesuffix('Spec')}" for kind, count in layers_by_kind(model).items())
    rows = [("layers", kinds or "none that keep anything")]
    labels = {
        "kv_bytes_per_token": "KV bytes a token and rank",
        "windowed_kv_bytes_per_token": "... in windows",
        "state_bytes_per_request": "state bytes a request and rank",
        "encoder_kv_bytes_per_token": "KV bytes an encoder token and rank",
    }
    rows += [(labels[name], f"{size:,}") for name, size in bytes_by_use(model).items() if size]
    rows += [
        ("blocks", f"{plan.num_blocks:,}"),
        ("tokens, shared evenly by the groups", f"{planned.num_tokens:,}"),
        ("longest request", f"{plan.max_model_len:,} tokens, {plan.blocks_per_request:,} blocks"),
    ]
    if plan.groups:
        rows.append(("such requests at a time", f"{plan.max_concurrency:.2f}"))
        waste = max(planned.padding_fraction(config) for config in plan.configs)
        rows.append(("padding, of what such a request takes", f"{waste:.2%}"))
    for row in rows:
        table.add_row(*row)
    return table


def _group_table(planned: PlannedModel) -> Table:
    """A row for groups in a row that are alike but for the number of their layers."""
    table = Table(title="groups")
    table.add_column("group")
    table.add_column("kind", no_wrap=True)
    for name in ("layers", "block size", "page", "a request"):
        table.add_column(name, justify="right")
    for spec, run in groupby(enumerate(planned.plan.groups), key=lambda entry: entry[1].spec):
        numbered = list(run)
        first, last = numbered[0][0], numbered[-1][0]
        blocks = planned.blocks_per_request(numbered[0][1])
        table.add_row(
            str(first) if first == last else f"{first}-{last}",
            _kind(spec),
            " ".join(str(len(group.layer_names)) for _, group in numbered),
            f"{spec.block_size:,}",
            _size(spec.page_size_bytes),
            f"{blocks:,} block{'s' * (blocks != 1)}",
        )
    return table


def _rank_table(planned: PlannedModel) -> Table:
    table = Table(title="ranks")
    for name in ("rank", "stage", "layers", "tensors", "memory", "used", "left over"):
        table.add_column(name, justify="right")
    for rank, (brought, config) in enumerate(zip(planned.ranks, planned.plan.configs, strict=True)):
        used = sum(tensor.size_bytes for tensor in config.tensors)
        table.add_row(
            str(rank),
            str(rank // planned.tensor_parallel_size),
            str(sum(len(layer_specs(group)) for group in config.groups)),
            _tensors(config),
            _size(brought.available_bytes),
            _size(used),
            _size(brought.available_bytes - used),
        )
    return table


def _tensors(config: KVCacheConfig) -> str:
    sizes = {tensor.size_bytes for tensor in config.tensors}
    each = f" x {_size(sizes.pop())}" if len(sizes) == 1 else ""
    return f"{len(config.tensors)}{each}"


def _kind(spec: KVCacheSpec) -> str:
    first = allocation_spec(spec)
    windows = ("sliding_window", "attention_chunk_size", "sink_len")
    tokens = next((value for name in windows if (value := getattr(first, name, 0))), 0)
    sizes = ", several sizes" if isinstance(spec, UniformTypeKVCacheSpecs) else ""
    return type(first).__name__.removesuffix("Spec") + (f", {tokens:,} tokens" if tokens else "") + sizes


def _size(size_bytes: int) -> str:
    if abs(size_bytes) >= GIB:
        return f"{size_bytes / GIB:,.2f} GiB"
    if abs(size_bytes) >= _MIB:
        return f"{size_bytes / _MIB:,.2f} MiB"
    return f"{size_bytes / 1024:,.2f} KiB" if size_bytes else "0"
