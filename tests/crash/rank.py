"""A rank of a run, `python -m crash.rank SERVER FOLDER RANK WORLD`: a real `Worker` that receives steps on a socket.

Only its fence decides which steps run. It has one memory file per epoch, as a real rank has tensors per epoch.
"""

import logging
import sys
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Final

from crash.execution import AUTHKEY, Outcome, compute, rank_memory, rank_path
from crash.memory import Memory
from crash.scheduler import LONGEST_TOKENS, RANKED_POOL
from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.worker import Worker
from kvpool.lending.fence import StaleTablesError

RANK_BLOCKS: Final = 64
_SPEC: Final = FullAttentionSpec(4, 1, 16, "float32")


def main() -> None:
    """Serves steps until it is killed."""
    server, folder, rank, world_size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    logging.basicConfig(level="INFO")
    settings = WorkerSettings(
        server,
        RANKED_POOL,
        rank,
        world_size,
        RankGroupOptions(max_model_len=LONGEST_TOKENS, max_num_batched_tokens=LONGEST_TOKENS),
        device="cpu",
        memory_bytes=RANK_BLOCKS * _SPEC.page_size_bytes,
    )
    path = rank_path(folder, rank)
    path.unlink(missing_ok=True)
    with Worker(settings, {"layer": _SPEC}) as worker, Listener(str(path), "AF_UNIX", authkey=AUTHKEY) as listener:
        while True:
            try:
                pipe = listener.accept()
            except (AuthenticationError, EOFError, OSError):  # the scheduler was killed while connecting
                continue
            threading.Thread(target=_serve, args=(pipe, worker, folder, rank), daemon=True).start()


def _serve(pipe: "Connection[Any, Any]", worker: Worker, folder: Path, rank: int) -> None:
    """Runs the steps of one scheduler until it disconnects."""
    try:
        while True:
            lease, tasks, seconds = pipe.recv()
            try:
                with worker.step(lease):
                    time.sleep(seconds)
                    pipe.send(compute(Memory(folder, rank_memory(rank, lease.epoch), RANK_BLOCKS), tasks))
            except StaleTablesError as error:
                pipe.send(Outcome(error.reason))
    except (EOFError, OSError):
        pipe.close()


if __name__ == "__main__":
    main()
