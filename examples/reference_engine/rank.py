"""The process of a rank: its part of the model, its share of the pool's memory, and the loop that runs steps.

1. Rank 0 checks a step, then refuses it or sends it to all ranks. A later failure ends all ranks, because ranks with
   different state must not continue.
2. All ranks end when the parent ends for any reason: rank 0 watches a pipe to the parent, the others watch rank 0.
"""

import contextlib
import logging
import threading
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed

from examples.reference_engine.collectives import Alone, Collectives, ProcessGroup
from examples.reference_engine.config import ReferenceConfig
from examples.reference_engine.mapped_rank import MappedRank
from examples.reference_engine.model import ReferenceModel
from examples.reference_engine.runner import ModelRunner, RunnerLimits
from examples.reference_engine.step import StepInput
from examples.reference_engine.step_server import StepServer
from examples.reference_engine.weights import Placement
from kvpool.core.errors import KvpoolError
from kvpool.gpu_worker.device import open_device
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.worker import Worker

START_SECONDS: Final = 120.0
"""Time to wait for the other ranks."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Start options of a rank.

    Attributes:
        settings: Settings of the worker.
        config: The model.
        tp_size: Number of ranks that share the heads of a layer; the remaining factor of the world size is stages.
        folder: Folder for rendezvous and the socket of rank 0; empty, and private to its owner.
        authkey: Shared secret of the schedulers.
        max_num_reqs: Maximum number of running requests over all schedulers.
        layout: Name of the layout of attention layers.
        memory: Address of a lender, whose memory the rank maps; empty for memory of its own.
        num_threads: Number of threads of torch on CPU.
    """

    settings: WorkerSettings
    config: ReferenceConfig
    tp_size: int
    folder: Path
    authkey: bytes
    max_num_reqs: int
    layout: str = "flash_attn"
    memory: str = ""
    num_threads: int = 1


def run_rank(options: RankOptions, parent: "Connection[Any, Any]") -> None:
    """Runs a rank until the parent sends a message or ends.

    Sends None to the parent when the rank accepts steps, or an error message.
    """
    logging.basicConfig(level=logging.ERROR)  # another rank may end slightly earlier, which is not worth a warning
    torch.set_num_threads(options.num_threads)
    settings = options.settings
    world_size = settings.world_size
    placement = Placement.of_rank(settings.rank, options.tp_size, world_size // options.tp_size)
    group = ProcessGroup(placement, options.folder / "ranks", settings.rank) if world_size > 1 else None
    collectives: Collectives = group or Alone()
    device = open_device(settings.device)
    model = ReferenceModel(options.config, device, collectives, placement, options.layout)
    try:
        with _memory(model, options) as memory:
            runner = _make_runner(model, memory, options)
            _run_steps(runner, memory, options, parent)
    except KvpoolError as error:
        with contextlib.suppress(OSError):  # the parent may have ended after the error of another rank
            parent.send(f"{error.reason}: {error}")
    finally:
        if group:
            group.close()


def _memory(model: ReferenceModel, options: RankOptions) -> Worker | MappedRank:
    if not options.memory:
        return Worker(options.settings, model.kv_cache_specs, layouts=model.layouts)
    fingerprint = {name: str(value) for name, value in asdict(options.config).items()}
    return MappedRank(options.settings, options.memory, model.kv_cache_specs, model.layouts, fingerprint)


def _make_runner(model: ReferenceModel, memory: Worker | MappedRank, options: RankOptions) -> ModelRunner:
    pool = memory.wait_ready(START_SECONDS)
    for cache in () if options.memory else pool.kv_caches.values():  # reads before writes then show in the logits
        for tensor in (cache,) if isinstance(cache, torch.Tensor) else cache:
            tensor.fill_(torch.nan)
    limits = RunnerLimits(options.max_num_reqs, pool.max_model_len, options.settings.options.max_num_batched_tokens)
    return ModelRunner(model, pool, limits, memory.device)


def _run_steps(
    runner: ModelRunner, memory: Worker | MappedRank, options: RankOptions, parent: "Connection[Any, Any]"
) -> None:
    rank, world_size = options.settings.rank, options.settings.world_size
    last_stage = world_size - options.tp_size
    if rank:
        parent.send(None)
        _follow(runner, rank, last_stage)
        return
    server = StepServer(options.folder / "steps", options.authkey)
    threading.Thread(target=_stop_with_parent, args=(parent, server), daemon=True).start()
    parent.send(None)
    _lead(runner, memory, server, world_size, last_stage)


def _stop_with_parent(parent: "Connection[Any, Any]", server: StepServer) -> None:
    with contextlib.suppress(EOFError, OSError):
        parent.recv()
    server.stop()


def _lead(
    runner: ModelRunner, memory: Worker | MappedRank, server: StepServer, world_size: int, last_stage: int
) -> None:
    """Rank 0: sends steps and session ends to all ranks, and receives the tokens of the last stage.

    It holds a step's ticket for all ranks: when it has the tokens, all ranks have written their blocks, because each
    layer ends with a sum over its ranks, each stage waits for the previous one, and the tokens were copied to the host.
    """

    def execute(step: StepInput) -> list[int]:
        with memory.step(step.lease):
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
    """Other ranks: runs the steps of rank 0 until it sends None."""
    while True:
        received: list[StepInput | str | None] = [None]
        distributed.broadcast_object_list(received)
        command = received[0]
        if command is None:
            return
        if isinstance(command, str):
            runner.end_session(command)
            continue
        tokens = runner.execute(command)
        if last_stage and rank == last_stage:
            distributed.send_object_list([tokens or []], 0)


def _from_last_stage(tokens: list[int] | None, last_stage: int) -> list[int]:
    """Receives the tokens of the first rank of the last stage."""
    received: list[list[int]] = [tokens or []]
    distributed.recv_object_list(received, last_stage)
    return received[0]
