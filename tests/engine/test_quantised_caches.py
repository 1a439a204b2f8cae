"""Quantised caches, whose pages are smaller or larger than their elements: the pool has vLLM's page size."""

from dataclasses import replace
from typing import Any, Final

import pytest
from vllm.utils import torch_utils
from vllm.v1 import kv_cache_interface

from kvpool.client import KVCacheGroup, PoolConfig, connect
from kvpool.client.vllm.pool_config import spec_of
from kvpool.client.vllm.versions import COUNTS_ADMISSIONS
from kvpool.core.ids import PoolName
from kvpool.core.specs.base import KVCacheSpec

pytestmark = pytest.mark.skipif(not COUNTS_ADMISSIONS, reason="older versions of vLLM have no packed caches")

BLOCK_SIZE: Final = 16
HEADS: Final[dict[str, Any]] = {"block_size": BLOCK_SIZE, "num_kv_heads": 8, "head_size": 128}


def _spec(dtype: str, kind: str = "FullAttentionSpec", **fields: Any) -> Any:
    """A layer's spec as vLLM makes it before its attention backend adds to it."""
    return getattr(kv_cache_interface, kind)(
        dtype=torch_utils.STR_DTYPE_TO_TORCH_DTYPE[dtype],
        kv_quant_mode=kv_cache_interface.get_kv_quant_mode(dtype),
        **{**HEADS, **fields},
    )


def per_token_head(dtype: str, **fields: Any) -> Any:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend  # noqa: PLC0415 - only newer versions

    return TritonAttentionBackend.customize_spec(_spec(dtype, **fields))


def turboquant(dtype: str) -> Any:
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend  # noqa: PLC0415 - as above

    return TurboQuantAttentionBackend.customize_spec(_spec(dtype))


def ultraquant(dtype: str) -> Any:
    """As its backend does, which needs a GPU's compiler."""
    from vllm.v1.attention.ops.ultraquant.format import slot_size  # noqa: PLC0415 - as above

    spec = _spec(dtype)
    return replace(spec, state_content_bytes=slot_size(spec.head_size))


def nvfp4(dtype: str) -> Any:
    """As FlashInfer's backend does, which needs its package."""
    spec = _spec(dtype)
    content = torch_utils.nvfp4_kv_cache_full_dim(spec.head_size)
    return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=content)


def latent(dtype: str) -> Any:
    """As MLAAttention does."""
    content = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(dtype)
    own = {"num_kv_heads": 1, "head_size": 576, "cache_dtype_str": dtype, "state_content_bytes": content}
    return _spec(dtype, "MLAAttentionSpec", **own)


def latent_per_token_head(dtype: str) -> Any:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend  # noqa: PLC0415 - as above

    return MLACommonBackend.customize_spec(latent(dtype))


CASES: Final = {
    "int4_per_token_head": (per_token_head, 16 * 8 * (128 + 8)),
    "int8_per_token_head": (per_token_head, 16 * 8 * (256 + 8)),
    "fp8_per_token_head": (per_token_head, 16 * 8 * (256 + 8)),
    "nvfp4": (nvfp4, 18_432),
    "nvfp4_4over6": (nvfp4, 18_432),
    "turboquant_k8v4": (turboquant, None),
    "turboquant_4bit_nc": (turboquant, None),
    "turboquant_k3v4_nc": (turboquant, None),
    "turboquant_3bit_nc": (turboquant, None),
    "ultraquant_4bit": (ultraquant, None),
    "fp8_ds_mla": (latent, 16 * 656),
    "nvfp4_ds_mla": (latent, 16 * 352),
}
"""By KV cache dtype of vLLM: what makes the spec, and its page where vLLM's formula is short."""


def check(theirs: Any, address: str, name: str) -> KVCacheSpec:
    """Converts a spec, and creates a pool of it; returns the spec that the service has."""
    spec = spec_of(theirs)
    assert spec.page_size_bytes == theirs.page_size_bytes
    config = PoolConfig(PoolName(name), 64, 256, (KVCacheGroup(spec, ("layer.0",)),))
    with connect(address) as client:
        served = client.create_pool(config).config.groups[0].spec
    assert served == spec
    return served


@pytest.mark.parametrize("dtype", CASES)
def test_a_pool_has_the_page_size_of_vllm(dtype: str, address: str) -> None:
    make, page_size_bytes = CASES[dtype]
    theirs = make(dtype)
    assert page_size_bytes in (None, theirs.page_size_bytes)
    assert check(theirs, address, dtype).page_size_bytes == theirs.page_size_bytes


def test_packed_pages_may_be_padded_or_windows_or_latent(address: str) -> None:
    padded = replace(per_token_head("int4_per_token_head"), page_size_padded=20_000)
    assert check(padded, address, "padded").page_size_bytes == 20_000
    window = per_token_head("int4_per_token_head", kind="SlidingWindowSpec", sliding_window=64)
    check(window, address, "window")
    check(latent_per_token_head("int4_per_token_head"), address, "latent")
