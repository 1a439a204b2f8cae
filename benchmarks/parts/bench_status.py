"""Measures what the status page costs a server: processor time with viewers and without. Prints one JSON object.

    PYTHONPATH=tests python -m benchmarks.parts.bench_status [--num-blocks N] [--viewers N] [--seconds S]

A pool of 2^20 blocks, half of them held and half cached, is at rest. Viewers read the stream. Processor time
is that of the whole server process, so the difference is the cost of the page. `loop_ms_per_copy` is the part of it in
the event loop that allocates, as the server reports it. In a second phase a client sends decode steps; their times with
and without viewers are in turns.
"""

import argparse
import contextlib
import json
import statistics
import threading
import time
import urllib.request
from http.client import HTTPException, HTTPResponse
from typing import Self

from benchmarks.machine import processor_us
from benchmarks.parts.bench_metrics import Decodes
from kvpool.client import connect
from support.server import ServerProcess, free_port

WARM_UP_SECONDS = 3.0
"""The first copies, and the connections of the viewers, cost more than later ones."""
COPY_SECONDS = 2.0
"""The interval of the page's copies, each of which reports the cost of the one before."""


class Viewers:
    """Clients that read the stream of the page until the end of the block."""

    def __init__(self, port: int, count: int) -> None:
        self.num_bytes = 0
        self._answers = [urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v2/stream") for _ in range(count)]
        self._threads = [threading.Thread(target=self._read, args=(each,), daemon=True) for each in self._answers]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for answer in self._answers:
            answer.fp.raw._sock.shutdown(2)
        for thread in self._threads:
            thread.join()

    def _read(self, answer: HTTPResponse) -> None:
        with contextlib.suppress(HTTPException):  # the stream is shut down
            while part := answer.read1(2**16):
                self.num_bytes += len(part)


def share_of_a_core(process_id: int, seconds: float) -> float:
    """Processor time per second of a process, over the next seconds."""
    before, start = processor_us(process_id) or 0.0, time.perf_counter()
    time.sleep(seconds)  # the time over which it is measured
    return ((processor_us(process_id) or 0.0) - before) / 1e6 / (time.perf_counter() - start)


def cost_seconds(port: int) -> float:
    """Time in the allocator's loop for the copy before the newest."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v2/server.json") as answer:
        return float(json.load(answer)["cost_seconds"])


def measure(num_blocks: int, num_viewers: int, seconds: float) -> dict[str, float]:
    port = free_port()
    with (
        ServerProcess("127.0.0.1:0", metrics={"address": f"127.0.0.1:{port}"}) as server,
        connect(server.addresses[0]) as client,
    ):
        decodes = Decodes(client, num_blocks)
        decodes.fill(num_blocks)
        info = client.get_pool("bench")
        idle = share_of_a_core(server.pid, seconds)
        costs: list[float] = []
        with Viewers(port, num_viewers) as viewers:
            time.sleep(WARM_UP_SECONDS)
            before = viewers.num_bytes
            viewed = share_of_a_core(server.pid, seconds)
            num_bytes = viewers.num_bytes - before
            for _ in range(5):
                costs.append(cost_seconds(port))
                time.sleep(COPY_SECONDS)
        took: dict[bool, list[float]] = {False: [], True: []}
        for i in range(6):
            if i % 2:
                with Viewers(port, num_viewers):
                    took[True] += [decodes.step() for _ in range(200)]
            else:
                took[False] += [decodes.step() for _ in range(200)]
        return {
            "num_blocks": num_blocks,
            "cached_blocks": info.cached_blocks,
            "viewers": num_viewers,
            "core_percent_without_viewers": 100 * idle,
            "core_percent_with_viewers": 100 * viewed,
            "core_percent_of_the_page": 100 * (viewed - idle),
            "loop_ms_per_copy": 1000 * statistics.median(costs),
            "kilobytes_per_second_and_viewer": num_bytes / seconds / num_viewers / 1000,
            **{
                f"step_ms_{name}_viewers_{quantile}": value
                for name, is_viewed in (("without", False), ("with", True))
                for quantile, value in (
                    ("p50", statistics.median(took[is_viewed])),
                    ("p99", sorted(took[is_viewed])[len(took[is_viewed]) * 99 // 100]),
                )
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-blocks", type=int, default=2**20)
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    result = measure(arguments.num_blocks, arguments.viewers, arguments.seconds)
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))  # noqa: T201 - the program's output


if __name__ == "__main__":
    main()
