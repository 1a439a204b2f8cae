"""Blocks that hold the pages of all layers of a group side by side lie as vLLM's do, to the byte.

vLLM's planner places the layers and its workers make the views; kvpool's planner, wire and worker do the same.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from vllm.config import CacheConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvpool.client.vllm.pool_config import spec_of
from kvpool.client.vllm.versions import IS_0_33_OR_NEWER
from kvpool.core.planning.grouping import layer_specs
from kvpool.core.planning.plan import KVCacheConfig, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.ranks.messages import Planned
from kvpool.core.specs.base import MambaCacheMode
from kvpool.gpu_worker.layouts import default_layout
from kvpool.gpu_worker.tensors import allocate_buffers, reshape_kv_cache
from kvpool.wire.ranks import server_message_from_proto, server_message_to_proto
from support.torch import bytes_of

MEMORY: Final = 4 * 2**20
BFLOAT16: Final = torch.bfloat16


def full(heads: int = 2, head_size: int = 64) -> Any:
    return kv_cache_interface.FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=head_size, dtype=BFLOAT16)


def window(heads: int = 2, head_size: int = 64) -> Any:
    return kv_cache_interface.SlidingWindowSpec(
        block_size=16, num_kv_heads=heads, head_size=head_size, dtype=BFLOAT16, sliding_window=128
    )


def latent(head_size: int = 576, dtype: torch.dtype = BFLOAT16) -> Any:
    return kv_cache_interface.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=head_size, dtype=dtype)


def latent_window() -> Any:
    return kv_cache_interface.SlidingWindowMLASpec(
        block_size=16, num_kv_heads=1, head_size=1024, dtype=BFLOAT16, sliding_window=128
    )


def ring() -> Any:
    return kv_cache_interface.CircularBufferSpec(
        block_size=4, num_kv_heads=1, head_size=128, head_size_v=0, dtype=BFLOAT16
    )


def state() -> Any:
    return kv_cache_interface.MambaSpec(
        block_size=16, shapes=((3, 64), (2, 32, 32)), dtypes=(BFLOAT16, torch.float32), mamba_cache_mode="align"
    )


MIXES: Final[dict[str, dict[str, Any]]] = {
    "one size": {f"f{i}": full() for i in range(3)} | {f"w{i}": window() for i in range(6)},
    "latent and indexer": {
        f"{kind}{i}": spec
        for i in range(3)
        for kind, spec in (("mla", latent()), ("indexer", latent(132, torch.uint8)))
    },
    "latent, indexer and windows": {
        f"{kind}{i}": spec
        for i in range(3)
        for kind, spec in (("mla", latent()), ("indexer", latent(132, torch.uint8)))
    }
    | {f"w{i}": latent_window() for i in range(5)},
    "windows of other heads": {f"f{i}": full(head_size=128) for i in range(2)} | {f"w{i}": window() for i in range(7)},
    "windows of two sizes": {f"f{i}": full(4) for i in range(2)}
    | {f"w{i}": window(heads) for i, heads in enumerate((2, 3, 2, 3, 2, 3))},
    "states": {f"f{i}": full() for i in range(2)} | {f"m{i}": state() for i in range(9)},
    "latent, indexer, rings and states": {
        f"{kind}{i}": spec
        for i in range(4)
        for kind, spec in (("mla", latent()), ("indexer", latent(132, torch.uint8)), ("ring", ring()))
    }
    | {f"m{i}": state() for i in range(7)},
}


def their_config(specs: dict[str, Any], layout: str) -> Any:
    cache_config = CacheConfig()
    cache_config.kv_cache_layout = layout
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        cache_config=cache_config,
    )
    planning = import_module(f"vllm.v1.core.{'kv_cache_planning' if IS_0_33_OR_NEWER else 'kv_cache_utils'}")
    return planning.get_kv_cache_config_from_groups(config, planning.get_kv_cache_groups(config, specs), MEMORY)


def sent(config: KVCacheConfig) -> KVCacheConfig:
    """A plan as a rank receives it."""
    received = server_message_from_proto(server_message_to_proto(Planned(1, config, 128)))
    assert isinstance(received, Planned)
    return received.config


def own_config(specs: dict[str, Any]) -> KVCacheConfig:
    layers = {name: spec_of(spec) for name, spec in specs.items()}
    options = PlanOptions(128, block_outermost=True, mamba_cache_mode=MambaCacheMode.ALIGN)
    (config,) = get_kv_cache_configs([RankMemory(layers, MEMORY)], options).configs
    return config


@pytest.mark.parametrize("layout", ["BLNHC", "BLHNC"])
@pytest.mark.parametrize("mix", MIXES)
def test_pages_begin_where_vllm_places_them(mix: str, layout: str) -> None:
    theirs, config = their_config(MIXES[mix], layout), sent(own_config(MIXES[mix]))
    assert config.num_blocks == theirs.num_blocks
    assert [group.layer_names for group in config.groups] == [
        tuple(group.layer_names) for group in theirs.kv_cache_groups
    ]
    (tensor,) = config.tensors
    placed = {
        name: (each.size, each.offset + i * each.layer_stride, each.block_stride)
        for each in theirs.kv_cache_tensors
        for i, name in enumerate(each.layers)
    }
    stride = tensor.size_bytes // config.num_blocks
    own = zip(tensor.shared_by, tensor.offsets_bytes, strict=True)
    assert {name: (tensor.size_bytes, offset, stride) for name, offset in own} == placed


@pytest.mark.parametrize("mix", MIXES)
def test_views_have_the_bytes_of_vllms_views(mix: str) -> None:
    """Each block of each layer, and strides of latent vectors, whose views have the same shape."""
    theirs, config = their_config(MIXES[mix], "BLNHC"), sent(own_config(MIXES[mix]))
    their_views = allocate_kv_cache(theirs, torch.device("cpu"), KVCacheLayout.BLNHC)
    theirs_storage = next(iter(their_views.values())).untyped_storage()
    their_buffer = torch.empty(0, dtype=torch.uint8).set_(theirs_storage, 0, (theirs_storage.nbytes(),), (1,))
    (own_buffer,) = allocate_buffers(config, torch.device("cpu"))
    specs = {name: spec for group in config.groups for name, spec in layer_specs(group)}
    with_heads = {name: "triton" for name, spec in specs.items() if default_layout(spec) == "flash_attn"}
    own_views = reshape_kv_cache(config, config.num_blocks, (own_buffer,), with_heads)
    assert set(own_views) == set(their_views)
    for name, view in own_views.items():
        parts = view if isinstance(view, tuple) else (view,)
        for block in (0, 1, config.num_blocks - 1):
            for part in parts:
                bytes_of(part[block : block + 1]).fill_(1 + block % 255)
            their_views[name][block].view(torch.uint8).fill_(1 + block % 255)
        assert torch.equal(own_buffer.view(torch.uint8), their_buffer)
        if default_layout(specs[name]) == "mla":
            assert parts[0].stride() == their_views[name].squeeze(1).stride()
