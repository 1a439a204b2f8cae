"""Two engines that differ in nothing but their scheduler: vLLM's own, and kvpool's on a real service."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.forks import Program, run_program
from engine.models import write_model
from engine.results import Outcome, Results, Specification
from engine.workloads import BLOCK_TOKENS, LONGEST_TOKENS

SCHEDULER = "kvpool.client.vllm.Scheduler"
POOLED_SCHEDULER = "kvpool.client.vllm.scheduler.Scheduler"
PROGRAM = "engine.run_engine"
PLAIN_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to start twice.

    Attributes:
        model: config.json.
        num_blocks: Of the pool.
        workloads: Their names, in the order in which they run.
        options: More arguments of `vllm.LLM`.
        is_complete: Whether only `--depth all` starts it.
    """

    model: Mapping[str, object]
    num_blocks: int
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
            self._done[name] = run_pair(self._engines[name], self._attached(name, 0), self._folder / name)
        pair = self._done[name]
        assert pair, "failed in an earlier test"
        return pair

    def with_reserves(self, name: str) -> Results:
        """Runs the second engine with slots in reserve, as engines do by default."""
        return run_engine(self._engines[name], self._attached(f"{name}-reserve", -1), self._folder / name / "reserve")

    def _attached(self, pool: str, reserve_tokens: int) -> dict[str, object]:
        kvpool = {"address": self._address, "pool": pool, "reserve_tokens": reserve_tokens}
        return {"scheduler_cls": SCHEDULER, "additional_config": {"kvpool": kvpool}}


def run_pair(engine: Engine, attached: Mapping[str, object], folder: Path) -> Pair:
    """Runs both at once, each on one thread; `attached` is what the second is given in addition."""
    folder.mkdir()
    write_model(engine.model, folder / "model")
    specification = engine.specification(folder / "model")
    with (
        Program(PROGRAM, specification, folder / "plain") as plain,
        Program(PROGRAM, _attached(specification, attached), folder / "pooled") as pooled,
    ):
        return Pair(plain.results(), pooled.results())


def run_engine(engine: Engine, attached: Mapping[str, object], folder: Path) -> Results:
    """Runs one engine; `attached` is what it is given in addition."""
    model = folder.with_name("model")  # of the same name for engines that are to share memory
    if not model.exists():
        write_model(engine.model, model)
    results: Results = run_program(PROGRAM, _attached(engine.specification(model), attached), folder)
    return results


def _attached(specification: Specification, attached: Mapping[str, object]) -> Specification:
    return {**specification, "llm": {**specification["llm"], **attached}}
