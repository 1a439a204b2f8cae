"""Which engines can run on lent memory, and what their workers declare of it."""

import hashlib
import json
from typing import Any, Final

from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

from kvpool.client.vllm.pool_config import UnsupportedError, config_of
from kvpool.client.vllm.versions import SUPPORTED_VERSIONS, VERSION
from kvpool.client.vllm.weights import ordered_text
from kvpool.core.errors import WrongStateError
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.v1.pool_pb2 import PoolInfo

_LENT: Final = "in lent memory"
_IMAGES: Final = (
    *("media_io_kwargs", "mm_encoder_attn_dtype", "mm_processor_kwargs", "video_pruning_method", "video_pruning_rate"),
)
"""Options on which embeddings of images depend, and which vLLM's hashes of images lack."""


def check_version() -> None:
    """Raises UnsupportedError if the installed vLLM is one whose workers are not known."""
    if not VERSION.startswith(SUPPORTED_VERSIONS):
        raise UnsupportedError("lent memory", "use vLLM 0.32.x or 0.33.x")


def check_lendable(vllm_config: Any) -> None:
    """Raises UnsupportedError if an engine cannot run on lent memory; names the feature."""
    check_version()
    parallel = vllm_config.parallel_config
    if vllm_config.model_config.enable_sleep_mode and vllm_config.kv_transfer_config is not None:
        raise UnsupportedError(f"sleep mode with a KV connector {_LENT}", "it may transfer blocks at any time")
    if parallel.enable_elastic_ep:
        raise UnsupportedError(f"elastic expert parallelism {_LENT}", "its workers warm up while others run")
    if parallel.pipeline_parallel_size > 1 and vllm_config.speculative_config is not None:
        # Stages write once more when they learn which drafts were accepted: after the output of the step has arrived.
        raise UnsupportedError(f"drafts with pipeline parallelism {_LENT}", "use tensor parallelism")
    if vllm_config.cache_config.use_replayssm:
        raise UnsupportedError(f"ReplaySSM {_LENT}", "its tuning at the start writes to blocks of other engines")


def check_same(vllm_config: Any, pool: PoolInfo) -> None:
    """Raises WrongStateError if an engine has another model than those that use the memory, as far as is known yet."""
    theirs = dict(pool.fingerprint)
    for name, own in _engine_fingerprint(vllm_config).items():
        if theirs and own != theirs.get(name):
            message = f"{own!r}, the engines that use the memory have {theirs.get(name)!r}"
            raise WrongStateError("MEMORY_DIFFERS", message, field=f'fingerprint["{name}"]')


def declared_memory(vllm_config: Any, kv_cache_config: Any, pool: str) -> DeclaredMemory:
    """Describes the memory that a worker needs, from its part of the KV cache configuration.

    Raises:
        UnsupportedError: The service does not support the configuration; names the feature.
    """
    return DeclaredMemory(
        # As the engine does for its scheduler, so that both have the same configuration.
        config_of(vllm_config, generate_scheduler_kv_cache_config([kv_cache_config]), pool),
        _size_bytes(kv_cache_config),
        tuple(sorted(_fingerprint(vllm_config, kv_cache_config).items())),
    )


def _size_bytes(kv_cache_config: Any) -> int:
    sizes = {tensor.size for tensor in kv_cache_config.kv_cache_tensors}
    if len(sizes) != 1 or (size := int(sizes.pop())) % kv_cache_config.num_blocks:
        raise UnsupportedError(f"this KV cache layout {_LENT}", "the layers need one buffer of equal blocks")
    return size


def _fingerprint(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """What the contents of a block depend on, apart from its tokens, the hashed keys and the weights version."""
    from vllm.distributed.kv_transfer.kv_connector.utils import (  # noqa: PLC0415 - needed in lent memory only
        get_current_attn_backends,
    )

    backends = get_current_attn_backends(vllm_config)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        **_engine_fingerprint(vllm_config),
        "cp_kv_cache_interleave_size": str(vllm_config.parallel_config.cp_kv_cache_interleave_size),
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_cache_dtype_skip_layers": " ".join(sorted(set(cache.kv_cache_dtype_skip_layers))),
        "kv_cache_layout": str(kv_cache_config.kv_cache_layout),
        "model_config": _digest(model.hf_config.to_json_string(use_diff=False)),
        "multimodal": _digest(ordered_text([getattr(model.multimodal_config, name, None) for name in _IMAGES])),
        "quantization_config": _digest(ordered_text(model.quantization_config)),
        # Stages of a pipeline have layers of their own.
        "rank_attention_backend": " ".join(sorted(".".join(each.full_cls_name()) for each in backends)),
        "rank_placement": _placement(kv_cache_config),
    }


def _engine_fingerprint(vllm_config: Any) -> dict[str, str]:
    """The part that the model's layers do not change when they are made."""
    model, parallel, speculative = vllm_config.model_config, vllm_config.parallel_config, vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    return {
        "decode_context_parallel_size": str(parallel.decode_context_parallel_size),
        "draft_model": draft.model if draft is not None else "",
        "dtype": str(model.dtype).removeprefix("torch."),
        "expert_parallel": str(bool(parallel.enable_expert_parallel)).lower(),
        "model": str(model.model),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
        "quantization": str(model.quantization or ""),
        "revision": str(model.revision or ""),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "vllm_version": VERSION,
    }


def _placement(kv_cache_config: Any) -> str:
    """Digest of where each layer's pages are in the memory."""
    tensors = [
        (tensor.layers, tensor.offset, tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
    ]
    return _digest(json.dumps(tensors))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
