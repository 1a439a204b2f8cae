"""From a plan to steps: what is written by slots is read back through block tables. See docs/reference/tensors.md."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvpool.core.planning.plan import PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.gpu_worker.attention_backends import PagedAttentionBackend
from kvpool.gpu_worker.attention_metadata import (
    AttentionBackend,
    AttentionGroup,
    CommonAttentionMetadata,
    ScheduledStep,
    StepBuffers,
    build_attn_metadata,
    init_attn_backend,
)
from kvpool.gpu_worker.block_table import BlockTables
from kvpool.gpu_worker.group_table import BlockTableOptions
from kvpool.gpu_worker.layouts import LayerCache
from kvpool.gpu_worker.tensors import allocate_as_many, bind_kv_cache, reshape_kv_cache
from kvpool.gpu_worker.workspace import Workspace
from support.torch import on_each_device

HEADS, HEAD_SIZE = 2, 8
LAYERS: dict[str, KVCacheSpec] = {
    "full.0": FullAttentionSpec(16, HEADS, HEAD_SIZE, "float32"),
    "window.1": SlidingWindowSpec(16, HEADS, HEAD_SIZE, "float32", sliding_window=64),
    "window.2": SlidingWindowSpec(16, HEADS, HEAD_SIZE, "float32", sliding_window=64),
}


@dataclass
class Attention:
    """A layer that writes keys by slots and gathers them by block table, as kernels do."""

    keys_first: bool
    kv_cache: LayerCache = ()

    def keys(self) -> torch.Tensor:
        """(num_kernel_blocks, kernel_block_size, num_kv_heads, head_size)."""
        assert isinstance(self.kv_cache, torch.Tensor)
        return self.kv_cache[0] if self.keys_first else self.kv_cache[:, 0]

    def write(self, metadata: CommonAttentionMetadata, keys: torch.Tensor) -> None:
        slots = metadata.slot_mapping[: metadata.num_actual_tokens]
        self.keys()[slots // metadata.block_size, slots % metadata.block_size] = keys

    def gather(self, metadata: CommonAttentionMetadata, request: int) -> torch.Tensor:
        positions = torch.arange(int(metadata.seq_lens[request]), device=metadata.seq_lens.device)
        blocks = metadata.block_table[request, positions // metadata.block_size].long()
        return self.keys()[blocks, positions % metadata.block_size]


@on_each_device
@pytest.mark.parametrize("kernel_block_size", [0, 4])
@pytest.mark.parametrize("layout", ["flash_attn", "flash_attn_hnd", "flashinfer_nhd", "flashinfer_hnd", "triton"])
def test_keys_are_read_back_where_they_were_written(device: torch.device, layout: str, kernel_block_size: int) -> None:
    """Two requests of two groups with interleaved blocks, in two steps; one moves to the other's row between them."""
    (config,) = get_kv_cache_configs([RankMemory(LAYERS, 2**20)], PlanOptions(64)).configs
    backend: AttentionBackend = PagedAttentionBackend("paged", layout)
    backends = dict.fromkeys(LAYERS, backend)
    sizes = [kernel_block_size] * len(config.groups)
    buffers, num_blocks = allocate_as_many(config, device)
    caches = reshape_kv_cache(config, num_blocks, buffers, {name: b.layout for name, b in backends.items()}, sizes)
    layers = {name: Attention(layout.startswith("flash_attn")) for name in LAYERS}
    bind_kv_cache(caches, layers)
    options = BlockTableOptions(num_blocks, 4, 64, 64)
    tables, step_buffers = BlockTables(config.groups, options, device, sizes), StepBuffers(options, device)
    attn_groups = init_attn_backend(config.groups, backends, tables, Workspace(device))
    free_blocks = iter(range(1, num_blocks))

    def new(count: int) -> list[list[int]]:
        return [[next(free_blocks) for _ in range(count)] for _ in config.groups]

    tables.add_row(0, new(1))
    tables.add_row(1, new(2))
    tables.append_row(0, new(1))
    written = {name: torch.rand(2, 40, HEADS, HEAD_SIZE, device=device) for name in LAYERS}
    run_step(attn_groups, tables, step_buffers, layers, written, [0, 0], [20, 30], [0, 1])
    tables.swap_rows(0, 1)
    tables.append_row(0, new(1))
    run_step(attn_groups, tables, step_buffers, layers, written, [30, 20], [9, 1], [1, 0])
    assert next(free_blocks) < num_blocks


def run_step(  # noqa: PLR0913, PLR0917 - a runner's state
    attn_groups: tuple[AttentionGroup, ...],
    tables: BlockTables,
    step_buffers: StepBuffers,
    layers: dict[str, Attention],
    written: dict[str, torch.Tensor],
    computed: list[int],
    scheduled: list[int],
    requests: list[int],
) -> None:
    """Writes the scheduled tokens of all layers, then reads all that there are of each request."""
    step = ScheduledStep(np.array(computed), np.array(scheduled), num_padded_tokens=64)
    metadata = build_attn_metadata(attn_groups, tables, step_buffers, step)
    spans = [(r, start, start + n) for r, start, n in zip(requests, computed, scheduled, strict=True)]
    for name, layer in layers.items():
        common = metadata[name]
        assert isinstance(common, CommonAttentionMetadata)
        layer.write(common, torch.cat([written[name][r, start:stop] for r, start, stop in spans]))
    for name, layer in layers.items():
        common = metadata[name]
        assert isinstance(common, CommonAttentionMetadata)
        for row, (request, _, stop) in enumerate(spans):
            assert torch.equal(layer.gather(common, row), written[name][request, :stop])
