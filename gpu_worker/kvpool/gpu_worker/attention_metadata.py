"""Attention metadata of a step for all layers, built once per group and shared by the group's layers.

1. Values that all groups share are computed once on the host and copied together. Block tables and slots are per group.
2. A builder serves the layers of a group that have the same backend and spec. Most groups have one builder; a
   `UniformTypeKVCacheSpecs` may have several, because kernels are planned for a number of heads and a head size.
3. Metadata is valid until the next build, because it reads tensors that the next step overwrites.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_TOKENS
from kvpool.core.planning.grouping import layer_specs
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.pool_config import KVCacheGroup
from kvpool.gpu_worker.block_table import BlockTables
from kvpool.gpu_worker.group_table import BlockTableOptions, GroupTable, Integers, MambaStateIndices
from kvpool.gpu_worker.workspace import StagedArray, Workspace


@dataclass(frozen=True, slots=True)
class CommonAttentionMetadata:
    """Metadata of a step for the layers of one group. Request i is row i of the block tables.

    Attributes:
        query_start_loc: (num_reqs + 1,) int32, offset of each request's tokens in the step; the last is their number.
        query_start_loc_cpu: Copy on the host.
        seq_lens: (num_reqs,) int32, number of tokens that each request's last token attends to, including itself; of
            encoder tokens for cross attention. Counts the tokens of all ranks of context parallelism.
        seq_lens_cpu: Copy on the host.
        num_computed_tokens: (num_reqs,) int32, tokens computed before the step.
        num_computed_tokens_cpu: Copy on the host.
        num_reqs: Number of requests in the step.
        num_actual_tokens: Number of tokens in the step, without padding.
        max_query_len: Maximum number of tokens of one request in the step.
        max_seq_len: Maximum of seq_lens.
        block_table: (num_reqs, max blocks per row) int32, kernel blocks of this rank.
        block_table_cpu: Copy on the host; read only.
        block_size: Tokens per kernel block on this rank.
        slot_mapping: (num_tokens,) int64, slot of each token, -1 if it is not written; padded as the step requests. For
            cross attention (num_encoder_tokens,), slots of the encoder tokens that the step writes.
        causal: Whether a token attends only to itself and earlier tokens.
        dcp_local_seq_lens: (num_reqs,) int32, the part of seq_lens that this rank holds; None without context
            parallelism, and for kinds that it does not spread.
        dcp_local_seq_lens_cpu: Copy on the host.
        state_indices: States that are read and written; None for attention.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: Integers
    seq_lens: torch.Tensor
    seq_lens_cpu: Integers
    num_computed_tokens: torch.Tensor
    num_computed_tokens_cpu: Integers
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table: torch.Tensor
    block_table_cpu: npt.NDArray[np.int32]
    block_size: int
    slot_mapping: torch.Tensor
    causal: bool = True
    dcp_local_seq_lens: torch.Tensor | None = None
    dcp_local_seq_lens_cpu: Integers | None = None
    state_indices: MambaStateIndices | None = None


class AttentionMetadataBuilder(Protocol):
    """Builds the metadata of one backend's kernels."""

    def build(self, common: CommonAttentionMetadata) -> object:
        """Builds the metadata of the builder's layers for a step."""


