"""Runs prompts on one vLLM engine, loads other weights, and runs the prompts again; an engine is global state.

python -m engine.weights_program SPECIFICATION RESULTS     two JSON files

The specification has the arguments of `vllm.LLM` and, for an engine on a pool, the address of the service and the pool:
an operator then states the version of the new weights. vLLM alone drops its cached prefixes instead.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from engine.tiny_engine import add_request, start_engine
from engine.workloads import Request
from kvpool.client.admin import AdminClient

PREFIX = tuple(i * 7 % 500 for i in range(100))
PROMPTS = ((*PREFIX, 1, 2), (*PREFIX, 3), PREFIX[:70])


def load_other_weights(model: torch.nn.Module) -> None:
    """Draws other matrices of the same sizes."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight[0].numel() ** -0.5, generator=draw)


def _answers(engine: Any, name: str) -> list[dict[str, Any]]:
    """Runs the prompts one by one."""
    answers = []
    for i, prompt in enumerate(PROMPTS):
        add_request(engine, f"{name}-{i}", i, Request(prompt, max_tokens=24))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        token_ids = list(outputs[-1].outputs[0].token_ids)
        answers.append({"token_ids": token_ids, "num_cached_tokens": outputs[-1].num_cached_tokens})
    return answers


def run(specification: dict[str, Any]) -> dict[str, Any]:
    """Runs the prompts with both weights."""
    engine = start_engine(specification["llm"])
    results = {"1": _answers(engine, "first")}
    if "pool" in specification:
        with AdminClient(specification["address"]) as admin:
            admin.set_weights_version(specification["pool"], "2")
    else:
        engine.reset_prefix_cache()
    engine.apply_model(load_other_weights)
    return {**results, "2": _answers(engine, "second")}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
