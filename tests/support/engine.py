"""An engine's processes, as far as fencing goes: a rank that runs steps as slowly as a test wants, and a scheduler.

A step writes its mark into every block of its table, when it starts and again when it ends.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, TypeAlias, cast

from support import processes
from support.logging_process import LoggingProcess
from support.waiting import DEADLINE_SECONDS
from support.workers import LAYER, LAYERS

PROMPT = list(range(100))
_PROGRAM = processes.PYTHON, "-m", "support.engine"

_Pipe: TypeAlias = "Connection[Any, Any]"


class Engine(LoggingProcess):
    """Rank 0 of a pool, in a process of its own that embeds a `Worker`."""

    def __init__(self, server: str, world_size: int, folder: Path) -> None:
        self._path = folder / "steps"
        super().__init__(*_PROGRAM, "engine", server, str(world_size), str(self._path))

    def wait_ready(self) -> None:
        """Waits until the rank accepts steps."""
        self.wait_for("takes steps")
        self._pipe: _Pipe = Client(str(self._path), "AF_UNIX")

    def step(self, lease: object, block_ids: list[int], mark: int) -> str:
        """Runs a step; returns "ran" or the reason of the refusal."""
        return cast("str", self._ask("step", lease, block_ids, mark))

    def hold(self) -> None:
        """Holds every later step until `let_go`."""
        self._ask("hold")

    def wait_until_held(self) -> None:
        """Waits until a step is running."""
        self._ask("wait_until_held")

    def let_go(self) -> None:
        """Releases the held step."""
        self._ask("let_go")

    def heartbeats(self) -> int:
        """Number of answered heartbeats."""
        return cast("int", self._ask("heartbeats"))

    def marks(self, block_ids: list[int]) -> set[int]:
        """Contents of blocks."""
        return cast("set[int]", self._ask("marks", block_ids))

    def _ask(self, *order: object) -> object:
        self._pipe.send(order)
        assert self._pipe.poll(DEADLINE_SECONDS), order
        return self._pipe.recv()


class Scheduler(LoggingProcess):
    """A scheduler with one request and a lease of three seconds, which hands its tables to the engine twice."""

    def __init__(self, server: str, folder: Path) -> None:
        super().__init__(*_PROGRAM, "scheduler", server, str(folder / "steps"))


def _tell(*words: object) -> None:
    sys.stderr.write(" ".join(map(str, words)) + "\n")
    sys.stderr.flush()


def _schedule(server: str, path: str) -> None:
    from kvpool.client import KvpoolError, connect  # noqa: PLC0415 - each process imports what it needs

    with connect(server) as client:
        session = client.open_session("m", client_name="stopped", lease_seconds=3.0)
        request = session.request("r", PROMPT)
        session.admit(request)
        engine: _Pipe = Client(path, "AF_UNIX")
        for _ in range(2):
            engine.send(("step", session.table_lease, request.block_ids[0], 1))
            _tell("blocks", *request.block_ids[0])
            _tell("step", engine.recv())
        try:
            session.free(request)
        except KvpoolError as error:
            _tell("session", error.reason)


def _run_engine(server: str, world_size: str, path: str) -> None:
    from kvpool.core.ranks.messages import RankGroupOptions  # noqa: PLC0415
    from kvpool.core.specs.kinds import FullAttentionSpec  # noqa: PLC0415
    from kvpool.gpu_worker.worker import Worker, WorkerSettings  # noqa: PLC0415
    from kvpool.lending.fence import StaleTablesError  # noqa: PLC0415 - schedulers have no torch

    spec = FullAttentionSpec(*(cast("Any", value) for name, value in LAYER.items() if name != "type"))
    settings = WorkerSettings(
        server, "m", 0, int(world_size), RankGroupOptions(512), device="cpu", memory_bytes=100 * 2**14
    )
    free, held = threading.Event(), threading.Event()
    free.set()
    with Worker(settings, dict.fromkeys(LAYERS, spec)) as worker:
        cache: Any = worker.wait_ready(DEADLINE_SECONDS).kv_caches["layer.0"]

        def step(lease: Any, block_ids: list[int], mark: int) -> str:
            try:
                with worker.step(lease):
                    cache[:, block_ids] = mark
                    held.set()
                    free.wait()
                    cache[:, block_ids] = mark
            except StaleTablesError as error:
                return error.reason
            return "ran"

        orders: dict[str, Callable[..., object]] = {
            "step": step,
            "hold": free.clear,
            "wait_until_held": held.wait,
            "let_go": free.set,
            "heartbeats": lambda: worker.usage.heartbeats,
            "marks": lambda block_ids: {int(mark) for mark in cache[:, block_ids].unique()},
        }

        def serve(pipe: _Pipe) -> None:
            with contextlib.suppress(EOFError):
                while True:
                    order, *arguments = pipe.recv()
                    pipe.send(orders[order](*arguments))

        with Listener(path, "AF_UNIX") as listener:
            _tell("takes steps")
            while True:
                threading.Thread(target=serve, args=(listener.accept(),), daemon=True).start()


if __name__ == "__main__":
    _programs: dict[str, Callable[..., None]] = {"engine": _run_engine, "scheduler": _schedule}
    _programs[sys.argv[1]](*sys.argv[2:])
