"""vLLM as its users run it, with models of their size: alone, on kvpool, and on memory that kvpool lends.

Models are a config.json each; their weights are drawn on the device. vLLM's dummy weights are so small that no token
would depend on what is cached. On a CPU the models and sizes are smaller; all else is the same.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn

from engine.environment import ENGINE_ENVIRONMENT, VLLM_ENVIRONMENT
from engine.models import GEMMA, LLAMA, write_model
from engine.service import service
from engine.vllm_serve import VllmServe
from engine.workloads import Request, families
from support.lending import LenderProcess
from support.logging_process import LoggingProcess

WEIGHTS: Final = "drawn"
_SHARE: Final = 0.19
"""Of the device, for an engine with its weights and memory. Several start at once."""
ANSWER_TOKENS: Final = 16
_STOP_SECONDS: Final = 20.0
_STEPS: Final = ANSWER_TOKENS + 8
"""More than a request of `one_by_one` takes."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How engines keep their KV cache.

    Attributes:
        is_pooled: Whether kvpool manages it.
        is_lent: Whether it is in the memory of a `kvpool worker`.
    """

    name: str
    is_pooled: bool = True
    is_lent: bool = False


ALONE: Final = Setup("alone", is_pooled=False)
OWN: Final = Setup("own")
LENT: Final = Setup("lent", is_lent=True)


@dataclass(frozen=True, slots=True)
class Kind:
    """Models, sizes and options of a kind of device.

    Attributes:
        models: config.json by name.
        memory_bytes: KV memory of an engine, or of all on lent memory.
        host_bytes: Host memory beside lent memory.
        block_tokens: Tokens of a block.
        prompt_tokens: Tokens of a usual prompt; the most that an engine computes in a step.
        start_seconds: Time that an engine may take to start.
        options: Arguments of vLLM beside those of all engines, by name, in the order in which they are tried.
        environment: Variables of the engines.
        expected: What engines must use. On CPUs `vllm serve` turns async scheduling off.
    """

    models: Mapping[str, Mapping[str, object]]
    memory_bytes: int
    block_tokens: int
    prompt_tokens: int
    start_seconds: float
    options: Mapping[str, Mapping[str, object]]
    environment: Mapping[str, str]
    expected: Mapping[str, object] = field(default_factory=dict)
    host_bytes: int = 0


_LLAMA_8B: Final[Mapping[str, object]] = {
    **LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}
_GEMMA_4B: Final[Mapping[str, object]] = {
    **GEMMA,
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 34,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "vocab_size": 262_208,
    "max_position_embeddings": 8192,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
KINDS: Final = {
    "cuda": Kind(
        models={"llama": _LLAMA_8B, "gemma": _GEMMA_4B},
        memory_bytes=6 * 2**30,
        block_tokens=16,
        prompt_tokens=2048,
        start_seconds=240,  # five compile at once
        options={
            "as vLLM compiles by default": {},
            "not compiled, graphs of decodes": {
                "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            },
        },
        environment={
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        },
        expected={"attention": ["FLASH_ATTN"], "flash_attention": [3], "has_graphs": True, "is_async": True},
    ),
    "cpu": Kind(
        models={"llama": LLAMA, "gemma": GEMMA},
        memory_bytes=2**30,
        block_tokens=32,
        prompt_tokens=192,
        start_seconds=600,
        options={"eager": {"enforce_eager": True}},
        environment=VLLM_ENVIRONMENT,
        expected={"attention": ["CPU_ATTN"], "flash_attention": [0], "has_graphs": False, "is_async": False},
    ),
}


class Place:
    """A model on a device, a service, and engines on it.

    Attributes:
        kind: Sizes of the device.
        options: Arguments of vLLM that all its engines have.
        server: Address of the service.
        processes: The engines by name, those that have ended too.
    """

    def __init__(self, stack: ExitStack, model: str, device: str, options: Mapping[str, object] | None = None) -> None:
        """Starts the service. What is started here ends with the stack.

        Args:
            stack: The stack.
            model: Name of a model.
            device: Device of the engines.
            options: Arguments of vLLM; the first of `Kind.options` if None.
        """
        self.kind = kind_of(device)
        self._stack = stack
        self._device = device
        self._folder = Path(stack.enter_context(TemporaryDirectory(dir="/dev/shm")))
        write_model(self.kind.models[model], self._folder / "model")
        self.server = stack.enter_context(service(self._folder)).address
        self.processes: dict[str, LoggingProcess] = {}
        self._lenders: dict[str, LenderProcess] = {}
        self._served: list[VllmServe] = []
        self.options: Mapping[str, object] = {
            "dtype": "bfloat16",
            "load_format": WEIGHTS,
            "worker_extension_cls": "gpu.native_worker.NativeWorker",
            "block_size": self.kind.block_tokens,
            "max_model_len": 2 * self.kind.prompt_tokens,
            "max_num_batched_tokens": self.kind.prompt_tokens,
            "max_num_seqs": 64,
            "gpu_memory_utilization": _SHARE,
            **(next(iter(self.kind.options.values())) if options is None else options),
        }

    def llm(self, setup: Setup, pool: str) -> dict[str, Any]:
        """Arguments of `vllm.LLM`, or options of `vllm serve`: the same names.

        Args:
            setup: Where its cache is.
            pool: Its pool; starts a lender of it if there is none, where memory is lent.
        """
        if not setup.is_pooled:
            return {**self.options, "kv_cache_memory_bytes": self.kind.memory_bytes}
        kvpool = {"address": self.server, "pool": pool, "lease_seconds": 3600}
        if not setup.is_lent:
            attached: dict[str, Any] = {"kv_cache_memory_bytes": self.kind.memory_bytes}
        else:
            attached = {}
            kvpool |= {"memory": self._lender(pool).address, "weights_version": WEIGHTS}
        return {**self.options, **attached, "additional_config": {"kvpool": kvpool}}

    def serve(self, setup: Setup, pool: str) -> VllmServe:
        """Starts `vllm serve`; returns before it is ready."""
        name = f"v{len(self._served) + 1}"
        options = _flags(self.llm(setup, pool))
        started = VllmServe(self._folder, name, usual=options, environment=self.environment)
        self._stack.callback(started.end)
        self._served.append(started)
        self.processes[f"{name}, {setup.name}"] = started.process
        return started

    def run(self, setup: Setup, pool: str) -> "Program":
        """Starts native_program.py on an engine."""
        folder = self._folder / f"p-{setup.name}"
        folder.mkdir()
        # Of a size that is given, as all must have as many blocks.
        given = {"model": str(self._folder / "model"), "kv_cache_memory_bytes": self.kind.memory_bytes}
        program = Program(folder, {**self.llm(setup, pool), **given}, self._device, self.environment)
        self._stack.enter_context(program.process)
        self.processes[f"in process, {setup.name}"] = program.process
        return program

    def terminate(self) -> NoReturn:
        """Ends this process as SIGTERM does, and before it the engines: threads may wait for their answers."""
        for each in self._served:
            with suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)
        sys.exit("terminated")

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the engines, which share what they compile."""
        return {"VLLM_CACHE_ROOT": str(self._folder / "cache"), **self.kind.environment}

    def _lender(self, pool: str) -> LenderProcess:
        if pool not in self._lenders:
            folder = self._folder / pool
            folder.mkdir()
            sizes = "--memory", f"{self.kind.memory_bytes}B", "--host-memory", f"{self.kind.host_bytes}B"
            flags = "--device", self._device, *sizes
            self._lenders[pool] = lender = LenderProcess(self.server, folder, 0, 1, *flags, pool=pool)
            self._stack.callback(lender.stop)  # if it were killed, its memory would be held for the next one
        return self._lenders[pool]


