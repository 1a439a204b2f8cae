"""Measures how long a pool takes to form: from the registration of the last rank to ready. Prints one JSON object.

    PYTHONPATH=tests python -m benchmarks.parts.bench_ranks [WORLD_SIZE ...]

The times come from the server's log: the last "rank registered" before "pool ready". They include the plan, the
allocation of each rank and the messages, but not the start of Python and torch. Workers are processes on CPU.
"""

import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from statistics import median

KVPOOL = str(Path(sys.executable).parent / "kvpool")
ROUNDS = 3
LAYERS = 32

MEMORY_BYTES = 2**28


def milliseconds_to_ready(world_size: int, folder: Path) -> float:
    """Forms a pool with the layers of a model like Llama 3 8B, once."""
    address = f"unix:{folder / 'socket'}"
    with subprocess.Popen(
        [KVPOOL, "serve", "--listen", address, "--no-journal"], stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr
        while "kvpool: listening" not in server.stderr.readline():
            pass
        workers = [start_worker(address, rank, world_size, folder / "layers.json") for rank in range(world_size)]
        registered, ready = None, None
        for line in server.stderr:
            at = datetime.fromisoformat(line[:23].replace(",", "."))
            if "rank registered" in line:
                registered = at
            if "pool ready" in line:
                ready = at
                break
        for worker in workers:
            worker.terminate()
            worker.wait()
        server.terminate()
        server.stderr.read()
    if registered is None or ready is None:
        raise SystemExit("the pool did not form")
    return (ready - registered).total_seconds() * 1000


def start_worker(address: str, rank: int, world_size: int, layers: Path) -> "subprocess.Popen[bytes]":
    """Starts a tensor rank. Ranks with higher numbers have less memory."""
    flags = {
        "server": address,
        "pool": "bench",
        "rank": rank,
        "world-size": world_size,
        "tp": world_size,
        "layers": layers,
        "max-model-len": 256,
        "device": "cpu",
        "memory": MEMORY_BYTES - rank * 2**20,
        "log-level": "error",
    }
    arguments = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([KVPOOL, "worker", *arguments], stderr=subprocess.DEVNULL, env=environment)


def main() -> None:
    """Prints the medians."""
    spec = {"type": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
    layers = {"layers": {f"model.layers.{i}.self_attn.attn": spec for i in range(LAYERS)}}
    figures = {}
    for world_size in [int(word) for word in sys.argv[1:]] or [1, 2, 8]:
        times = []
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "layers.json").write_text(json.dumps(layers))
                times.append(milliseconds_to_ready(world_size, Path(folder)))
        figures[f"last_register_to_ready_{world_size}_ranks_ms"] = round(median(times), 1)
    sys.stdout.write(json.dumps({**figures, "memory_bytes_a_rank": MEMORY_BYTES, "layers": LAYERS}) + "\n")


if __name__ == "__main__":
    main()
