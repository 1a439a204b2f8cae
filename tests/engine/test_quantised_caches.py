"""Caches whose states are packed, or stand for several tokens: pool, planner and `kvpool plan` have vLLM's page sizes.

vLLM's own classes make the specs, its backends pack them, and its planner says how many blocks fit.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from vllm.platforms.interface import Platform
from vllm.utils import torch_utils
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler as Plain

from engine.driving import Setup, make_scheduler
from kvpool.client import KVCacheGroup, PoolConfig, connect
from kvpool.client.vllm.pool_config import UnsupportedError, check_supported, config_of, spec_of
from kvpool.core.ids import PoolName
from kvpool.core.planning.grouping import layer_specs
from kvpool.core.planning.plan import PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import KVCacheSpec, MambaCacheMode, RequestLimits
from kvpool.core.specs.kinds import MambaSpec
from kvpool.models.config import ModelOptions, derive_model
from kvpool.wire.pools import config_from_proto

BLOCK_SIZE: Final = 16
HEADS: Final[dict[str, Any]] = {"block_size": BLOCK_SIZE, "num_kv_heads": 8, "head_size": 128}
LATENT_HEADS: Final[dict[str, Any]] = {"num_kv_heads": 1, "head_size": 576}
NUM_LAYERS: Final = 6
MEMORY: Final = 64 * 2**20
CONFIG: Final[dict[str, object]] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
LATENT_CONFIG: Final[dict[str, object]] = {
    **CONFIG,
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def _spec(dtype: str, kind: str = "FullAttentionSpec", **fields: Any) -> Any:
    """A layer's spec as vLLM makes it before its attention backend adds to it."""
    return getattr(kv_cache_interface, kind)(
        dtype=torch_utils.STR_DTYPE_TO_TORCH_DTYPE[dtype],
        kv_quant_mode=kv_cache_interface.get_kv_quant_mode(dtype),
        **{**HEADS, **fields},
    )


def _triton(spec: Any) -> Any:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend  # noqa: PLC0415 - loads kernels

    return TritonAttentionBackend.customize_spec(spec)


def _turboquant(spec: Any) -> Any:
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend  # noqa: PLC0415 - as above

    return TurboQuantAttentionBackend.customize_spec(spec)


def _ultraquant(spec: Any) -> Any:
    """As its backend does, which needs a GPU's compiler."""
    from vllm.v1.attention.ops.ultraquant.format import slot_size  # noqa: PLC0415 - as above

    return replace(spec, state_content_bytes=slot_size(spec.head_size))


def _flashinfer(spec: Any) -> Any:
    """As FlashInfer's backend does, which needs its package."""
    content = torch_utils.nvfp4_kv_cache_full_dim(spec.head_size)
    return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=content)


def _latent(dtype: str) -> Any:
    """As MLAAttention and its backend do."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend  # noqa: PLC0415 - as above

    content = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(dtype)
    own = {"cache_dtype_str": dtype, "state_content_bytes": content}
    return MLACommonBackend.customize_spec(_spec(dtype, "MLAAttentionSpec", **LATENT_HEADS, **own))


PACKED: Final[dict[str, tuple[Callable[[Any], Any], int | None]]] = {
    "int4_per_token_head": (_triton, 16 * 8 * (128 + 8)),
    "int8_per_token_head": (_triton, 16 * 8 * (256 + 8)),
    "fp8_per_token_head": (_triton, 16 * 8 * (256 + 8)),
    "nvfp4": (_flashinfer, 18_432),
    "nvfp4_4over6": (_flashinfer, 18_432),
    "turboquant_k8v4": (_turboquant, None),
    "turboquant_4bit_nc": (_turboquant, None),
    "turboquant_k3v4_nc": (_turboquant, None),
    "turboquant_3bit_nc": (_turboquant, None),
    "ultraquant_4bit": (_ultraquant, None),
}
"""By KV cache dtype of vLLM: its backend, and the page of one layer where the backend's formula is short."""
LATENT: Final = {
    "fp8_ds_mla": 16 * 656,
    "nvfp4_ds_mla": 16 * 352,
    "int4_per_token_head": 16 * (288 + 8),
    "fp8_per_token_head": 16 * (576 + 8),
}
"""The same for latent vectors."""


def _keeps_ends(dtype: str) -> bool:
    """Whether vLLM keeps the first two and the last two layers in the model's type."""
    return dtype.startswith(("turboquant", "ultraquant"))


def check(theirs: Any, address: str, name: str) -> KVCacheSpec:
    """Converts a spec, and creates a pool of it; returns the spec that the service has."""
    spec = spec_of(theirs)
    assert spec.page_size_bytes == theirs.page_size_bytes
    config = PoolConfig(PoolName(name), 64, 256, (KVCacheGroup(spec, ("layer.0",)),))
    with connect(address) as client:
        served = config_from_proto(client.create_pool(config).config).groups[0].spec
    assert served == spec
    return served


