"""Two engines that differ in nothing but their scheduler: vLLM's own, and kvpool's on a real service."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.forks import DEADLINE_SECONDS, start
from engine.models import write_model
from engine.results import Outcome, Results, Specification
from engine.workloads import BLOCK_TOKENS, LONGEST_TOKENS

SCHEDULER = "kvpool.client.vllm.Scheduler"
POOLED_SCHEDULER = "kvpool.client.vllm.scheduler.Scheduler"
PLAIN_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to start twice.

    Attributes:
        model: config.json.
        num_blocks: Of the pool.
        groups: The kinds of KV cache that it has.
        workloads: Their names, in the order in which they run.
        options: More arguments of `vllm.LLM`.
        is_complete: Whether only `--depth all` starts it.
    """

    model: Mapping[str, object]
    num_blocks: int
    groups: frozenset[str]
    workloads: tuple[str, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def caches(self) -> bool:
        """Whether prefixes are cached."""
        return bool(self.options.get("enable_prefix_caching", True))

    def specification(self, folder: Path) -> Specification:
        llm = {
            "model": str(folder),
            "dtype": "float32",
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": LONGEST_TOKENS,
            "num_gpu_blocks_override": self.num_blocks,
            **self.options,
        }
        return {"llm": llm, "workloads": list(self.workloads)}


@dataclass(frozen=True, slots=True)
class Pair:
    """What the two answered."""

    plain: Results
    pooled: Results

    def outcomes(self, workload: str) -> tuple[Outcome, Outcome]:
        return self.plain["outcomes"][workload], self.pooled["outcomes"][workload]


class Pairs:
    """Engines by name; both of a name are run when it is first asked for, and never again, also if one fails."""

    def __init__(self, engines: Mapping[str, Engine], address: str, folder: Path) -> None:
        self._engines = engines
        self._address = address
        self._folder = folder
        self._done: dict[str, Pair | None] = {}

    def run(self, name: str) -> Pair:
        if name not in self._done:
            self._done[name] = None
            kvpool = {"address": self._address, "pool": name}
            attached = {"scheduler_cls": SCHEDULER, "additional_config": {"kvpool": kvpool}}
            self._done[name] = run_pair(self._engines[name], attached, self._folder / name)
        pair = self._done[name]
        assert pair, "failed in an earlier test"
        return pair


def run_pair(engine: Engine, attached: Mapping[str, object], folder: Path) -> Pair:
    """Runs both at once, each on one thread; `attached` is what the second is given in addition."""
    folder.mkdir()
    write_model(engine.model, folder / "model")
    specification = engine.specification(folder / "model")
    plain = _Process(specification, folder / "plain")
    pooled = _Process({**specification, "llm": {**specification["llm"], **attached}}, folder / "pooled")
    try:
        return Pair(plain.results(), pooled.results())
    finally:
        plain.end()
        pooled.end()


def run_engine(engine: Engine, attached: Mapping[str, object], folder: Path) -> Results:
    """Runs one engine; `attached` is what it is given in addition."""
    folder.mkdir()
    model = folder.with_name("model")  # of the same name for engines that are to share memory
    if not model.exists():
        write_model(engine.model, model)
    specification = engine.specification(model)
    process = _Process({**specification, "llm": {**specification["llm"], **attached}}, folder / "engine")
    try:
        return process.results()
    finally:
        process.end()


class _Process:
    """An engine at work; what it says goes to a file."""

    def __init__(self, specification: Specification, folder: Path) -> None:
        folder.mkdir()
        self._results = folder / "results.json"
        self._log = folder / "log"
        (folder / "specification.json").write_text(json.dumps(specification))
        self._process = start(
            "engine.run_engine", str(folder / "specification.json"), str(self._results), log=self._log
        )

    def results(self) -> Results:
        assert self._process.wait(DEADLINE_SECONDS) == 0, self._log.read_text()
        results: Results = json.loads(self._results.read_text())
        return results

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