@dataclass(frozen=True, slots=True)
class BuilderContext:
    """Parameters of a new builder.

    Attributes:
        layer_names: The layers that the builder serves.
        spec: The spec of each of these layers.
        block_size: Tokens per kernel block on this rank.
        max_num_reqs: Maximum number of requests per step.
        max_blocks_per_req: Maximum number of kernel blocks per request.
        workspace: Scratch memory for the builder, now or in a build. The metadata goes to the same device.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    block_size: int
    max_num_reqs: int
    max_blocks_per_req: int
    workspace: Workspace


class AttentionBackend(Protocol):
    """A family of kernels, identified by its name."""

    @property
    def name(self) -> str:
        """Name of the backend."""

    @property
    def layout(self) -> str:
        """Name of the registered layout of its pages."""

    def make_builder(self, context: BuilderContext) -> AttentionMetadataBuilder:
        """Makes a builder for layers of a group."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers of a group that share a builder.

    Attributes:
        group_id: Index of the group.
        layer_names: The layers, including those that read the cache of one of them.
        backend: The backend of the layers.
        builder: Builds the metadata of the layers.
    """

    group_id: int
    layer_names: tuple[str, ...]
    backend: AttentionBackend
    builder: AttentionMetadataBuilder


def init_attn_backend(
    groups: Sequence[KVCacheGroup],
    backends: Mapping[str, AttentionBackend],
    block_tables: BlockTables,
    workspace: Workspace,
    shared_layers: Mapping[str, str] | None = None,
) -> tuple[AttentionGroup, ...]:
    """Makes the metadata builders of a rank.

    Args:
        groups: The groups of the rank's config.
        backends: Backend of each layer that has a cache.
        block_tables: The block tables of these groups.
        workspace: Scratch memory of the device on which the metadata is stored.
        shared_layers: As for `bind_kv_cache`. Such a layer gets the metadata of the layer whose cache it reads.

    Returns:
        The layers by builder, group by group.

    Raises:
        InvalidArgumentError: A layer has no backend, a backend has no layer, or a shared layer has no target.
    """
    names = {name for group in groups for name in group.layer_names}
    shared: dict[str, list[str]] = {}
    for name, target in (shared_layers or {}).items():
        if target not in names or name in names:
            raise InvalidArgumentError("shared_layers", f"layer {name!r} cannot share the cache of {target!r}")
        shared.setdefault(target, []).append(name)
    for name in backends:
        if name not in names:
            raise InvalidArgumentError("backends", f"layer {name!r} is in no group of this rank")
    made = []
    for group_id, group in enumerate(groups):
        table = block_tables.groups[group_id]
        for backend, spec, layers in _by_backend(group, backends):
            max_num_reqs, max_blocks = table.device_table.shape
            context = BuilderContext(layers, spec, table.block_size, max_num_reqs, max_blocks, workspace)
            own = tuple(reader for name in layers for reader in (name, *shared.get(name, ())))
            made.append(AttentionGroup(group_id, own, backend, backend.make_builder(context)))
    return tuple(made)


def _by_backend(
    group: KVCacheGroup, backends: Mapping[str, AttentionBackend]
) -> list[tuple[AttentionBackend, KVCacheSpec, tuple[str, ...]]]:
    found: dict[tuple[str, KVCacheSpec], list[str]] = {}
    for name, spec in layer_specs(group):
        if name not in backends:
            raise InvalidArgumentError("backends", f"layer {name!r} has no backend")
        found.setdefault((backends[name].name, spec), []).append(name)
    return [(backends[names[0]], spec, tuple(names)) for (_, spec), names in found.items()]


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The tokens that one step computes. Request i is row i of the block tables.

    Attributes:
        num_computed_tokens: (num_reqs,), tokens of each request computed before the step.
        num_scheduled_tokens: (num_reqs,), tokens of each request in the step, at least 1.
        num_padded_tokens: Tokens that the model runs with, if more than scheduled; padding is not written.
        encoder_seq_lens: (num_reqs,), encoder tokens of each request; required for cross attention.
        encoder_rows: Requests whose encoder tokens, all of them, the step writes.
    """

    num_computed_tokens: Integers
    num_scheduled_tokens: Integers
    num_padded_tokens: int = 0
    encoder_seq_lens: Integers | None = None
    encoder_rows: Sequence[int] = ()

    def __post_init__(self) -> None:
        shape = self.num_computed_tokens.shape
        if len(shape) != 1 or not shape[0]:
            raise InvalidArgumentError("num_computed_tokens", f"shape {shape} is not (num_reqs,)")
        for name in ("num_scheduled_tokens", "encoder_seq_lens"):
            lengths = getattr(self, name)
            if lengths is not None and lengths.shape != shape:
                raise InvalidArgumentError(name, f"shape {lengths.shape} for {shape[0]} requests")
        for name, least in (("num_computed_tokens", 0), ("num_scheduled_tokens", 1), ("encoder_seq_lens", 0)):
            lengths = getattr(self, name)
            if lengths is not None:
                check_range(name, int(lengths.min()), least, MAX_TOKENS)
        if self.encoder_rows and self.encoder_seq_lens is None:
            raise InvalidArgumentError("encoder_seq_lens", "missing, but there are encoder tokens to write")
        for row in self.encoder_rows:
            check_range("encoder_rows", row, 0, shape[0] - 1)

    def token_indices(self) -> tuple[Integers, Integers]:
        """Row and position of each token, each (num_tokens,), request by request."""
        return _spread(np.arange(self.num_computed_tokens.size), self.num_computed_tokens, self.num_scheduled_tokens)

    def encoder_token_indices(self) -> tuple[Integers, Integers]:
        """Row and position of each encoder token that is written, each (num_encoder_tokens,)."""
        rows = np.asarray(self.encoder_rows, np.int64)
        lengths = self.encoder_seq_lens[rows] if self.encoder_seq_lens is not None else rows
        return _spread(rows, np.zeros_like(rows), lengths)


def _spread(rows: Integers, starts: Integers, lengths: Integers) -> tuple[Integers, Integers]:
    """Row and position of each token, if row rows[i] has positions [starts[i], starts[i] + lengths[i])."""
    begins = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) + np.repeat(starts - begins, lengths)
    return np.repeat(rows, lengths), positions


