"""Which engines can run on lent memory, and what their workers declare of it."""

import hashlib
import json
from typing import Any, Final

from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

from kvpool.client.vllm.pool_config import UnsupportedError, config_of
from kvpool.client.vllm.versions import VERSION
from kvpool.core.ranks.messages import DeclaredMemory

_VERSIONS: Final = ("0.32.", "0.33.")
_LENT: Final = "in lent memory"


def check_version() -> None:
    """Raises UnsupportedError if the installed vLLM is one whose workers are not known."""
    if not VERSION.startswith(_VERSIONS):
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
    from vllm.distributed.kv_transfer.kv_connector.utils import (  # noqa: PLC0415 - older versions lack it
        get_current_attn_backends,
    )

    backends = get_current_attn_backends(vllm_config)
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    return {
        "decode_context_parallel_size": str(parallel.decode_context_parallel_size),
        "draft_model": draft.model if draft is not None else "",
        "dtype": str(model.dtype).removeprefix("torch."),
        "expert_parallel": str(bool(parallel.enable_expert_parallel)).lower(),
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_cache_layout": str(kv_cache_config.kv_cache_layout),
        "model": str(model.model),
        "model_config": hashlib.sha256(model.hf_config.to_json_string(use_diff=False).encode()).hexdigest(),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
        "quantization": str(model.quantization or ""),
        # Stages of a pipeline have layers of their own.
        "rank_attention_backend": " ".join(sorted(".".join(each.full_cls_name()) for each in backends)),
        "rank_placement": _placement(kv_cache_config),
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
    return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()
