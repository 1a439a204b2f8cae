"""A vLLM engine that a CPU runs: what vLLM has to know before it is imported, and the weights of the models.

Weights are drawn here, as vLLM's own dummy weights are so small that most tokens do not depend on what is in the cache.
"""

import os
from typing import Any

# One thread, so that sums are in the same order on every machine. Before vLLM and torch are imported.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from engine.workloads import Request


@register_model_loader("drawn")
class DrawnWeights(BaseModelLoader):  # type: ignore[misc] # untyped where vLLM is not installed
    """Draws weights that make each token depend on all before it."""

    def download_model(self, model_config: object) -> None:
        """There is nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:  # noqa: ARG002 - vLLM's signature
        """Norms become 1, and matrices keep the size of what they multiply."""
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:
                    weight.fill_(1)
                else:
                    drawn = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
                    weight.copy_(drawn.normal_(0, weight[0].numel() ** -0.5, generator=draw))


def start_engine(llm: dict[str, Any]) -> Any:
    """Starts an engine from arguments of `vllm.LLM`; returns vLLM's LLMEngine."""
    return LLM(load_format="drawn", skip_tokenizer_init=True, disable_log_stats=False, **llm).llm_engine


def add_request(engine: Any, request_id: str, index: int, request: Request, **sampling: object) -> None:
    """Puts a request in, which is the one of its index to arrive, with more arguments of `vllm.SamplingParams`."""
    prompt: dict[str, object] = {"prompt_token_ids": list(request.prompt)}
    if request.salt is not None:
        prompt["cache_salt"] = request.salt
    params = SamplingParams(
        n=request.copies,
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=request.max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=request.prompt_logprobs,
        **sampling,
    )
    # Priorities go by the time next; the clock's would not be the same twice.
    engine.add_request(request_id, prompt, params, arrival_time=float(index), priority=request.priority)
