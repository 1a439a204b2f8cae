"""What workers of native engines have besides: a loader that draws weights, and a method that tells what they use.

vLLM imports this in each process of a worker (`worker_extension_cls`).
"""

from typing import Any

from vllm.compilation.counter import compilation_counter

from engine import drawn_loader

__all__ = ["NativeWorker", "drawn_loader"]


class NativeWorker:
    """Methods that `collective_rpc` calls."""

    vllm_config: Any
    model_runner: Any

    def facts(self) -> dict[str, Any]:
        """What the engine uses."""
        scheduler, compilation = self.vllm_config.scheduler_config, self.vllm_config.compilation_config
        layers = [getattr(layer, "impl", None) for layer in compilation.static_forward_context.values()]
        groups = [group for groups in self.model_runner.attn_groups for group in groups]
        return {
            "dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            "attention": sorted({group.backend.get_name() for group in groups}),
            "flash_attention": sorted({getattr(impl, "vllm_flash_attn_version", 0) for impl in layers}),
            "has_graphs": compilation_counter.num_cudagraph_captured > 0,
            "graphs": compilation_counter.num_cudagraph_captured,
            "graph_mode": str(compilation.cudagraph_mode).removeprefix("CUDAGraphMode."),
            "compilation": str(compilation.mode).removeprefix("CompilationMode."),
            "is_async": scheduler.async_scheduling,
            "is_chunked": scheduler.enable_chunked_prefill,
            "scheduler": scheduler.get_scheduler_cls().__module__.rpartition(".")[0],
            "is_lent": type(self).__module__.startswith("kvpool."),
            "runner": type(self.model_runner).__module__,
            "blocks": self.vllm_config.cache_config.num_gpu_blocks,
            "batched_tokens": scheduler.max_num_batched_tokens,
        }
