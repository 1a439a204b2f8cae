"""The ranks of a reference model as processes that form a pool on a service."""

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
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.replay import ChildError

_CONTEXT: Final = multiprocessing.get_context("spawn")
_STOP_SECONDS: Final = 15.0
_EXTRA_BLOCKS: Final = 3


@dataclass(frozen=True, slots=True)
class Deployment:
    """The ranks, and how schedulers play on them.

    Attributes:
        config: The model.
        tp_size: Ranks that share the heads of a layer.
        pp_size: Stages.
        num_blocks: Blocks that the poorest rank has memory for, the null block included; each next rank has some more.
        max_model_len: Most tokens of a request.
        num_schedulers: Schedulers that share the ranks.
        max_num_seqs: Most requests that each runs at once.
        max_num_batched_tokens: Most tokens of a step.
        layout: How attention layers see their pages.
        device: Where ranks compute.
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

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp_size * self.pp_size

    def memory_bytes(self) -> list[int]:
        """What each rank has for its tensors, rank by rank."""
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
    """Where the ranks take steps.

    Attributes:
        socket: Where rank 0 listens.
        authkey: What it asks for.
    """

    socket: Path
    authkey: bytes


@contextmanager
def running_ranks(address: str, pool: str, deployment: Deployment) -> Iterator[RanksLink]:
    """Runs the ranks in processes of their own, which form the pool; yields once they take steps.

    Args:
        address: The service.
        pool: Name of a pool that is not there yet.
        deployment: The ranks.

    Raises:
        ChildError: One did not start; says why.
    """
    link_key = os.urandom(32)
    with TemporaryDirectory(prefix="kvpool-ranks-") as folder:
        options = RankGroupOptions(deployment.max_model_len, max_num_batched_tokens=deployment.max_num_batched_tokens)
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
        raise ChildError(f"rank {rank} ended before it took steps") from None
    if failure is not None:
        raise ChildError(f"rank {rank} could not start: {failure}")
