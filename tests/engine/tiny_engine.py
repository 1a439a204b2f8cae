"""A vLLM engine that a CPU runs: what vLLM has to know before it is imported."""

import os
from typing import Any

from engine.environment import ENGINE_ENVIRONMENT

os.environ |= {**ENGINE_ENVIRONMENT, **os.environ}  # before vLLM and torch are imported

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from engine import drawn_loader
from engine.workloads import Request


def start_engine(llm: dict[str, Any]) -> Any:
    """Starts an engine from arguments of `vllm.LLM`; returns vLLM's LLMEngine."""
    _adjust_platform(is_async=bool(llm.get("async_scheduling")))
    arguments = {"load_format": drawn_loader.NAME, "skip_tokenizer_init": True, "disable_log_stats": False, **llm}
    engine = LLM(**arguments).llm_engine
    if llm.get("pipeline_parallel_size", 1) > 1:
        # Makes the buffers between stages, which vLLM otherwise makes when it compiles or profiles.
        engine.engine_core.engine_core.model_executor.execute_dummy_batch()
    return engine


def _adjust_platform(*, is_async: bool) -> None:
    """Allows two things that vLLM turns off on CPUs, where they work: async scheduling, and to fork workers."""
    platform = type(current_platform)
    update = platform.check_and_update_config

    def update_but_keep(vllm_config: Any) -> None:
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_async
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = staticmethod(update_but_keep)


def has_work(engine: Any) -> bool:
    """Whether requests are unfinished, or a step that was sent ahead has not been read."""
    return engine.has_unfinished_requests() or bool(engine.engine_core.engine_core.batch_queue)


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
