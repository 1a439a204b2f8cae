"""Runs the ranks of a reference model as processes that form a pool on a service."""

import hashlib
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from examples.reference_engine.config import ReferenceConfig
from examples.reference_engine.rank import START_SECONDS, RankOptions, run_rank
from examples.reference_engine.weights import Placement
from kvpool.core.planning.plan import GIB, PlanOptions, RankMemory
from kvpool.core.planning.planner import get_kv_cache_configs
from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.core.specs.pool_config import HashScheme
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.replay import ChildError

_CONTEXT: Final = multiprocessing.get_context("spawn")
_STOP_SECONDS: Final = 15.0
_EXTRA_BLOCKS: Final = 3
NUM_LENT_BLOCKS: Final = 1000
"""Number of blocks of engines that share memory, the null block included."""
HASH_SCHEME: Final = HashScheme(none_hash=hashlib.sha256(b"reference engine").digest())
"""The same in all engines that share memory, so that they find each other's prefixes."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The ranks of a model, and the limits of their schedulers.

    Attributes:
        config: The model.
        tp_size: Number of ranks that share the heads of a layer.
        pp_size: Number of pipeline stages.
        num_blocks: Number of blocks on rank 0, including the null block; each further rank has memory for a few more.
        max_model_len: Maximum number of tokens of a request.
        num_schedulers: Number of schedulers that share the ranks.
        max_num_seqs: Maximum number of running requests per scheduler.
        max_num_batched_tokens: Maximum number of tokens per step.
        layout: Name of the layout of attention layers.
        device: Device of the ranks.
        memory: Address of a lender, whose memory the rank maps; empty for memory of its own.
    """

    config: ReferenceConfig
    tp_size: int = 1
    pp_size: int = 1
    num_blocks: int = 64
    max_model_len: int = 64
    num_schedulers: int = 2
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 24
    layout: str = "flash_attn"
    device: str = "cpu"
    memory: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.pp_size

    def memory_bytes(self) -> list[int]:
        """Memory for tensors of each rank."""
        specs = self.config.kv_cache_specs(self.tp_size)
        ranks = []
        for rank in range(self.world_size):
            layers = Placement.of_rank(rank, self.tp_size, self.pp_size).layers(self.config.num_layers)
            names = [self.config.layer_name(index) for index in layers]
            ranks.append(RankMemory({name: specs[name] for name in names}, GIB))
        configs = get_kv_cache_configs(ranks, PlanOptions(self.max_model_len)).configs
        return [
            config.block_size_bytes * (self.num_blocks + _EXTRA_BLOCKS * rank) for rank, config in enumerate(configs)
        ]


@dataclass(frozen=True, slots=True)
class RanksLink:
    """Connection parameters for steps.

    Attributes:
        socket: Socket of rank 0.
        authkey: Shared secret of the ranks.
    """

    socket: Path
    authkey: bytes


@contextmanager
def running_ranks(address: str, pool: str, deployment: Deployment) -> Iterator[RanksLink]:
    """Runs the ranks in processes that form the pool; yields when they accept steps.

    Args:
        address: Address of the service.
        pool: Name of a new pool.
        deployment: The ranks.

    Raises:
        ChildError: A rank did not start; states the reason.
    """
    link_key = os.urandom(32)
    with TemporaryDirectory(prefix="kvpool-ranks-") as folder:
        options = RankGroupOptions(
            deployment.max_model_len,
            max_num_batched_tokens=deployment.max_num_batched_tokens,
            hash_scheme=HASH_SCHEME if deployment.memory else HashScheme(),
        )
        ranks = []
        for rank, memory_bytes in enumerate(deployment.memory_bytes()):
            settings = WorkerSettings(
                address, pool, rank, deployment.world_size, options, deployment.device, memory_bytes
            )
            ranks.append(
                _start(
                    RankOptions(
                        settings,
                        deployment.config,
                        deployment.tp_size,
                        Path(folder),
                        link_key,
                        deployment.max_num_seqs * deployment.num_schedulers,
                        deployment.layout,
                        deployment.memory,
                    )
                )
            )
        try:
            for index, (_, pipe) in enumerate(ranks):
                _await_ready(index, pipe)
            yield RanksLink(Path(folder) / "steps", link_key)
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
    process = _CONTEXT.Process(
        target=run_rank, args=(options, there), name=f"kvpool-rank-{options.settings.rank}", daemon=True
    )
    process.start()
    there.close()
    return process, here


def _await_ready(rank: int, pipe: Any) -> None:  # noqa: ANN401 - a pipe's type is not public
    if not wait([pipe], START_SECONDS):
        raise ChildError(f"rank {rank} did not start within {START_SECONDS:g} seconds")
    try:
        failure = pipe.recv()
    except EOFError:
        raise ChildError(f"rank {rank} ended before it accepted steps") from None
    if failure is not None:
        raise ChildError(f"rank {rank} could not start: {failure}")
