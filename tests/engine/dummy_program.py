"""Runs dummy batches on an engine in lent memory while a request is half done; an engine is global state.

python -m engine.dummy_program SPECIFICATION RESULTS     two JSON files

vLLM runs such batches on engines of MoE models while another data-parallel engine has a step. Writes down how many
bytes outside the null block changed, by a dummy batch and by a step, and the request's tokens.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.tiny_engine import add_request, start_engine
from engine.workloads import Request

PROMPT = tuple(i * 7 % 500 for i in range(100))
_NUM_STEPS, _NUM_DUMMIES = 5, 3


def _tensors(caches: Any) -> Iterator[torch.Tensor]:
    if isinstance(caches, torch.Tensor):
        yield caches
    else:
        for each in caches:
            yield from _tensors(each)


def _blocks(worker: Any) -> list[torch.Tensor]:
    """Copies what the layers see of all blocks but the null block."""
    num_blocks = worker.model_runner.kv_cache_config.num_blocks
    views = list(_tensors(worker.model_runner.kv_caches))
    assert views
    return [view.movedim(view.shape.index(num_blocks), 0)[1:].clone() for view in views]


def _num_changed(worker: Any, before: list[torch.Tensor]) -> int:
    return sum(int((one != other).sum()) for one, other in zip(before, _blocks(worker), strict=True))


def run(specification: dict[str, Any]) -> dict[str, Any]:
    """Runs a request, with dummy batches in between."""
    engine = start_engine(specification["llm"])
    executor = engine.engine_core.engine_core.model_executor
    worker = executor.driver_worker.worker
    add_request(engine, "a", 0, Request(PROMPT, 40))
    for _ in range(_NUM_STEPS):
        engine.step()
    changed = []
    for act in [executor.execute_dummy_batch] * _NUM_DUMMIES * specification["has_dummies"] + [engine.step]:
        before = _blocks(worker)
        act()
        changed.append(_num_changed(worker, before))
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return {"changed": changed, "tokens": list(outputs[-1].outputs[0].token_ids)}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
