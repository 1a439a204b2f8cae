"""vLLM's connector that stores KV blocks in files, in which some loads fail: the block then holds something else."""

import zlib
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class FailingConnector(ExampleConnector):  # type: ignore[misc]  # vLLM has no types here
    """Fails to load the last block of every second prompt, by its tokens, and reports it. Counts loads in files."""

    _invalid: set[int]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """As vLLM's, which finds no file for a preempted request, and counts below 0 where more is cached."""
        if request.num_preemptions:
            return 0, False
        num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return max(num_tokens or 0, 0), is_async

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads, then overwrites the blocks whose load fails."""
        super().start_load_kv(forward_context, **kwargs)
        self._invalid = set()
        for request in self._get_connector_metadata().requests:
            if request.is_store:
                continue
            fails = zlib.crc32(request.token_ids.numpy().tobytes()) % 2
            with Path(self._storage_path, "failed" if fails else "loaded").open("a") as log:
                log.write("1")
            if fails:
                block = int(request.slot_mapping[-1]) // self._block_size
                self._invalid.add(block)
                for layer in forward_context.no_compile_layers.values():
                    layer.kv_cache[block] = torch.rand_like(layer.kv_cache[block])

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks whose load failed in this step."""
        invalid: set[int] = getattr(self, "_invalid", set())
        self._invalid = set()
        return invalid