@pytest.mark.parametrize("dtype", PACKED)
def test_a_pool_has_the_page_size_of_vllm(dtype: str, address: str) -> None:
    pack, page_size_bytes = PACKED[dtype]
    theirs = pack(_spec(dtype))
    assert page_size_bytes in (None, theirs.page_size_bytes)
    check(theirs, address, dtype)


@pytest.mark.parametrize("dtype", LATENT)
def test_a_pool_of_latent_vectors_has_the_page_size_of_vllm(dtype: str, address: str) -> None:
    assert check(_latent(dtype), address, f"latent {dtype}".replace(" ", "-")).page_size_bytes == LATENT[dtype]


def test_packed_pages_may_be_padded_or_windows(address: str) -> None:
    padded = replace(_triton(_spec("int4_per_token_head")), page_size_padded=20_000)
    assert check(padded, address, "padded").page_size_bytes == 20_000
    window = _triton(_spec("int4_per_token_head", "SlidingWindowSpec", sliding_window=64))
    check(window, address, "window")
    slots = _spec("bfloat16", num_head_slots=2, state_content_bytes=8 * 256)
    assert check(slots, address, "slots").page_size_bytes == 65_536


def test_states_of_several_tokens_and_circular_buffers_have_the_page_size_of_vllm(address: str) -> None:
    compressed = _spec("bfloat16", "MLAAttentionSpec", num_kv_heads=1, head_size=512, tokens_per_state=4)
    assert check(compressed, address, "compressed").page_size_bytes == 4 * 1024
    blob = {"state_content_bytes": 584, "alignment": 576, "cache_dtype_str": "fp8_ds_mla"}
    aligned = _spec("fp8_ds_mla", "MLAAttentionSpec", num_kv_heads=1, head_size=512, tokens_per_state=4, **blob)
    assert check(aligned, address, "aligned").page_size_bytes == 5 * 576
    pooled = _spec("bfloat16", tokens_per_state=Fraction(1, 4))
    assert check(pooled, address, "pooled").page_size_bytes == 4 * 65_536
    window = _spec("bfloat16", "SlidingWindowMLASpec", num_kv_heads=1, sliding_window=128, extra_retained_tokens=2)
    assert check(window, address, "latent-window").page_size_bytes == 16 * 256
    ring = spec_of(_spec("bfloat16", "CircularBufferSpec", block_size=8, num_kv_heads=2, head_size_v=0))
    assert (ring.page_size_bytes, ring.is_cached) == (2 * 8 * 256, False)


def test_states_have_vllms_blocks_for_drafts_and_checkpoints(address: str) -> None:
    theirs = kv_cache_interface.MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((3, 64), (4, 8, 8)),
        dtypes=(torch_utils.STR_DTYPE_TO_TORCH_DTYPE["float32"],) * 2,
        num_speculative_blocks=2,
        num_prefill_checkpoint_blocks=1,
        tp_replicated=True,
    )
    for mode in MambaCacheMode:
        if mode is not MambaCacheMode.ALL:  # which vLLM 0.32 has no more
            config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode=mode.value))
            memory_bytes = theirs.max_memory_usage_bytes(config)
            spec, limits = spec_of(theirs), RequestLimits(512, mamba_cache_mode=mode)
            assert spec.max_blocks(limits) * spec.page_size_bytes == memory_bytes
    spec = spec_of(theirs)
    assert isinstance(spec, MambaSpec)
    assert (spec.num_speculative_blocks, spec.num_prefill_checkpoint_blocks) == (2, 1)
    check(theirs, address, "states")


def block_size_of_vllm(dtype: str) -> int:
    """Tokens per block that vLLM's platform chooses for packed layers beside those of the model's type."""
    cache = SimpleNamespace(
        block_size=BLOCK_SIZE, cache_dtype=dtype, kv_cache_dtype_skip_layers=["0"], mamba_page_size_padded=None
    )
    model = SimpleNamespace(
        dtype=torch_utils.STR_DTYPE_TO_TORCH_DTYPE["bfloat16"],
        get_num_kv_heads=lambda _: HEADS["num_kv_heads"],
        get_head_size=lambda: HEADS["head_size"],
    )
    backend = SimpleNamespace(
        customize_spec=lambda spec: PACKED[dtype][0](spec) if spec.kv_quant_mode else spec,
        get_supported_kernel_block_sizes=lambda: [16, 32, 64, 128],
    )
    config = SimpleNamespace(cache_config=cache, model_config=model, parallel_config=None)
    Platform._align_heterogeneous_kv_block_size(config, backend)
    return int(cache.block_size)


