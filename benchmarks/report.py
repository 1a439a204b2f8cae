"""What a run measured."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

from benchmarks.race import Figures
from benchmarks.scale import Scale
from benchmarks.vllm_side import VllmSide
from kvpool.replay.children import ServerChild

Numbers: TypeAlias = "float | Mapping[str, Numbers]"
"""Figures, as deep as they are nested."""

SIDES = ("core", "grpc", "tcp")
"""Ways to call kvpool: in process, through a server on a unix socket, and over TCP."""

DEFAULT_HASH_SUFFIX = "_sha256"
"""Marks figures of vLLM with the hash that it uses if nothing is set; all others are of kvpool's."""


@dataclass(slots=True)
class Report:
    """Figures, medians in microseconds unless their names say otherwise.

    Attributes:
        version: kvpool's.
        machine: Where it ran.
        settings: How much was done.
        core: The core in process.
        grpc: Through a server on a unix socket.
        tcp: The same over 127.0.0.1.
        vllm: vLLM's manager in process; None if it was not measured.
        vllm_version: vLLM's version.
        ratios: By what is compared, figure by figure.
        stages: Of a decode step through a server.
        sessions: By number of sessions at once.
        pools: By number of pools at once.
        pool_sizes: By number of blocks.
        growth: By what grows, its size, and who does the work: a decode step.
        compare: By path of the figure: this run over an earlier one; None without one.
    """

    version: str
    machine: dict[str, str | int]
    settings: Scale
    core: Figures = field(default_factory=dict)
    grpc: Figures = field(default_factory=dict)
    tcp: Figures = field(default_factory=dict)
    vllm: Figures | None = None
    vllm_version: str = ""
    ratios: dict[str, Figures] = field(default_factory=dict)
    stages: Figures = field(default_factory=dict)
    sessions: dict[str, Figures] = field(default_factory=dict)
    pools: dict[str, Figures] = field(default_factory=dict)
    pool_sizes: dict[str, Figures] = field(default_factory=dict)
    growth: dict[str, dict[str, Figures]] = field(default_factory=dict)
    compare: Figures | None = None

    def side(self, name: str) -> Figures:
        """The figures of a way to call kvpool, or of vLLM."""
        figures: Figures | None = getattr(self, name)
        return {} if figures is None else figures

    def numbers(self) -> dict[str, Numbers]:
        """All that a later run can be compared with."""
        told: dict[str, Numbers] = {name: self.side(name) for name in SIDES}
        if self.vllm is not None:
            told["vllm"] = self.vllm
        told |= {"stages": self.stages, "sessions": self.sessions, "pools": self.pools}
        return told | {"pool_sizes": self.pool_sizes, "growth": self.growth}

    def as_json(self) -> dict[str, object]:
        """One object, figures rounded."""
        told: dict[str, object] = {
            "version": self.version,
            "machine": self.machine,
            "settings": asdict(self.settings),
            "vllm": None,
        }
        told |= {name: _rounded(numbers) for name, numbers in self.numbers().items()}
        if self.vllm is not None:
            told["vllm"] = {"version": self.vllm_version, **{name: round(v, 3) for name, v in self.vllm.items()}}
        told["ratios"] = _rounded(self.ratios)
        if self.compare is not None:
            told["compare"] = _rounded(self.compare)
        return told

    def work_out_ratios(self) -> None:
        """Compares what was measured in this run."""
        if self.vllm is not None:
            for name in SIDES:
                self._put_ratios(f"{name}_to_vllm", _over(self.side(name), self.vllm))
        steps = {name: self.side(name) for name in ("grpc", "tcp") if "echo_stream" in self.side(name)}
        self._put_ratios("empty_step_to_echo", {n: f["empty_step"] / f["echo_stream"] for n, f in steps.items()})
        if self.pool_sizes:
            sizes = sorted(self.pool_sizes, key=int)
            self._put_ratios(
                "pool_size_largest_to_smallest", _over(self.pool_sizes[sizes[-1]], self.pool_sizes[sizes[0]])
            )

    def _put_ratios(self, name: str, ratios: Figures) -> None:
        if ratios:
            self.ratios[name] = ratios


@dataclass(frozen=True, slots=True)
class Run:
    """What the sections of a run have in common.

    Attributes:
        report: Where they put their figures.
        server: A server that listens on a unix socket and over TCP on this machine.
        vllm: vLLM's manager beside ours, if there is one.
        advance: Called with 1 after each round.
    """

    report: Report
    server: ServerChild
    vllm: VllmSide | None
    advance: Callable[[int], object]

    @property
    def scale(self) -> Scale:
        """How much is to be done."""
        return self.report.settings


def _over(ours: Figures, theirs: Figures) -> Figures:
    """Ratios of what both have; with vLLM's default hash, too."""
    ratios = {name: figure / theirs[name] for name, figure in ours.items() if theirs.get(name)}
    for name, figure in ours.items():
        with_default = name + DEFAULT_HASH_SUFFIX
        if theirs.get(with_default):
            ratios[with_default] = figure / theirs[with_default]
    return ratios


def _rounded(numbers: Numbers) -> object:
    if isinstance(numbers, Mapping):
        return {name: _rounded(value) for name, value in numbers.items()}
    return round(numbers, 3)
