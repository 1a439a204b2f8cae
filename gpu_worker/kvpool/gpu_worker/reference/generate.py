"""A whole deployment of the reference model on a service: ranks, schedulers, and the check of what they generated."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from kvpool.client import Client, PoolConfig, connect
from kvpool.gpu_worker.reference.config import ReferenceConfig
from kvpool.gpu_worker.reference.dense import DenseModel
from kvpool.gpu_worker.reference.rank import RankOptions, run_rank
from kvpool.gpu_worker.reference.runner import RunnerLimits
from kvpool.gpu_worker.reference.step_link import StepLink
from kvpool.gpu_worker.reference.weights import Placement
from kvpool.replay.result import Counts
from kvpool.replay.scheduler import Scheduler
from kvpool.replay.workload import Work
from kvpool.server.core.plan import GIB, Plan, PlanOptions, RankMemory
from kvpool.server.core.planner import get_kv_cache_configs
from kvpool.server.core.types import PoolName

_CONTEXT: Final = multiprocessing.get_context("spawn")
_STOP_SECONDS: Final = 15.0
_START_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """The ranks, and how schedulers play on them.

    Attributes:
        config: The model.
        tp_size: Ranks that share the heads of a layer.
        pp_size: Stages.
        num_blocks: Blocks of the pool, the null block included.
        max_model_len: Most tokens of a request.
        max_num_seqs: Most requests that a scheduler runs at once.
        max_num_batched_tokens: Most tokens of a step.
        layout: How attention layers see their pages.
        device: Where ranks compute.
    """

    config: ReferenceConfig
    tp_size: int = 1
    pp_size: int = 1
    num_blocks: int = 64
    max_model_len: int = 64
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 24
    layout: str = "flash_attn"
    device: str = "cpu"

    def plan(self) -> Plan:
        """Plans the memory of all ranks."""
        specs = self.config.kv_cache_specs(self.tp_size)
        ranks = []
        for rank in range(self.tp_size * self.pp_size):
            layers = Placement.of_rank(rank, self.tp_size, self.pp_size).layers(self.config.num_layers)
            names = [self.config.layer_name(index) for index in layers]
            ranks.append(RankMemory({name: specs[name] for name in names}, GIB))
        options = PlanOptions(
            self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_blocks_override=self.num_blocks,
        )
        return get_kv_cache_configs(ranks, options)

    def pool_config(self, name: str) -> PoolConfig:
        """The pool of these ranks."""
        plan = self.plan()
        return PoolConfig(PoolName(name), plan.num_blocks, plan.max_model_len, plan.groups)


@dataclass(slots=True)
class Prompts:
    """A scheduler's workload: prompts that are all there from the start.

    Attributes:
        prompts: Tokens of each.
        output_length: Tokens to generate for each.
        outputs: What was generated so far: prompt and output, in the order in which requests finished.
    """

    prompts: Sequence[list[int]]
    output_length: int
    outputs: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def start(self) -> list[Work]:
        """See `kvpool.replay.workload.Workload`."""
        return [Work(f"r{i}", prompt, self.output_length) for i, prompt in enumerate(self.prompts)]

    def follow_up(self, done: Work, output: list[int]) -> Work | None:
        """See `kvpool.replay.workload.Workload`: nothing follows."""
        self.outputs.append((done.token_ids, list(output)))
        return None


@dataclass(frozen=True, slots=True)
class Generation:
    """What was generated.

    Attributes:
        counts: All schedulers' counts: requests, tokens, hits, preemptions.
        equal_requests: Requests all of whose tokens are those of the model without a cache.
        outputs: Prompt and output of each request, scheduler by scheduler.
    """

    counts: Counts
    equal_requests: int
    outputs: list[tuple[list[int], list[int]]]

    @property
    def equal(self) -> bool:
        """Whether every request of every scheduler ended, and with the right tokens."""
        return 0 < self.counts.requests == self.equal_requests


def generate(address: str, pool: str, deployment: Deployment, workloads: Sequence[Prompts]) -> Generation:
    """Declares the pool, starts the ranks, plays each workload in a session of its own, and checks all tokens.

    The schedulers run at the same time; each starts when the one before has finished two requests, so that it may hit
    what they left.

    Args:
        address: The service.
        pool: Name of a pool that is not there yet.
        deployment: The ranks.
        workloads: One for each scheduler.

    Raises:
        RanksError: The ranks did not start, or ended.
        KvpoolError: The service refused something.
    """
    plan = deployment.plan()
    with connect(address) as client:
        client.create_pool(deployment.pool_config(pool))
        epoch = client.get_pool(pool).epoch
        limits = RunnerLimits(
            deployment.max_num_seqs * len(workloads), plan.max_model_len, deployment.max_num_batched_tokens
        )
        with running_ranks(deployment, plan, epoch, limits) as (socket, authkey):

            def play(workload: Prompts, advance: Callable[[], object]) -> Counts:
                return _play(client, pool, deployment, workload, StepLink(socket, authkey, epoch), advance)

            counts = _play_staggered(workloads, play)
    outputs = [output for workload in workloads for output in workload.outputs]
    dense = DenseModel(deployment.config, torch.device(deployment.device))
    right = [dense.greedy_tokens(prompt + output, len(prompt))[:-1] == output for prompt, output in outputs]
    return Generation(counts, right.count(True), outputs)


class RanksError(RuntimeError):
    """The ranks did not start, or ended."""


@contextmanager
def running_ranks(deployment: Deployment, plan: Plan, epoch: int, limits: RunnerLimits) -> Iterator[tuple[Path, bytes]]:
    """Runs the ranks in processes of their own; yields where rank 0 listens, and its authkey.

    Raises:
        RanksError: One did not start.
    """
    authkey = os.urandom(32)
    with TemporaryDirectory(prefix="kvpool-ranks-") as folder:
        first = RankOptions(
            deployment.config,
            0,
            deployment.tp_size,
            deployment.pp_size,
            Path(folder),
            authkey,
            plan.configs[0],
            epoch,
            limits,
            deployment.layout,
            deployment.device,
        )
        ranks = [_start(replace(first, rank=i, kv_cache_config=config)) for i, config in enumerate(plan.configs)]
        try:
            for index, (_, pipe) in enumerate(ranks):
                _await_ready(index, pipe)
            yield first.socket, authkey
        finally:
            for _, pipe in ranks:
                pipe.close()
            for process, _ in ranks:
                process.join(_STOP_SECONDS)
                if process.is_alive():
                    process.kill()
                    process.join()


def _start(options: RankOptions) -> tuple[Any, Any]:
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=run_rank, args=(options, there), name=f"kvpool-rank-{options.rank}", daemon=True)
    process.start()
    there.close()
    return process, here


def _await_ready(rank: int, pipe: Any) -> None:  # noqa: ANN401 - a pipe's type is not public
    if not wait([pipe], _START_SECONDS):
        raise RanksError(f"rank {rank} did not start within {_START_SECONDS:g} seconds")
    try:
        pipe.recv()
    except EOFError:
        raise RanksError(f"rank {rank} ended before it took steps") from None


def _play(  # noqa: PLR0913, PLR0917 - what one scheduler is made of
    client: Client,
    pool: str,
    deployment: Deployment,
    workload: Prompts,
    link: StepLink,
    advance: Callable[[], object],
) -> Counts:
    try:
        with client.open_session(pool, client_name="kvpool-reference") as session:
            return Scheduler(
                session,
                workload,
                max_num_seqs=deployment.max_num_seqs,
                max_num_batched_tokens=deployment.max_num_batched_tokens,
                advance=advance,
                executor=link,
            ).run()
    finally:
        link.close()


def _play_staggered(workloads: Sequence[Prompts], play: Callable[[Prompts, Callable[[], object]], Counts]) -> Counts:
    """Plays each workload in a thread of its own; raises what the first of them raised."""
    total = Counts()
    errors: list[BaseException] = []
    threads = []
    for workload in workloads:
        started = threading.Event()

        def run(workload: Prompts = workload, started: threading.Event = started) -> None:
            def advance() -> None:
                if len(workload.outputs) >= 1:  # its second: what the first filled is told by now
                    started.set()

            try:
                total.add(play(workload, advance))
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                errors.append(error)
            finally:
                started.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        threads.append(thread)
        started.wait()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return total
