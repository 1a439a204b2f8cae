"""Workloads do the work that their figures name, and detect targets that do not."""

from collections.abc import Sequence

import pytest

from benchmarks.core_target import CoreRequest, CoreTarget
from benchmarks.workloads import BLOCK_SIZE, NewBlocks, Task, WorkloadError, open_workload
from kvpool.core.blocks.prefix_search import ComputedBlocks


def test_prompts_miss_then_hit_and_free_all_blocks() -> None:
    task = Task("prompts", num_blocks=200, prompt_blocks=8)
    target = CoreTarget(task)
    micros = open_workload(target, task).round(30)
    names = {"lookup_miss_8", "lookup_hit_8", "allocate_cold_8", "allocate_hit_8", "free_8", "prompt_8_end_to_end"}
    assert set(micros) == {"hash", *names}
    assert all(len(taken) == 30 for taken in micros.values())
    assert target.pool.blocks.num_free_blocks == 199
    assert target.pool.blocks.num_evicted == 0
    assert target.pool.stats.hits_tokens == 30 * 8 * BLOCK_SIZE


def test_evictions_evict_one_block_per_allocated_block() -> None:
    task = Task("evictions", num_blocks=100, prompt_blocks=8)
    target = CoreTarget(task)
    workload = open_workload(target, task)
    assert len(target.pool.blocks.prefix_map) == 99
    before = target.pool.blocks.num_evicted
    workload.round(5)
    assert target.pool.blocks.num_evicted - before == 5 * 8


def test_windows_have_one_group_of_full_attention_and_others() -> None:
    task = Task("windows", num_blocks=2000, num_windowed_groups=5, prompt_blocks=80)
    target = CoreTarget(task)
    micros = open_workload(target, task).round(2)
    assert set(micros) == {"gemma3_lookup_miss_80", "gemma3_allocate_80", "gemma3_free_80"}
    assert len(target.pool.config.groups) == 6


@pytest.mark.parametrize("num_windowed_groups", [0, 2])
def test_decodes_grow_every_request_by_one_token_per_step(num_windowed_groups: int) -> None:
    task = Task("decodes", 3000, num_windowed_groups, num_requests=32, prompt_blocks=4)
    target = CoreTarget(task)
    open_workload(target, task).round(BLOCK_SIZE)
    used = 2999 - target.pool.blocks.num_free_blocks
    prompts = 32 * 4 + 30  # two of the prompts end with a full block
    assert used == (prompts + 32) * task.num_groups


class Lying(CoreTarget):
    """Reports false hits, and allocates nothing for decodes."""

    def lookup(self, request: CoreRequest) -> ComputedBlocks:
        return ComputedBlocks(((),), BLOCK_SIZE if request else 0)

    def decode(self, requests: Sequence[CoreRequest], token_ids: Sequence[int]) -> Sequence[NewBlocks | None]:
        assert len(token_ids) == len(requests)
        return [None] * len(requests)


@pytest.mark.parametrize("kind", ["prompts", "evictions", "windows", "decodes"])
def test_unintended_work_raises(kind: str) -> None:
    task = Task(kind, num_blocks=2000, num_requests=16, prompt_blocks=4)
    workload = open_workload(Lying(task), task)
    with pytest.raises(WorkloadError):
        workload.round(1)
