"""Memory and construction time of a large pool, in kvpool and vLLM, each in a fresh process."""

import statistics
from typing import Final

from benchmarks.construction import construct
from benchmarks.core_target import pool_config
from benchmarks.race import Figures
from benchmarks.report import Run
from benchmarks.workloads import Task
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.replay import ChildError
from kvpool.replay.children import Pipe, child_process

_NAMES: Final = {
    "construct_ms": "construct_1M_ms",
    "bytes_per_block": "bytes_per_block",
    "traced_bytes_per_block": "traced_bytes_per_block",
}


def memory(run: Run) -> None:
    """Makes the large pool several times. Bytes are the growth of the process's resident memory."""
    num_blocks = run.scale.large_blocks
    ours: list[Figures] = []
    theirs: list[Figures] = []
    for _ in range(run.scale.num_constructions):
        ours.append(_construct_here(num_blocks))
        if run.vllm:
            theirs.append(run.vllm.construct(num_blocks))
        run.advance(1)
    run.report.core.update(_medians(ours))
    if run.report.vllm is not None:
        run.report.vllm.update(_medians(theirs))


def _medians(rounds: list[Figures]) -> Figures:
    return {_NAMES[name]: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def _construct_here(num_blocks: int) -> Figures:
    with child_process("kvpool-construction", _construct, num_blocks) as (_, pipe):
        try:
            figures: Figures = pipe.recv()
        except EOFError:
            raise ChildError(f"the process that makes a pool of {num_blocks:,} blocks ended") from None
    return figures


def _construct(num_blocks: int, pipe: Pipe) -> None:
    config = pool_config("bench", Task("none", num_blocks))
    pipe.send(construct(lambda: KVCacheManager(config), num_blocks))
