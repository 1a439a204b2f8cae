"""A device's memory as a rank lays it out, as JSON: large plans allocated and checked, and what a step's tables cost.

    PYTHONPATH=tests python -m benchmarks.parts.bench_device --device cuda:0 --memory-gib 100
    PYTHONPATH=tests python -m benchmarks.parts.bench_device --device cpu --memory-gib 1

For plans like those of Llama 3 70B and Gemma 3 27B on one rank: allocate, see each layer as its backend does, check
shapes and strides, and that layers which share a buffer see each other's bytes. Then the block tables of 256 running
requests: what it takes until the device has them, when all rows are new and when a sixteenth got a block.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from kvpool.core.planning.plan import GIB, KVCacheConfig, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.gpu_worker.block_table import BlockTables
from kvpool.gpu_worker.device import describe_device, open_device
from kvpool.gpu_worker.group_table import BlockTableOptions
from kvpool.gpu_worker.tensors import allocate_buffers, reshape_kv_cache

MAX_MODEL_LEN = 8192
NUM_REQUESTS = 256
ROUNDS = 50
LAYOUTS = ("flash_attn", "flash_attn_hnd", "flashinfer_nhd", "flashinfer_hnd", "triton", "flex")


def models() -> dict[str, dict[str, KVCacheSpec]]:
    """Layers of one rank."""
    llama = FullAttentionSpec(16, 8, 128, "bfloat16")
    full = FullAttentionSpec(16, 16, 128, "bfloat16")
    window = SlidingWindowSpec(16, 16, 128, "bfloat16", sliding_window=1024)
    return {
        "llama_3_70b_like": {f"model.layers.{i}.self_attn": llama for i in range(80)},
        "gemma_3_27b_like": {f"model.layers.{i}.self_attn": full if i % 6 == 5 else window for i in range(62)},
    }


def measure_allocation(layers: Mapping[str, KVCacheSpec], device: torch.device, memory_bytes: int) -> dict[str, object]:
    """Allocates a plan, and checks every layer's view in every layout."""
    options = PlanOptions(max_model_len=MAX_MODEL_LEN)
    config = get_kv_cache_configs([RankMemory(layers, memory_bytes)], options).configs[0]
    start = time.perf_counter()
    buffers = allocate_buffers(config, device)
    wait_for(device)
    seconds = time.perf_counter() - start
    for layout in LAYOUTS:
        views = reshape_kv_cache(config, config.num_blocks, buffers, dict.fromkeys(layers, layout))
        check_views(config, layout, {name: view for name, view in views.items() if isinstance(view, torch.Tensor)})
    return {
        "num_blocks": config.num_blocks,
        "groups": len(config.groups),
        "buffers": len(buffers),
        "allocated_gib": round(sum(buffer.nbytes for buffer in buffers) / GIB, 2),
        "allocate_and_zero_ms": round(seconds * 1000, 1),
        "layouts_checked": len(LAYOUTS),
    }


def check_views(config: KVCacheConfig, layout: str, views: Mapping[str, torch.Tensor]) -> None:
    """Checks shapes, strides and, by writing the last block of one layer and reading the others', who shares what."""
    block = config.num_blocks - 1
    keys_first = layout.startswith("flash_attn")
    for tensor in config.tensors:
        first = views[tensor.shared_by[0]]
        block_axis = 1 if keys_first else 0
        for name in tensor.shared_by:
            view = views[name]
            require(view.shape[block_axis] == config.num_blocks, f"{name}: {tuple(view.shape)}")
            page_bytes = view.stride(block_axis) * view.element_size()
            require(page_bytes * config.num_blocks == tensor.size_bytes, f"{name}: strides {view.stride()}")
            hnd = layout.endswith("hnd")
            require((view.stride(3) > view.stride(2)) == hnd, f"{name}: strides {view.stride()} in {layout}")
        first.select(block_axis, block).fill_(1.0)
        for name in tensor.shared_by:
            require(bool((views[name].select(block_axis, block) == 1.0).all()), f"{name} does not share its buffer")
            require(not bool(views[name].select(block_axis, block - 1).any()), f"{name}: a block overlaps the next")
        first.select(block_axis, block).zero_()


def measure_tables(device: torch.device) -> dict[str, float]:
    """What it takes until the device has the tables of 256 requests, in microseconds."""
    options = BlockTableOptions(2**20, NUM_REQUESTS, MAX_MODEL_LEN, MAX_MODEL_LEN)
    layers = models()["gemma_3_27b_like"]
    config = get_kv_cache_configs([RankMemory(layers, 8 * GIB)], PlanOptions(max_model_len=MAX_MODEL_LEN)).configs[0]
    tables = BlockTables(config.groups, options, device)
    groups = len(config.groups)
    blocks = MAX_MODEL_LEN // 16 - ROUNDS - 2

    def fill() -> None:
        for row in range(NUM_REQUESTS):
            tables.add_row(row, [range(1 + row * blocks, 1 + (row + 1) * blocks)] * groups)

    def append() -> None:
        for row in range(0, NUM_REQUESTS, 16):
            tables.append_row(row, [[7]] * groups)

    def commit() -> None:
        tables.commit(NUM_REQUESTS)
        wait_for(device)

    fill()
    all_rows = median_us(commit, before=fill)
    sixteenth = median_us(commit, before=append)
    return {"groups": groups, "commit_256_new_rows_us": all_rows, "commit_16_of_256_rows_us": sixteenth}


def median_us(call: Callable[[], None], before: Callable[[], None]) -> float:
    """Median time of a call, after one that is not measured."""
    times = []
    for _ in range(ROUNDS):
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(median(times) * 1e6, 1)


def wait_for(device: torch.device) -> None:
    """Waits until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def require(condition: bool, message: str) -> None:  # noqa: FBT001 - what is required
    """Ends the program unless the condition holds."""
    if not condition:
        raise SystemExit(message)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-gib", type=float, default=1.0)
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    figures: dict[str, object] = {"device": describe_device(device), "torch": torch.__version__}
    for name, layers in models().items():
        figures[name] = measure_allocation(layers, device, int(arguments.memory_gib * GIB))
    figures["block_tables"] = measure_tables(device)
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
