"""Runs workloads on one vLLM engine and writes down all that it answered; an engine is global state, so a process each.

    python -m engine.run_engine SPECIFICATION RESULTS     two JSON files; see results.py

Weights are drawn here, as vLLM's own dummy weights are so small that most tokens do not depend on what is in the cache.
"""

import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# One thread, so that sums are in the same order on every machine. Before vLLM and torch are imported.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from engine.results import Answer, Outcome, Results, Specification
from engine.workloads import Request, Workload, make_workload

_COUNTERS = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions")


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
                    weight.normal_(0, weight[0].numel() ** -0.5, generator=draw)


@dataclass(slots=True)
class _Run:
    """A workload on its way through an engine."""

    engine: Any
    name: str
    workload: Workload
    scheduler: Any = field(init=False)
    answers: dict[str, dict[int, Answer]] = field(default_factory=dict)
    resets: list[bool] = field(default_factory=list)
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    tables: Any = field(default_factory=hashlib.sha256)

    def __post_init__(self) -> None:
        self.scheduler = self.engine.engine_core.engine_core.scheduler

    def outcome(self) -> Outcome:
        before = self._counters()
        while self.engine.has_unfinished_requests() or len(self.steps) <= self.workload.last_event:
            self._before_step(len(self.steps))
            for output in self.engine.step():
                self._take(output)
            self._observe()
        names = [self._request_id(index) for index in range(len(self.workload.requests))]
        return {
            "requests": [[answer for _, answer in sorted(self.answers.get(name, {}).items())] for name in names],
            "resets": self.resets,
            "counters": {name: value - before[name] for name, value in self._counters().items()},
            "steps": self.steps,
            "tables": self.tables.hexdigest(),
        }

    def _request_id(self, index: int) -> str:
        return f"{self.name}-{index}"

    def _before_step(self, step: int) -> None:
        for index, request in enumerate(self.workload.requests):
            if request.arrives == step:
                self._add(index, request)
            if request.aborted == step:
                self.engine.abort_request([self._request_id(index)])
        if step in self.workload.resets:
            self.resets.append(self.engine.reset_prefix_cache(reset_running_requests=self.workload.resets[step]))

    def _add(self, index: int, request: Request) -> None:
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
        )
        # Priorities go by the time next; the clock's would not be the same twice.
        self.engine.add_request(
            self._request_id(index), prompt, params, arrival_time=float(index), priority=request.priority
        )

    def _take(self, output: Any) -> None:
        answers = self.answers.setdefault(output.request_id, {})
        for each in output.outputs:
            answers[each.index] = {
                "token_ids": list(each.token_ids),
                "logprobs": [
                    position[token].logprob for position, token in zip(each.logprobs, each.token_ids, strict=True)
                ],
                "num_cached_tokens": output.num_cached_tokens,
                "finish_reason": each.finish_reason,
            }

    def _observe(self) -> None:
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        self.steps.append((len(scheduler.running), len(scheduler.waiting), round(manager.usage, 9)))
        for request in scheduler.running:
            self.tables.update(json.dumps(manager.get_block_ids(request.request_id)).encode())
        self.tables.update(b";")

    def _counters(self) -> dict[str, float]:
        counters = dict.fromkeys(_COUNTERS, 0.0)
        for metric in self.engine.get_metrics():
            name = metric.name.removeprefix("vllm:")
            if name in counters:
                counters[name] += metric.value
        return counters


def run(specification: Specification) -> Results:
    """Starts an engine and puts it through its workloads."""
    llm = LLM(load_format="drawn", skip_tokenizer_init=True, disable_log_stats=False, **specification["llm"])
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    config = scheduler.kv_cache_config
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return {
        "scheduler": f"{type(scheduler).__module__}.{type(scheduler).__name__}",
        "num_blocks": config.num_blocks,
        "groups": [(type(spec).__name__, spec.block_size) for spec in specs],
        "outcomes": {name: _Run(engine, name, make_workload(name)).outcome() for name in specification["workloads"]},
    }


def main(specification: Path, results: Path) -> None:
    """Reads one file and writes the other."""
    results.write_text(json.dumps(run(json.loads(specification.read_text()))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
