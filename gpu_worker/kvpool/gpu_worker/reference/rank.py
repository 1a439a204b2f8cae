"""A rank's process: its part of the model, its share of the pool's memory, and the loop that runs steps.

1. Rank 0 checks a step and refuses it, or hands it to all ranks; what fails after that ends them all. Ranks that no
   longer agree must not go on.
2. All ranks end with the parent, however that ends: rank 0 watches its end of a pipe, and the others rank 0.
"""

import contextlib
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from kvpool.gpu_worker.reference.collectives import Alone, Collectives, ProcessGroup
from kvpool.gpu_worker.reference.config import ReferenceConfig
from kvpool.gpu_worker.reference.model import ReferenceModel
from kvpool.gpu_worker.reference.runner import ModelRunner, RankCache, RunnerLimits
from kvpool.gpu_worker.reference.step import StepInput
from kvpool.gpu_worker.reference.step_server import StepServer
from kvpool.gpu_worker.reference.weights import Placement
from kvpool.gpu_worker.tensors import allocate_buffers, reshape_kv_cache
from kvpool.server.core.plan import KVCacheConfig

_POISON = -1
"""Bytes of all ones are NaN in every type of floating point."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """What a rank is started with.

    Attributes:
        config: The model.
        rank: This rank, [0, tp_size * pp_size).
        tp_size: Ranks that share the heads of a layer.
        pp_size: Stages.
        folder: Where ranks meet and rank 0 listens; empty, and its owner's alone.
        authkey: What schedulers must know.
        kv_cache_config: What was planned for this rank.
        epoch: The pool's epoch.
        limits: What bounds the requests.
        layout: How attention layers see their pages.
        device: Where to compute.
        num_threads: Threads that torch may use on CPU.
    """

    config: ReferenceConfig
    rank: int
    tp_size: int
    pp_size: int
    folder: Path
    authkey: bytes
    kv_cache_config: KVCacheConfig
    epoch: int
    limits: RunnerLimits
    layout: str = "flash_attn"
    device: str = "cpu"
    num_threads: int = 1

    @property
    def socket(self) -> Path:
        """Where rank 0 listens."""
        return self.folder / "steps"


def allocate_poisoned_cache(
    config: KVCacheConfig, model: ReferenceModel, epoch: int, device: torch.device
) -> RankCache:
    """Allocates what was planned, full of NaN: whatever is read before it is written shows in the logits."""
    buffers = allocate_buffers(config, device)
    for buffer in buffers:
        buffer.fill_(_POISON)
    return RankCache(
        config, config.num_blocks, reshape_kv_cache(config, config.num_blocks, buffers, model.layouts), epoch
    )


def run_rank(options: RankOptions, parent: "Connection[Any, Any]") -> None:
    """Runs a rank until the parent sends anything or is gone. Says None to the parent when it takes steps."""
    torch.set_num_threads(options.num_threads)
    device = torch.device(options.device)
    placement = Placement.of_rank(options.rank, options.tp_size, options.pp_size)
    world_size = options.tp_size * options.pp_size
    group = ProcessGroup(placement, options.folder / "ranks", options.rank) if world_size > 1 else None
    collectives: Collectives = group or Alone()
    model = ReferenceModel(options.config, device, collectives, placement, options.layout)
    cache = allocate_poisoned_cache(options.kv_cache_config, model, options.epoch, device)
    runner = ModelRunner(model, cache, options.limits, device)
    last_stage = world_size - options.tp_size
    if options.rank:
        parent.send(None)
        _follow(runner, options.rank, last_stage)
    else:
        server = StepServer(options.socket, options.authkey)
        threading.Thread(target=_stop_with_parent, args=(parent, server), daemon=True).start()
        parent.send(None)
        _lead(runner, server, world_size, last_stage)
    if group:
        group.close()


def _stop_with_parent(parent: "Connection[Any, Any]", server: StepServer) -> None:
    with contextlib.suppress(EOFError, OSError):
        parent.recv()
    server.stop()


def _lead(runner: ModelRunner, server: StepServer, world_size: int, last_stage: int) -> None:
    """Rank 0: hands steps and endings to all ranks, and gets the tokens of the last stage."""

    def execute(step: StepInput) -> list[int]:
        runner.check(step)
        if world_size > 1:
            distributed.broadcast_object_list([step])
        tokens = runner.execute(step)
        return _from_last_stage(tokens, last_stage) if last_stage else tokens or []

    def end_session(session: str) -> None:
        if world_size > 1:
            distributed.broadcast_object_list([session])
        runner.end_session(session)

    server.serve(execute, end_session)
    if world_size > 1:
        distributed.broadcast_object_list([None])


def _follow(runner: ModelRunner, rank: int, last_stage: int) -> None:
    """Any other rank: does what rank 0 says until it says None."""
    while True:
        said: list[StepInput | str | None] = [None]
        distributed.broadcast_object_list(said)
        order = said[0]
        if order is None:
            return
        if isinstance(order, str):
            runner.end_session(order)
            continue
        tokens = runner.execute(order)
        if last_stage and rank == last_stage:
            distributed.send_object_list([tokens or []], 0)


def _from_last_stage(tokens: list[int] | None, last_stage: int) -> list[int]:
    """Waits for the tokens of the last stage's first rank."""
    received: list[list[int]] = [tokens or []]
    distributed.recv_object_list(received, last_stage)
    return received[0]