def model_of_vllm(dtype: str, *, latent: bool) -> dict[str, Any]:
    """The specs of a model's layers, as vLLM makes them."""
    if latent:
        return {f"model.layers.{i}.self_attn.attn": _latent(dtype) for i in range(NUM_LAYERS)}
    block_size = block_size_of_vllm(dtype) if _keeps_ends(dtype) else BLOCK_SIZE
    packed = PACKED[dtype][0](_spec(dtype, block_size=block_size))
    ends = _spec("bfloat16", block_size=block_size) if _keeps_ends(dtype) else packed
    return {f"model.layers.{i}.self_attn.attn": packed if 2 <= i < NUM_LAYERS - 2 else ends for i in range(NUM_LAYERS)}


def plan_of_vllm(vllm_config: Any, layers: Mapping[str, Any]) -> Any:
    """The configuration of the KV cache that vLLM makes for one worker."""
    if find_spec("vllm.v1.core.kv_cache_planning"):  # since 0.33
        planning = import_module("vllm.v1.core.kv_cache_planning")
        groups = [planning.get_global_kv_cache_groups(vllm_config, [dict(layers)])]
    else:
        planning, groups = kv_cache_utils, []
    (config,) = planning.get_kv_cache_configs(vllm_config, [dict(layers)], [MEMORY], *groups)
    return config


@pytest.mark.parametrize(
    ("dtype", "latent"), [*((dtype, False) for dtype in PACKED), *((dtype, True) for dtype in LATENT)]
)
def test_plans_are_those_of_vllm(dtype: str, *, latent: bool, address: str, tmp_path: Path) -> None:
    theirs = model_of_vllm(dtype, latent=latent)
    vllm_config = make_scheduler(Plain, Setup(), tmp_path).vllm_config
    vllm_config.cache_config.kv_cache_layout = "LBNHC"  # the engine chooses it, from what the backends can read
    expected = plan_of_vllm(vllm_config, theirs)

    # What `kvpool plan --kv-dtype` derives are vLLM's layers, and its plan is vLLM's.
    model = derive_model(LATENT_CONFIG if latent else CONFIG, ModelOptions(BLOCK_SIZE, dtype))
    pages = {name: spec.page_size_bytes for name, spec in model.layers}
    assert pages == {name: spec.page_size_bytes for name, spec in theirs.items()}
    assert {spec.block_size for _, spec in model.layers} == {spec.block_size for spec in theirs.values()}
    plan = get_kv_cache_configs([RankMemory(dict(model.layers), MEMORY)], PlanOptions(1024))
    assert plan.num_blocks == expected.num_blocks
    (config,) = plan.configs
    assert sum(tensor.size_bytes for tensor in config.tensors) == expected.kv_cache_tensors[0].size

    # The pool of the engine has its number of blocks and its pages.
    pool = config_of(vllm_config, expected, f"plan/{dtype}/{latent}")
    with connect(address) as client:
        served = config_from_proto(client.create_pool(pool).config)
    assert served.num_blocks == expected.num_blocks
    assert [group.spec.page_size_bytes for group in served.groups] == [
        group.kv_cache_spec.page_size_bytes for group in expected.kv_cache_groups
    ]
    assert {name: spec.page_size_bytes for group in served.groups for name, spec in layer_specs(group)} == pages


def test_hisparse_and_replicated_layers_are_refused_by_name(tmp_path: Path) -> None:
    scheduler = make_scheduler(Plain, Setup(), tmp_path)
    hot = kv_cache_interface.HiSparseHotSpec(block_size=16, page_size=1024, blocks_per_request=2)
    with pytest.raises(UnsupportedError, match=r"HiSparseHotSpec groups of vLLM .*: it has a pool of host blocks"):
        spec_of(hot)
    config = scheduler.kv_cache_config
    config.kv_cache_groups[0].host_resident = True
    with pytest.raises(UnsupportedError, match=r"HiSparse groups of vLLM .*: it has a pool of host blocks"):
        check_supported(scheduler.vllm_config, config)
    config.kv_cache_groups[0].host_resident = False
    scheduler.vllm_config.parallel_config.decode_context_parallel_size = 2
    check_supported(scheduler.vllm_config, config)
    spec = config.kv_cache_groups[0].kv_cache_spec
    config.kv_cache_groups[0].kv_cache_spec = replace(spec, dcp_sharded=False)
    with pytest.raises(UnsupportedError, match="that decode context parallelism replicates"):
        check_supported(scheduler.vllm_config, config)


def test_a_circular_buffer_does_not_take_part_in_caching(address: str, tmp_path: Path) -> None:
    scheduler = make_scheduler(Plain, Setup(), tmp_path)
    full = scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    ring = _spec("bfloat16", "CircularBufferSpec", block_size=8)
    groups = [kv_cache_interface.KVCacheGroupSpec([f"l{i}"], spec) for i, spec in enumerate((full, ring))]
    scheduler.kv_cache_config.kv_cache_groups = groups
    pool = config_of(scheduler.vllm_config, scheduler.kv_cache_config, "circular")
    with connect(address) as client:
        assert config_from_proto(client.create_pool(pool).config).hit_alignment == full.block_size
