"""Measures the cost of block events: steps with events, and steps during a snapshot. Prints one JSON object.

A pool has 1,000,000 blocks of 16 tokens, all cached. Server and clients are separate processes. A step admits an
uncached prompt of 16 blocks, which evicts 16 blocks, and frees it. Machines are noisy: compare within one run only.
"""

import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvpool.client import FullAttentionSpec, KVCacheGroup, PoolConfig, PrefixIndex, Session, connect
from kvpool.core.ids import PoolName
from support.server import ServerProcess

NUM_BLOCKS, BLOCK_SIZE, STEP_BLOCKS = 1_000_000, 16, 16
FILL_BLOCKS = 2048


def config(name: str, *, events: bool) -> PoolConfig:
    group = KVCacheGroup(FullAttentionSpec(BLOCK_SIZE), ("layer.0",))
    return PoolConfig(PoolName(name), NUM_BLOCKS, 65_536, (group,), enable_events=events)


class Load:
    """A session that fills the pool and then evicts blocks."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count = 0

    def serve(self, num_blocks: int) -> float:
        """Serves one request; returns the time of its admission in seconds."""
        self._count += 1
        request = self._session.request(f"r{self._count}", [self._count] * (num_blocks * BLOCK_SIZE))
        start = time.perf_counter()
        self._session.admit(request)
        seconds = time.perf_counter() - start
        self._session.free(request)
        return seconds

    def serve_for(self, num_steps: int) -> list[float]:
        return [self.serve(STEP_BLOCKS) for _ in range(num_steps)]


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    picks = {"p50_ms": statistics.median(ordered), "p99_ms": ordered[int(len(ordered) * 0.99)], "max_ms": ordered[-1]}
    return {name: round(value * 1000, 2) for name, value in picks.items()}


def watch(address: str, sizes: Any) -> None:
    with connect(address) as client:
        index, start = PrefixIndex(), time.perf_counter()
        for batch in client.watch("m", snapshot=True):
            index.apply(batch)
            if index.is_whole:
                sizes.put((len(index), time.perf_counter() - start))
                return


def during_snapshot(load: Load, where: str) -> dict[str, Any]:
    """Measures steps while another process takes a snapshot."""
    sizes: Any = multiprocessing.Queue()
    process = multiprocessing.Process(target=watch, args=(where, sizes))
    process.start()
    seconds: list[float] = []
    while sizes.empty():
        seconds += load.serve_for(5)
    num_blocks, took_seconds = sizes.get()
    process.join()
    return {"steps": summary(seconds), "blocks": num_blocks, "snapshot_seconds": round(took_seconds, 2)}


def server_rss_bytes(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024


def run(folder: Path) -> Iterator[tuple[str, Any]]:
    for name, events in (("no_events", False), ("events", True)):
        where = f"unix:{folder / name}"
        server = ServerProcess(where)
        with connect(where) as client:
            client.create_pool(config("m", events=events))
            with client.open_session("m") as session:
                load = Load(session)
                for _ in range(NUM_BLOCKS // FILL_BLOCKS):
                    load.serve(FILL_BLOCKS)
                yield f"{name}_rss_mib", server_rss_bytes(server) // 2**20
                yield f"{name}_steps", summary(load.serve_for(2000))
                if events:
                    yield "during_snapshot", during_snapshot(load, where)
        server.stop()


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    with TemporaryDirectory() as temporary:
        print(json.dumps(dict(run(Path(temporary))), indent=2))  # noqa: T201
