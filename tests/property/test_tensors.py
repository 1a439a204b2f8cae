"""Whatever is planned, each layer's view of a block is exactly that block's bytes of its buffer."""

import math
from dataclasses import replace

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvpool.core.planning.grouping import layer_specs
from kvpool.core.planning.plan import KVCacheConfig, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import AttentionSpec, KVCacheSpec
from kvpool.core.specs.kinds import MambaSpec, MLAAttentionSpec
from kvpool.gpu_worker.layouts import LayerCache
from kvpool.gpu_worker.tensors import allocate_buffers, reshape_kv_cache
from property.test_plans import rank_lists
from support.torch import bytes_of, on_each_device

LAYOUTS = ["flash_attn", "flash_attn_hnd", "flashinfer_nhd", "flashinfer_hnd", "triton", "flex", "flash_attn_diffkv"]
MARK = 0xA5


@st.composite
def small_configs(draw: st.DrawFn) -> KVCacheConfig:
    """Ranks of random plans, with a few blocks."""
    ranks = [RankMemory(rank.layers, 2**34) for rank in draw(rank_lists())]
    plan = get_kv_cache_configs(ranks, PlanOptions(64, block_outermost=draw(st.booleans())))
    config = draw(st.sampled_from(plan.configs))
    assume(config.tensors)
    num_blocks = draw(st.integers(2, 4))
    tensors = tuple(
        replace(tensor, size_bytes=tensor.size_bytes // plan.num_blocks * num_blocks) for tensor in config.tensors
    )
    return replace(config, num_blocks=num_blocks, tensors=tensors)


@st.composite
def layouts_of(draw: st.DrawFn, config: KVCacheConfig) -> tuple[dict[str, str], list[int]]:
    """A backend for each layer with keys and values, and a kernel block size for each group whose pages allow one."""
    layouts: dict[str, str] = {}
    sizes = []
    for group in config.groups:
        specs = dict(layer_specs(group))
        for name, spec in specs.items():
            if isinstance(spec, AttentionSpec) and not isinstance(spec, MLAAttentionSpec) and draw(st.booleans()):
                layouts[name] = draw(st.sampled_from(LAYOUTS))
        can_split = not config.tensors[0].offsets_bytes
        can_split = can_split and all(spec.page_size_bytes == spec.content_size_bytes for spec in specs.values())
        can_split = can_split and not any(isinstance(spec, MambaSpec) for spec in specs.values())
        sizes.append(draw(st.sampled_from([0, 4, 8])) if can_split and specs else 0)
    return layouts, sizes


def parts_of(view: LayerCache) -> tuple[torch.Tensor, ...]:
    return view if isinstance(view, tuple) else (view,)


def write_block(view: LayerCache, layout: str, block: int, kernel_blocks: int) -> None:
    """Writes all that a layer sees of a block of the pool."""
    own = slice(block * kernel_blocks, (block + 1) * kernel_blocks)
    for part in parts_of(view):
        axis = 1 if layout in ("", "flash_attn", "flash_attn_hnd") and part.dim() == 5 and part.shape[0] == 2 else 0
        marked = bytes_of(part)
        (marked[:, own] if axis else marked[own]).fill_(MARK)


def offset_of(config: KVCacheConfig, name: str) -> tuple[int, int, int]:
    """The index of a layer's buffer, where its page begins in a block, and the distance between blocks, in bytes."""
    i = next(i for i, tensor in enumerate(config.tensors) if name in tensor.shared_by)
    tensor = config.tensors[i]
    offset = tensor.offsets_bytes[tensor.shared_by.index(name)] if tensor.offsets_bytes else 0
    return i, offset, tensor.size_bytes // config.num_blocks


def kernel_blocks_of(spec: KVCacheSpec, size: int) -> int:
    return spec.block_size // size if size else 1


@on_each_device
@settings(max_examples=settings().max_examples * 2)
@given(data=st.data(), config=small_configs())
def test_a_layer_accesses_only_its_pages(device: torch.device, data: st.DataObject, config: KVCacheConfig) -> None:
    layouts, sizes = data.draw(layouts_of(config))
    buffers = allocate_buffers(config, device)
    views = reshape_kv_cache(config, config.num_blocks, buffers, layouts, sizes)
    assert set(views) == {name for tensor in config.tensors for name in tensor.shared_by}
    for group, size in zip(config.groups, sizes, strict=True):
        for name, spec in layer_specs(group):
            content = spec.content_size_bytes
            at, offset, stride = offset_of(config, name)
            assert sum(math.prod(part.shape) * part.itemsize for part in parts_of(views[name])) == (
                config.num_blocks * content
            )
            block = data.draw(st.integers(0, config.num_blocks - 1))
            write_block(views[name], layouts.get(name, ""), block, kernel_blocks_of(spec, size))
            expected = torch.zeros(config.num_blocks, stride, dtype=torch.uint8, device=device)
            expected[block, offset : offset + content] = MARK
            for i, buffer in enumerate(buffers):
                seen = buffer.view(torch.uint8)
                assert torch.equal(seen, expected.flatten()) if i == at else not seen.any()
            buffers[at].zero_()