class StepBuffers:
    """Device buffers for the values that all groups share: one copy per step."""

    def __init__(self, options: BlockTableOptions, device: torch.device) -> None:
        self._options = options
        self._staged = StagedArray((5, options.max_num_reqs + 1), torch.int32, device)

    def stage(self, step: ScheduledStep) -> "StagedStep":
        """Starts the copy of a step's lengths.

        Raises:
            InvalidArgumentError: The step has more requests than the tables have rows; nothing is changed.
        """
        num_reqs = step.num_computed_tokens.size
        check_range("num_computed_tokens", num_reqs, 1, self._options.max_num_reqs)
        query_start_loc = np.zeros(num_reqs + 1, np.int32)
        np.cumsum(step.num_scheduled_tokens, out=query_start_loc[1:])
        computed = step.num_computed_tokens.astype(np.int32)
        seq_lens = computed + step.num_scheduled_tokens.astype(np.int32)
        world_size, rank = self._options.dcp_world_size, self._options.dcp_rank
        encoder = np.zeros_like(computed) if step.encoder_seq_lens is None else step.encoder_seq_lens.astype(np.int32)
        on_host = (seq_lens, computed, (seq_lens + (world_size - 1 - rank)) // world_size, encoder)
        self._staged.wait()
        self._staged.host[0, : num_reqs + 1] = query_start_loc
        self._staged.host[1:, :num_reqs] = on_host
        device = self._staged.copy(0, 5)
        return StagedStep(query_start_loc, on_host, device[0, : num_reqs + 1], tuple(device[1:, :num_reqs]))


@dataclass(frozen=True, slots=True)
class StagedStep:
    """Lengths of a step on host and device: (seq_lens, num_computed_tokens, dcp_local_seq_lens, encoder_seq_lens)."""

    query_start_loc_cpu: Integers
    host: tuple[Integers, Integers, Integers, Integers]
    query_start_loc: torch.Tensor
    device: tuple[torch.Tensor, ...]


def build_attn_metadata(
    attn_groups: Sequence[AttentionGroup], block_tables: BlockTables, buffers: StepBuffers, step: ScheduledStep
) -> dict[str, object]:
    """Copies a step to the device and builds the metadata of all layers.

    Commits the block tables. Copies run on the current stream, and kernels must run on the same stream after them.

    Returns:
        The metadata by layer name: one object for all layers that a builder serves. Valid until the next call.

    Raises:
        InvalidArgumentError: The step does not fit the tables: see `BlockTables.compute_slot_mapping`.
    """
    if step.encoder_seq_lens is None and any(table.has_encoder_slots for table in block_tables.groups):
        raise InvalidArgumentError("encoder_seq_lens", "missing, but there are layers of cross attention")
    slots = block_tables.compute_slot_mapping(*step.token_indices(), step.num_padded_tokens)
    encoder_slots = block_tables.compute_encoder_slot_mapping(*step.encoder_token_indices())
    states = block_tables.compute_state_indices(step.num_computed_tokens, step.num_scheduled_tokens)
    block_tables.commit(step.num_computed_tokens.size)
    staged = buffers.stage(step)
    commons: dict[int, CommonAttentionMetadata] = {}
    metadata: dict[str, object] = {}
    for group in attn_groups:
        table = block_tables.groups[group.group_id]
        if group.group_id not in commons:
            mapping = encoder_slots if table.has_encoder_slots else slots
            commons[group.group_id] = _common(table, staged, mapping[group.group_id], states[group.group_id])
        metadata.update(dict.fromkeys(group.layer_names, group.builder.build(commons[group.group_id])))
    return metadata


def _common(
    table: GroupTable, staged: StagedStep, slot_mapping: torch.Tensor, state_indices: MambaStateIndices | None
) -> CommonAttentionMetadata:
    lengths = 3 if table.has_encoder_slots else 0
    num_reqs = staged.host[0].size
    return CommonAttentionMetadata(
        query_start_loc=staged.query_start_loc,
        query_start_loc_cpu=staged.query_start_loc_cpu,
        seq_lens=staged.device[lengths],
        seq_lens_cpu=staged.host[lengths],
        num_computed_tokens=staged.device[1],
        num_computed_tokens_cpu=staged.host[1],
        num_reqs=num_reqs,
        num_actual_tokens=int(staged.query_start_loc_cpu[-1]),
        max_query_len=int(np.diff(staged.query_start_loc_cpu).max()),
        max_seq_len=int(staged.host[lengths].max()),
        block_table=table.device_table[:num_reqs],
        block_table_cpu=table.host_table[:num_reqs],
        block_size=table.block_size,
        slot_mapping=slot_mapping,
        causal=not table.has_encoder_slots,
        dcp_local_seq_lens=staged.device[2] if table.is_spread else None,
        dcp_local_seq_lens_cpu=staged.host[2] if table.is_spread else None,
        state_indices=state_indices,
    )
