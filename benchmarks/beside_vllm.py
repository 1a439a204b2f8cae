"""Runs the workloads on vLLM's KV cache manager. A script for an interpreter with vLLM; it does not import kvpool.

    python beside_vllm.py                Answers each JSON line of `vllm_side` with one JSON line.
    python beside_vllm.py NUM_BLOCKS     Prints time and memory of a manager of this many blocks.

Supports vLLM 0.14.1 and later. Signatures tell which further arguments the constructors of a version take.
"""

import gc
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.construction import construct
    from benchmarks.workloads import (
        BLOCK_SIZE,
        MAX_MODEL_LEN,
        WINDOW_TOKENS,
        NewBlocks,
        Task,
        Workload,
        WorkloadError,
        open_workload,
    )
else:  # import from this folder, then remove it from the path: its module names could hide others
    from construction import construct
    from workloads import (
        BLOCK_SIZE,
        MAX_MODEL_LEN,
        WINDOW_TOKENS,
        NewBlocks,
        Task,
        Workload,
        WorkloadError,
        open_workload,
    )

    sys.path.pop(0)

_answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # keeps vLLM's prints out of the answers


def _answer(**fields: object) -> None:
    print(json.dumps(fields), file=_answers)


try:
    from vllm import __version__
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request
except Exception as error:  # noqa: BLE001 - reported to the user who chose this interpreter
    _answer(error=f"{type(error).__name__}: {error}")
    sys.exit(1)

_Request = Any
_Hit = tuple[Any, ...]


def _manager(num_blocks: int, num_windowed_groups: int) -> Any:  # noqa: ANN401 - vLLM may not be installed
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": kv_cache_interface.torch.float32}
    window = kv_cache_interface.SlidingWindowSpec(**shape, sliding_window=WINDOW_TOKENS)
    specs = (kv_cache_interface.FullAttentionSpec(**shape), *[window] * num_windowed_groups)
    groups = [kv_cache_interface.KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    config = kv_cache_interface.KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    sizes = {"hash_block_size": BLOCK_SIZE, "scheduler_block_size": BLOCK_SIZE}
    known = inspect.signature(KVCacheManager).parameters
    options = {name: size for name, size in sizes.items() if name in known}
    return KVCacheManager(config, max_model_len=MAX_MODEL_LEN, enable_caching=True, log_stats=True, **options)


class VllmTarget:
    """See `Target`."""

    def __init__(self, task: Task) -> None:
        self._manager = _manager(task.num_blocks, task.num_windowed_groups)
        function = get_hash_fn_by_name(task.hash_name)
        init_none_hash(function)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, function)
        self._record_stats = getattr(self._manager, "record_prefix_cache_stats", None)
        self._start_step = getattr(self._manager, "new_step_starts", lambda: None)
        needs_eos = "eos_token_id" in inspect.signature(Request).parameters
        self._request_options = {"eos_token_id": None} if needs_eos else {}
        self._count = 0

    def hashing(self, token_ids: list[int]) -> Callable[[], object]:
        """See `Target`."""
        request = self._request(token_ids, None)
        return lambda: self._hasher(request)

    def make(self, token_ids: list[int]) -> _Request:
        """See `Target`."""
        return self._request(token_ids, self._hasher)

    def lookup(self, request: _Request) -> _Hit:
        """See `Target`. Records the statistics, as schedulers of later versions do after a look-up."""
        hit: _Hit = self._manager.get_computed_blocks(request)
        if self._record_stats:
            self._record_stats(request, hit[1])
        return hit

    def num_hit_tokens(self, hit: _Hit) -> int:
        """See `Target`."""
        return int(hit[1])

    def allocate(self, request: _Request, num_new_tokens: int, hit: _Hit | None = None) -> NewBlocks | None:
        """See `Target`."""
        blocks = (
            self._manager.allocate_slots(request, num_new_tokens, hit[1], hit[0])
            if hit
            else self._manager.allocate_slots(request, num_new_tokens)
        )
        new: NewBlocks | None = blocks and blocks.get_block_ids()
        return new

    def serve(self, token_ids: list[int]) -> _Request:
        """See `Target`."""
        request = self.make(token_ids)
        hit = self.lookup(request)
        if self.allocate(request, len(token_ids) - hit[1], hit) is None:
            raise WorkloadError("a prompt found too few blocks")
        request.num_computed_tokens = len(token_ids)
        return request

    def free(self, request: _Request) -> None:
        """See `Target`."""
        self._manager.free(request)

    def decode(self, requests: Sequence[_Request], token_ids: Sequence[int]) -> Sequence[NewBlocks | None]:
        """See `Target`."""
        self._start_step()
        allocate = self._manager.allocate_slots
        new = []
        for request, token_id in zip(requests, token_ids):  # noqa: B905 - equal lengths
            request.append_output_token_ids(token_id)
            new.append(allocate(request, 1).get_block_ids(allow_none=True))
            request.num_computed_tokens += 1
        return new

    def settle(self) -> None:
        """See `Target`. vLLM's cached blocks can be hit at once."""

    def reset(self) -> None:
        """See `Target`."""
        if not self._manager.reset_prefix_cache():
            raise WorkloadError("the cache could not be reset")

    def close(self) -> None:
        """See `Target`."""

    def _request(self, token_ids: list[int], hasher: object) -> _Request:
        self._count += 1
        sampling = SamplingParams(max_tokens=MAX_MODEL_LEN)
        return Request(
            request_id=f"r{self._count}",
            prompt_token_ids=token_ids,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=hasher,
            **self._request_options,
        )


def _serve() -> None:
    workloads: dict[str, Workload] = {}
    _answer(version=__version__)
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if "open" in message:
                task = Task(**message["task"])
                workloads[message["open"]] = open_workload(VllmTarget(task), task)
                gc.collect()
                gc.freeze()  # as vLLM's engine does after its start
                _answer()
            elif "round" in message:
                _answer(micros=workloads[message["round"]].round(message["count"]))
            else:
                del workloads[message["close"]]
                gc.unfreeze()
                _answer()
        except WorkloadError as error:
            _answer(error=str(error))


def main() -> None:
    """Answers requests, or measures the construction of a manager."""
    if sys.argv[1:]:
        num_blocks = int(sys.argv[1])
        _answer(**construct(lambda: _manager(num_blocks, 0), num_blocks))
    else:
        _serve()


if __name__ == "__main__":
    main()
