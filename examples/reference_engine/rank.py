"""A rank's process: its part of the model, its share of the pool's memory, and the loop that runs steps.

1. Rank 0 checks a step and refuses it, or hands it to all ranks; what fails after that ends them all. Ranks that no
   longer agree must not go on.
2. All ranks end with the parent, however that ends: rank 0 watches its end of a pipe, and the others rank 0.
"""

import contextlib
import logging
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed

from examples.reference_engine.collectives import Alone, Collectives, ProcessGroup
from examples.reference_engine.config import ReferenceConfig
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
"""How long the other ranks are waited for."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """What a rank is started with.

    Attributes:
        settings: Who and where it is.
        config: The model.
        tp_size: Ranks that share the heads of a layer; what is left of the world is stages.
        folder: Where ranks meet and rank 0 listens; empty, and its owner's alone.
        authkey: What schedulers must know.
        max_num_reqs: Requests running at once, of all schedulers.
        layout: How attention layers see their pages.
        num_threads: Threads that torch may use on CPU.
    """

    settings: WorkerSettings
    config: ReferenceConfig
    tp_size: int
    folder: Path
    authkey: bytes
    max_num_reqs: int
    layout: str = "flash_attn"
    num_threads: int = 1


def run_rank(options: RankOptions, parent: "Connection[Any, Any]") -> None:
    """Runs a rank until the parent sends anything or is gone.

    Says None to the parent when it takes steps, or why it cannot.
    """
    logging.basicConfig(level=logging.ERROR)  # that another rank ends a moment before this one is no trouble
    torch.set_num_threads(options.num_threads)
    settings = options.settings
    world_size = settings.world_size
    placement = Placement.of_rank(settings.rank, options.tp_size, world_size // options.tp_size)
    group = ProcessGroup(placement, options.folder / "ranks", settings.rank) if world_size > 1 else None
    collectives: Collectives = group or Alone()
    device = open_device(settings.device)
    model = ReferenceModel(options.config, device, collectives, placement, options.layout)
    try:
        with Worker(settings, model.kv_cache_specs, layouts=model.layouts) as worker:
            runner = _make_runner(model, worker, options)
            _take_steps(runner, worker, options, parent)
    except KvpoolError as error:
        with contextlib.suppress(OSError):  # the parent has heard of another rank, and goes
            parent.send(f"{error.reason}: {error}")
    finally:
        if group:
            group.close()


def _make_runner(model: ReferenceModel, worker: Worker, options: RankOptions) -> ModelRunner:
    pool = worker.wait_ready(START_SECONDS)
    for cache in pool.kv_caches.values():  # whatever is read before it is written shows in the logits
        for tensor in (cache,) if isinstance(cache, torch.Tensor) else cache:
            tensor.fill_(torch.nan)
    limits = RunnerLimits(options.max_num_reqs, pool.max_model_len, options.settings.options.max_num_batched_tokens)
    return ModelRunner(model, pool, limits, worker.device)


def _take_steps(runner: ModelRunner, worker: Worker, options: RankOptions, parent: "Connection[Any, Any]") -> None:
    rank, world_size = options.settings.rank, options.settings.world_size
    last_stage = world_size - options.tp_size
    if rank:
        parent.send(None)
        _follow(runner, rank, last_stage)
        return
    server = StepServer(options.folder / "steps", options.authkey)
    threading.Thread(target=_stop_with_parent, args=(parent, server), daemon=True).start()
    parent.send(None)
    _lead(runner, worker, server, world_size, last_stage)


def _stop_with_parent(parent: "Connection[Any, Any]", server: StepServer) -> None:
    with contextlib.suppress(EOFError, OSError):
        parent.recv()
    server.stop()


def _lead(runner: ModelRunner, worker: Worker, server: StepServer, world_size: int, last_stage: int) -> None:
    """Rank 0: hands steps and endings to all ranks, and gets the tokens of the last stage.

    It holds a step's ticket for all: when it has the tokens, all ranks have written their blocks, since each layer ends
    in a sum over its ranks, each stage waits for the one before, and the tokens were copied to the host.
    """

    def execute(step: StepInput) -> list[int]:
        with worker.step(step.lease):
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
