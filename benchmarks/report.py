"""The results of a run."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from benchmarks.race import Figures
from benchmarks.scale import Scale
from benchmarks.vllm_side import VllmSide
from kvpool.replay.children import ServerChild

Numbers: TypeAlias = "float | Mapping[str, Numbers]"
"""Figures, or nested mappings of figures."""

SIDES = ("core", "grpc", "tcp")
"""Ways to call kvpool: in process, through a unix socket, and over TCP."""

DEFAULT_HASH_SUFFIX = "_sha256"
"""Suffix of figures with vLLM's default hash. All other figures use kvpool's hash."""


@dataclass(slots=True)
class Report:
    """Figures, medians in microseconds unless their names say otherwise.

    Attributes:
        version: Version of kvpool.
        machine: Description of the machine.
        settings: The scale of the run.
        core: Figures of the core in process.
        grpc: Figures through a server on a unix socket.
        tcp: Figures through a server on 127.0.0.1.
        vllm: Figures of vLLM's manager in process; None if it was not measured.
        vllm_version: Version of vLLM.
        ratios: Ratios of figures, by comparison.
        stages: Stages of a decode step through a server.
        server_time: Processor time of a server per message, by kind of message.
        sessions: Figures by number of concurrent sessions.
        pools: Figures by number of concurrent pools.
        pool_sizes: Figures by number of blocks.
        growth: Cost of a decode step by growing parameter, its value, and target.
        compare: Ratio of this run to an earlier one, by path of the figure; None without an earlier run.
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
    server_time: Figures = field(default_factory=dict)
    sessions: dict[str, Figures] = field(default_factory=dict)
    pools: dict[str, Figures] = field(default_factory=dict)
    pool_sizes: dict[str, Figures] = field(default_factory=dict)
    growth: dict[str, dict[str, Figures]] = field(default_factory=dict)
    compare: Figures | None = None

    def side(self, name: str) -> Figures:
        """Returns the figures of one of `SIDES`, or of vLLM."""
        figures: Figures | None = getattr(self, name)
        return {} if figures is None else figures

    def numbers(self) -> dict[str, Numbers]:
        """Returns all figures that a later run can be compared with."""
        numbers: dict[str, Numbers] = {name: self.side(name) for name in SIDES}
        if self.vllm is not None:
            numbers["vllm"] = self.vllm
        numbers |= {
            "stages": self.stages,
            "server_time": self.server_time,
            "sessions": self.sessions,
            "pools": self.pools,
        }
        return numbers | {"pool_sizes": self.pool_sizes, "growth": self.growth}

    def as_json(self) -> dict[str, object]:
        """Returns the report as JSON with rounded figures."""
        answer: dict[str, object] = {
            "version": self.version,
            "machine": self.machine,
            "settings": asdict(self.settings),
            "vllm": None,
        }
        answer |= {name: _rounded(numbers) for name, numbers in self.numbers().items()}
        if self.vllm is not None:
            answer["vllm"] = {"version": self.vllm_version, **{name: round(v, 3) for name, v in self.vllm.items()}}
        answer["ratios"] = _rounded(self.ratios)
        if self.compare is not None:
            answer["compare"] = _rounded(self.compare)
        return answer

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> "Report":
        """Returns the report of which `as_json` returned this."""
        vllm = dict(answer["vllm"] or {})
        version = vllm.pop("version", "")
        read = {"settings": Scale(**answer["settings"]), "vllm": vllm or None, "vllm_version": version}
        return cls(**{**answer, **read})

    def work_out_ratios(self) -> None:
        """Computes the ratios between figures of this run."""
        if self.vllm is not None:
            for name in SIDES:
                self._put_ratios(f"{name}_to_vllm", _over(self.side(name), self.vllm))
        steps = {name: self.side(name) for name in ("grpc", "tcp") if "echo_stream" in self.side(name)}
        self._put_ratios("empty_step_to_echo", {n: f["empty_step"] / f["echo_stream"] for n, f in steps.items()})
        if self.server_time:
            echo = self.server_time["echo"]
            self._put_ratios("server_time_to_echo", {n: us / echo for n, us in self.server_time.items()})
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
    """Shared state of the sections of a run.

    Attributes:
        report: Receives the figures.
        server: A server that listens on a unix socket and on TCP.
        vllm: vLLM's manager; None if it is not measured.
        advance: Called with 1 after each round.
    """

    report: Report
    server: ServerChild
    vllm: VllmSide | None
    advance: Callable[[int], object]

    @property
    def scale(self) -> Scale:
        """The scale of the run."""
        return self.report.settings


def _over(ours: Figures, theirs: Figures) -> Figures:
    """Returns the ratios of common figures, including those with vLLM's default hash."""
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
