"""Runs workloads on one vLLM engine and writes down all that it answered; an engine is global state, so a process each.

python -m engine.run_engine SPECIFICATION RESULTS     two JSON files; see results.py
"""

import hashlib
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.results import Answer, Outcome, Results, Specification
from engine.tiny_engine import add_request, has_work, start_engine
from engine.workloads import Request, Workload, make_workload

_COUNTERS = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions")


@dataclass(slots=True)
class Run:
    """A workload on its way through an engine."""

    engine: Any
    name: str
    workload: Workload
    scheduler: Any = field(init=False)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[str, dict[int, Answer]] = field(default_factory=dict)
    resets: list[bool] = field(default_factory=list)
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    tables: Any = field(default_factory=hashlib.sha256)

    def __post_init__(self) -> None:
        self.scheduler = self.engine.engine_core.engine_core.scheduler

    def outcome(self) -> Outcome:
        before = self._counters()
        while has_work(self.engine) or len(self.steps) <= self.workload.last_event:
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
                add_request(self.engine, self._request_id(index), index, self._with_history(index, request))
            if request.aborted == step:
                self.engine.abort_request([self._request_id(index)])
        if step in self.workload.resets:
            self.resets.append(self.engine.reset_prefix_cache(reset_running_requests=self.workload.resets[step]))

    def _with_history(self, index: int, request: Request) -> Request:
        """Puts the prompt and the answer that a request continues before its prompt."""
        earlier = request.continues
        history: list[int] = []
        if earlier is not None:
            history = self.prompts[earlier] + self.answers[self._request_id(earlier)][0]["token_ids"]
        self.prompts[index] = [*history, *request.prompt]
        return replace(request, prompt=self.prompts[index])

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
    engine = start_engine(specification["llm"])
    scheduler = engine.engine_core.engine_core.scheduler
    config = scheduler.kv_cache_config
    outcomes = {}
    for name in specification["workloads"]:
        if specification["llm"].get("enable_sleep_mode"):
            engine.sleep()
            engine.wake_up()
        outcomes[name] = Run(engine, name, make_workload(name)).outcome()
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return {
        "scheduler": f"{type(scheduler).__module__}.{type(scheduler).__name__}",
        "num_blocks": config.num_blocks,
        "groups": [(type(spec).__name__, spec.block_size) for spec in specs],
        "outcomes": outcomes,
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
