"""What metrics cost: a step with them on and off, and a scrape of a full pool under load; prints one JSON object.

Steps: two servers, one with metrics and one without, take turns in one run, decode steps of 256 requests through a
unix socket; a Prometheus' worth of scrapes goes on meanwhile (one a second; real ones are rarer). Scrape: a pool of
1,000,000 blocks, all used or cached, under steps without pause; how long each scrape took, how long steps took while
one was in flight and while none was.
"""

import argparse
import contextlib
import json
import multiprocessing
import random
import statistics
import time
import urllib.request
from collections.abc import Iterator
from multiprocessing import Queue
from multiprocessing.synchronize import Event as EventType

from kvpool.client import Client, FullAttentionSpec, KVCacheGroup, PoolConfig, Request, Session, connect
from kvpool.core.ids import PoolName
from support.server import free_port, running_server

BLOCK_SIZE, NUM_REQUESTS = 16, 256


class Decodes:
    """A session whose 256 requests decode."""

    def __init__(self, client: Client, num_blocks: int) -> None:
        group = KVCacheGroup(FullAttentionSpec(BLOCK_SIZE), ("layer.0",))
        client.create_pool(PoolConfig(PoolName("bench"), num_blocks, 65_536, (group,)))
        self._random = random.Random(0)  # noqa: S311 - a workload
        self._session: Session = client.open_session("bench")
        self._count = 0
        self._requests: list[Request] = []
        self._start()

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(100_000) for _ in range(count)]

    def _start(self) -> None:
        for request in self._requests:
            self._session.free(request)
        self._requests = [self._new(BLOCK_SIZE * 4 + i % BLOCK_SIZE) for i in range(NUM_REQUESTS)]
        for request in self._requests:
            self._session.admit(request)
        self._left = 1000

    def _new(self, num_tokens: int) -> Request:
        self._count += 1
        return self._session.request(f"r{self._count}", self._tokens(num_tokens))

    def fill(self, num_blocks: int) -> None:
        """Fills the pool with cached blocks, half of them held."""
        for i in range(num_blocks // 4000):
            request = self._new(4000 * BLOCK_SIZE)
            if self._session.admit(request) is None:
                break
            self._session.mark_executed()
            if i % 2:
                self._session.free(request)

    def step(self) -> float:
        """Runs a decode step; returns its milliseconds."""
        self._left -= 1
        if not self._left:
            self._start()
        for request in self._requests:
            request.append([self._random.randrange(100_000)])
        start = time.perf_counter()
        with self._session.step(executed_sequence=self._session.sequence) as step:
            for request in self._requests:
                step.allocate_slots(request, 1)
        return (time.perf_counter() - start) * 1000


def scrapes(port: int, pause_seconds: float, stop: "EventType", spans: "Queue[list[tuple[float, float]]]") -> None:
    """Scrapes until told to stop, in a process of its own; then tells when each scrape began and ended."""
    done = []
    while not stop.wait(pause_seconds):
        start = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            answer.read()
        done.append((start, time.perf_counter()))
    spans.put(done)


@contextlib.contextmanager
def scraping(port: int, pause_seconds: float) -> Iterator[list[tuple[float, float]]]:
    """Scrapes meanwhile; what it yields is filled at the end."""
    context = multiprocessing.get_context("spawn")
    stop, spans = context.Event(), context.Queue()
    process = context.Process(target=scrapes, args=(port, pause_seconds, stop, spans), daemon=True)
    process.start()
    done: list[tuple[float, float]] = []
    yield done
    stop.set()
    done += spans.get()
    process.join()


@contextlib.contextmanager
def bench_server(*, metrics: bool) -> Iterator[tuple[str, int]]:
    """A server; yields its address, and the port of its metrics."""
    port = free_port()
    settings = {"metrics": {"address": f"127.0.0.1:{port}"}} if metrics else {}
    with running_server(**settings) as address:
        yield address, port


def cost_of_a_step(rounds: int) -> dict[str, float]:
    """Decode steps with metrics and without, in turns."""
    with contextlib.ExitStack() as stack:
        (with_metrics, port), (without, _) = (stack.enter_context(bench_server(metrics=on)) for on in (True, False))
        sides = {
            name: Decodes(stack.enter_context(connect(address)), 100_000)
            for name, address in (("on", with_metrics), ("off", without))
        }
        stack.enter_context(scraping(port, 1.0))
        took: dict[str, list[float]] = {name: [] for name in sides}
        ratios = []
        for i in range(rounds):
            pair = {name: sides[name].step() for name in (("on", "off") if i % 2 else ("off", "on"))}
            for name, took_ms in pair.items():
                took[name].append(took_ms)
            ratios.append(pair["on"] / pair["off"])
        on, off = (statistics.median(took[name]) for name in ("on", "off"))
        return {
            "on_us": on * 1000,
            "off_us": off * 1000,
            "ratio": on / off,
            "median_of_ratios": statistics.median(ratios),
        }


def cost_of_a_scrape(num_blocks: int, seconds: float) -> dict[str, float]:
    """Scrapes of a full pool under load."""
    with bench_server(metrics=True) as (address, port), connect(address) as client:
        decodes = Decodes(client, num_blocks)
        decodes.fill(num_blocks)
        info = client.get_pool("bench")
        steps = []
        with scraping(port, 0.05) as spans:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                start = time.perf_counter()
                steps.append((start, start + decodes.step() / 1000))
        during = [step for step in steps if any(span[0] < step[1] and step[0] < span[1] for span in spans)]
        between = [step for step in steps if step not in during]
        result: dict[str, float] = {
            "num_blocks": num_blocks,
            "cached_blocks": info.cached_blocks,
            "scrapes": len(spans),
        }
        for name, timed in (("scrape", spans), ("step_during_a_scrape", during), ("step_between", between)):
            took_ms = sorted((stop - start) * 1000 for start, stop in timed)
            result |= {
                f"{name}_ms_p50": statistics.median(took_ms),
                f"{name}_ms_p99": took_ms[len(took_ms) * 99 // 100],
                f"{name}_ms_max": took_ms[-1],
            }
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--num-blocks", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    result = {
        "step": cost_of_a_step(arguments.rounds),
        "scrape": cost_of_a_scrape(arguments.num_blocks, arguments.seconds),
    }
    rounded = {part: {name: round(value, 3) for name, value in figures.items()} for part, figures in result.items()}
    print(json.dumps(rounded))  # noqa: T201 - what it is for


if __name__ == "__main__":
    main()