@contextmanager
def closed_by_sigterm() -> Iterator[ExitStack]:
    """A stack that SIGTERM closes before it ends this process, as engines have sessions of their own.

    They end first, as threads wait for their answers.
    """

    def terminate(*_: object) -> NoReturn:
        stack.close()
        sys.exit("terminated")

    with ExitStack() as stack:
        signal.signal(signal.SIGTERM, terminate)
        yield stack


class Program:
    """A process of native_program.py.

    Attributes:
        process: The process.
    """

    def __init__(self, folder: Path, llm: Mapping[str, Any], device: str, environment: Mapping[str, str]) -> None:
        """Starts it, with its files in a folder."""
        self._results = folder / "results.json"
        specification = folder / "specification.json"
        specification.write_text(json.dumps({"llm": llm, "device": device}))
        self.process = LoggingProcess(
            *(sys.executable, "-P", "-m", "gpu.native_program", str(specification), str(self._results)),
            environment={**ENGINE_ENVIRONMENT, **environment},
        )

    def results(self, seconds: float) -> dict[str, Any]:
        """Waits for its results, at most so long."""
        assert self.process.process.wait(seconds) == 0, self.process.log
        results: dict[str, Any] = json.loads(self._results.read_text())
        return results


def kind_of(device: str) -> Kind:
    """What engines on a device are."""
    return KINDS[device.partition(":")[0]]


def one_by_one(kind: Kind) -> list[Request]:
    """Requests that begin alike; each comes when the one before has ended."""
    draw = random.Random("one by one")  # noqa: S311 - draws prompts
    prompts = families(draw, (kind.prompt_tokens // 2, kind.prompt_tokens), 10, kind.prompt_tokens // 4)
    return [Request(each, ANSWER_TOKENS, arrives=_STEPS * number) for number, each in enumerate(prompts)]


def at_once(kind: Kind) -> list[Request]:
    """Requests that share steps, in which prompts are cut into chunks."""
    draw = random.Random("at once")  # noqa: S311 - as above
    prefixes = [kind.prompt_tokens // part for part in (4, 2, 1)]
    prompts = families(draw, prefixes, 24, kind.prompt_tokens // 4)
    return [Request(each, draw.randint(1, 40), arrives=number // 4) for number, each in enumerate(prompts)]


def stop(started: VllmServe) -> None:
    """Has it end by itself, and kills what is left of it."""
    started.signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        started.process.process.wait(_STOP_SECONDS)
    started.end()


def _flags(llm: Mapping[str, Any]) -> list[str]:
    """Arguments of `vllm.LLM` as options of `vllm serve`."""
    flags = []
    for name, value in llm.items():
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return flags
